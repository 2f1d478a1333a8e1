"""Where episodes of the assembly task start: sampled poses, settled and validated by a short rollout."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied.sim.resets import ResetBank, collect_valid, content_hash
from embodied.sim.robots.arm import REFERENCE_QUAT
from embodied.sim.robots.kinematics import inverse
from embodied.sim.tasks.cell import CENTRE, MOUTH_HEIGHT
from embodied.spec.protocols import Engine
from embodied.spec.rotations import quat_multiply, quat_to_rotvec, rotate, rotvec_to_quat

if TYPE_CHECKING:
    from embodied.sim.tasks.assembly import Assembly

SETTLE_STEPS = 8  # control steps a start is held before it is judged
BANK_SEED = 20261130  # every run of the same task starts from the same bank
VERSION = 1  # of this file's distributions: part of a bank's content hash


def sample_poses(task: Assembly, tag: str, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Socket poses and tool poses relative to them, float64.

    Returns:
        `socket_pos` [n, 3], `yaw` [n] of the socket; `offset` [n, 3] of the tip in the socket's frame (z into the hole) and
        `turn` [n, 3], the rotation vector of the tool in it.
    """

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def signed(*shape: int) -> Tensor:
        return 2.0 * uniform(*shape) - 1.0

    def log_uniform(low: float, high: float) -> Tensor:
        return low * (high / low) ** uniform(count)

    options, part = task.options, task.part
    socket_pos = torch.cat(
        [torch.tensor(CENTRE) + options.socket_range * signed(count, 2), torch.full((count, 1), MOUTH_HEIGHT)], -1
    )
    yaw = math.radians(options.socket_yaw) * signed(count)
    max_tilt, max_yaw = math.radians(10.0), math.radians(20.0)
    tilt_axis = 2.0 * math.pi * uniform(count)
    if tag == "inserted":
        # half of them evenly over the depth, for each millimetre is a step to be learned; half log-uniform in what remains,
        # for the first successes come from the very end
        full = options.success_depth + 0.002
        depth = torch.where(uniform(count) < 0.5, full * uniform(count), full - log_uniform(0.001, full))
        lateral = 0.7 * options.clearance * signed(count, 2)
        # the widest tilt that the clearance lets through at this depth
        room = (2.0 * options.clearance / depth.clamp(min=0.004)).clamp(max=max_tilt)
        tilt, twist = 0.4 * room * uniform(count), 0.3 * (2.0 * options.clearance / part.side) * signed(count)
    elif tag == "near":
        height = log_uniform(0.0003, 0.03)
        depth = -height
        lateral = (0.0003 + 0.4 * height)[:, None] * signed(count, 2)
        share = (height / 0.03).clamp(min=0.05)
        tilt, twist = max_tilt * share * uniform(count), max_yaw * share * signed(count)
    else:
        distance = 0.03 + 0.07 * uniform(count)
        # within 60 degrees of straight above, uniform over that cap
        cosine = 0.5 + 0.5 * uniform(count)
        around = 2.0 * math.pi * uniform(count)
        sine = (1.0 - cosine**2).sqrt()
        lateral = (distance * sine)[:, None] * torch.stack([around.cos(), around.sin()], -1)
        depth = -distance * cosine
        tilt, twist = max_tilt * uniform(count), max_yaw * signed(count)
    turn = torch.stack([tilt * tilt_axis.cos(), tilt * tilt_axis.sin(), twist], -1)
    return {"socket_pos": socket_pos, "yaw": yaw, "offset": torch.cat([lateral, depth[:, None]], -1), "turn": turn}


def settle(task: Assembly, engine: Engine, poses: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
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
    engine.step(task.substeps * SETTLE_STEPS)
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


def bank_hash(task: Assembly, signature: str) -> str:
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
    robot = task.arm.spec  # what is not in the signature, which holds the whole model
    placed = {"name": robot.name, "home": robot.home, "control_dt": robot.control_dt}
    return content_hash({"version": VERSION, "signature": signature, "robot": placed, "options": kept})


def make_bank(task: Assembly, engine: Engine) -> ResetBank:
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
    return ResetBank(torch.cat(rows), torch.cat(tags), task.tag_names, engine.signature, key)


def starts(task: Assembly, engine: Engine, tag: str, count: int, generator: torch.Generator) -> Tensor:
    """`count` valid start rows of a kind, [count, S]."""

    def propose(size: int) -> tuple[Tensor, Tensor]:
        poses = sample_poses(task, tag, min(size, engine.num_worlds), generator)
        return settle(task, engine, poses)

    return collect_valid(propose, count, tag)
