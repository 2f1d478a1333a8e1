"""Where episodes of the assembly task start: sampled poses, settled and validated by a short rollout."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Protocol

import torch
from torch import Tensor

from embodied.sim.resets import ResetBank, collect_valid, content_hash
from embodied.sim.robots.arm import REFERENCE_QUAT, Arm
from embodied.sim.robots.kinematics import inverse
from embodied.sim.tasks.assembly_options import AssemblyOptions
from embodied.sim.tasks.cell import CENTRE, MOUTH_HEIGHT
from embodied.sim.tasks.parts.part import Draw, Part, Place
from embodied.spec.observe import turn_about_z
from embodied.spec.policy import PolicySpec, SuccessSpec
from embodied.spec.protocols import Engine
from embodied.spec.rotations import quat_conjugate, quat_multiply, quat_to_rotvec, rotate, rotate_inverse, rotvec_to_quat

SETTLE_STEPS = 8  # control steps a start is held before it is judged
BANK_SEED = 20261130  # every run of the same task starts from the same bank
VERSION = 2  # of the distributions here and of the parts: part of a bank's content hash
MAX_TILT, MAX_TWIST = math.radians(10.0), math.radians(20.0)  # of a tool that is not in the socket yet


class Insertion(Protocol):
    """What starts depend on of the task."""

    arm: Arm
    part: Part
    options: AssemblyOptions
    spec: PolicySpec
    success: SuccessSpec
    sensors: dict[str, slice]
    tag_names: tuple[str, ...]

    def controls(self, pos: Tensor, quat: Tensor) -> Tensor:
        """Actuator controls [N, 6] for a tool pose."""
        ...


def sample_poses(task: Insertion, tag: str, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Socket poses and tool poses relative to them, float64.

    Returns:
        `socket_pos` [n, 3], `yaw` [n] of the socket; `offset` [n, 3] of the tip in the socket's frame (z into the hole) and
        `turn` [n, 3], the rotation vector of the tool in it.
    """
    draw, options = Draw(generator, count), task.options
    socket_pos = torch.cat(
        [torch.tensor(CENTRE) + options.socket_range * draw.signed(2), torch.full((count, 1), MOUTH_HEIGHT)], -1
    )
    yaw = math.radians(options.socket_yaw) * draw.signed()
    tilt_axis = 2.0 * math.pi * draw.uniform()
    if tag == "inserted":
        place = task.part.inserted(draw, options.clearance, task.success.depth)
    else:
        place = _near(draw) if tag == "near" else _far(draw)
    turn = torch.stack([place.tilt * tilt_axis.cos(), place.tilt * tilt_axis.sin(), place.twist], -1)
    offset = torch.cat([place.lateral, place.depth[:, None]], -1)
    return {"socket_pos": socket_pos, "yaw": yaw, "offset": offset, "turn": turn}


def _near(draw: Draw) -> Place:
    """Above the mouth, the nearer the better aligned."""
    height = draw.log_uniform(0.0003, 0.03)
    lateral = (0.0003 + 0.4 * height)[:, None] * draw.signed(2)
    share = (height / 0.03).clamp(min=0.05)
    return Place(-height, lateral, MAX_TILT * share * draw.uniform(), MAX_TWIST * share * draw.signed())


def _far(draw: Draw) -> Place:
    """Within 60 degrees of straight above, uniform over that cap."""
    distance = 0.03 + 0.07 * draw.uniform()
    cosine = 0.5 + 0.5 * draw.uniform()
    around = 2.0 * math.pi * draw.uniform()
    sine = (1.0 - cosine**2).sqrt()
    lateral = (distance * sine)[:, None] * torch.stack([around.cos(), around.sin()], -1)
    return Place(-distance * cosine, lateral, MAX_TILT * draw.uniform(), MAX_TWIST * draw.signed())


def settle(task: Insertion, engine: Engine, poses: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Place the first n of the engine's worlds, hold the tool there, and judge what came of it.

    Returns:
        State rows [n, S], and bool [n]: reachable, at rest, healthy, no deeper in the walls than success allows, and not
        thrown from where it was put (2 mm, 2 degrees).
    """
    count = poses["yaw"].shape[0]
    zero = torch.zeros(count, dtype=torch.float64)
    yaw_quat = torch.stack([(poses["yaw"] / 2).cos(), zero, zero, (poses["yaw"] / 2).sin()], -1)
    socket_quat = quat_multiply(yaw_quat, torch.tensor(REFERENCE_QUAT, dtype=torch.float64).expand(count, 4))
    tool_pos = poses["socket_pos"] + rotate(socket_quat, poses["offset"])
    tool_quat = quat_multiply(socket_quat, rotvec_to_quat(poses["turn"]))
    joints, reachable = inverse(task.arm, tool_pos, tool_quat, task.part.length)
    mask = torch.arange(engine.num_worlds) < count

    def padded(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1].expand(engine.num_worlds - count, *x.shape[1:])]).to(engine.device)

    engine.set_state(engine.default_row.expand(engine.num_worlds, -1), mask.to(engine.device))
    engine.write("qpos", padded(joints), mask)
    engine.write("mocap_pos", padded(poses["socket_pos"])[:, None], mask)
    engine.write("mocap_quat", padded(yaw_quat)[:, None], mask)
    engine.write("ctrl", padded(task.controls(tool_pos, tool_quat)), mask)
    engine.forward(mask)
    engine.step(task.spec.robot.substeps * SETTLE_STEPS)
    data = engine.read("sensordata")[:count].double().cpu()
    at = {name: data[:, where] for name, where in task.sensors.items()}
    turned = quat_to_rotvec(quat_multiply(at["tcp_quat"], tool_quat * torch.tensor([1.0, -1, -1, -1])))
    valid = (
        reachable
        & (engine.health()[:count].cpu() == 0)
        & (at["contact"][:, 0] > -task.options.success_penetration)
        & ((at["tcp_pos"] - tool_pos).norm(dim=-1) < 0.002)
        & (turned.norm(dim=-1) < math.radians(2.0))
        & (at["tcp_linvel"].norm(dim=-1) < 0.01)
    )
    engine.write("time", torch.zeros(engine.num_worlds, dtype=torch.float64), mask)
    return engine.get_state()[:count].cpu(), valid


def bank_hash(task: Insertion, signature: str) -> str:
    """A hash of everything that decides what the bank of this task holds."""
    unrelated = (
        "reward",
        "stray_distance",
        "randomise",
        "see_socket",
        "pose_bias",
        "pose_noise",
        "yaw_bias",
        "episode_s",
        "success_steps",
    )
    kept = {key: value for key, value in asdict(task.options).items() if key not in unrelated}
    kept["success_depth"] = task.success.depth
    robot = task.arm.spec  # what is not in the signature, which holds the whole model
    placed = {"name": robot.name, "home": robot.home, "control_dt": robot.control_dt}
    return content_hash({"version": VERSION, "signature": signature, "robot": placed, "options": kept})


def make_bank(task: Insertion, engine: Engine) -> ResetBank:
    """Generate the training bank on `engine` (its worlds are used up), each start settled and validated."""
    generator = torch.Generator().manual_seed(BANK_SEED)
    shares = asdict(task.options.bank)
    size = shares.pop("size")
    counts = {tag: int(shares[tag] * size) for tag in task.tag_names}
    counts[max(shares, key=lambda tag: shares[tag])] += size - sum(counts.values())
    rows, tags = [], []
    for index, tag in enumerate(task.tag_names):
        if counts[tag]:
            rows.append(starts(task, engine, tag, counts[tag], generator))
            tags.append(torch.full((counts[tag],), index))
    key = bank_hash(task, engine.signature)
    every = torch.cat(rows)
    distance = goal_distance(task, engine, every)
    return ResetBank(every, torch.cat(tags), task.tag_names, engine.signature, key, distance)


def goal_distance(task: Insertion, engine: Engine, rows: Tensor) -> Tensor:
    """How far state rows [n, S] are from where success begins, float64 [n]: distance of the tip [m], and 20 mm for each
    radian that is still to be turned; the engine's worlds are used up.
    """
    count, success = engine.num_worlds, task.success
    reference = torch.tensor(REFERENCE_QUAT, device=engine.device).expand(count, 4)
    found = []
    for part in rows.split(count):
        index = torch.arange(count).clamp(max=len(part) - 1).to(engine.device)
        engine.set_state(part.to(engine.device), index=index)
        data = engine.read("sensordata")
        tip = data[:, task.sensors["tcp_pos"]] - engine.read("mocap_pos")[:, 0]
        socket_quat = quat_multiply(engine.read("mocap_quat")[:, 0], reference)
        pos = rotate_inverse(socket_quat, tip)
        pos[:, 2] = (pos[:, 2] - success.depth).clamp(max=0.0)
        distance = pos.norm(dim=-1)
        if success.turn is not None:
            turned = turn_about_z(quat_multiply(quat_conjugate(socket_quat), data[:, task.sensors["tcp_quat"]]))
            distance = distance + 0.02 * (success.turn - turned).clamp(min=0.0)
        found.append(distance[: len(part)].double().cpu())
    return torch.cat(found)


def starts(task: Insertion, engine: Engine, tag: str, count: int, generator: torch.Generator) -> Tensor:
    """`count` valid start rows of a kind, [count, S]."""

    def propose(size: int) -> tuple[Tensor, Tensor]:
        poses = sample_poses(task, tag, min(size, engine.num_worlds), generator)
        return settle(task, engine, poses)

    return collect_valid(propose, count, tag)
