"""Cells in which a task's script puts parts in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from worlds import make_engine

from embodied.sim.env import WorldsEnv
from embodied.sim.resets import ResetBank
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.ur5e import Ur5eOptions, ur5e
from embodied.sim.samplers.fixed import Fixed
from embodied.sim.tasks import assembly_starts
from embodied.sim.tasks.assembly import Assembly
from embodied.sim.tasks.assembly_options import AssemblyOptions, BankOptions
from embodied.spec.rotations import quat_conjugate, quat_multiply, rotate_inverse

ROBOTS = {"franka": lambda: franka(FrankaOptions()), "ur5e": lambda: ur5e(Ur5eOptions())}
EXACT = {"pose_bias": 0.0, "pose_noise": 0.0, "yaw_bias": 0.0}
"""Options with which the policy sees the socket where it is."""


def cell(part: str, robot: str = "franka", **changes: Any) -> Assembly:
    options = AssemblyOptions(part=part, bank=BankOptions(size=64))
    for name, value in changes.items():
        setattr(options, name, value)
    return Assembly(options, ROBOTS[robot]())


def env_from(task: Assembly, rows: Tensor) -> WorldsEnv:
    """World i starts from row i, nominal."""
    engine = make_engine(task, len(rows))
    bank = ResetBank(rows, torch.zeros(len(rows), dtype=torch.int64), ("x",), engine.signature, "x")
    return WorldsEnv(engine, task, Fixed(len(rows), engine.device), bank, randomise=False, stagger=False)


def place(task: Assembly, depth: Tensor, twist: Tensor, lateral: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """State rows of tools held straight at these depths [n] m, twists [n] rad and lateral offsets [n, 2] m; the poses."""
    count = len(depth)
    poses = assembly_starts.sample_poses(task, "far", count, torch.Generator().manual_seed(0))
    poses["offset"] = torch.cat([torch.zeros(count, 2) if lateral is None else lateral, depth[:, None]], -1).double()
    poses["turn"] = torch.stack([0 * twist, 0 * twist, twist], -1).double()
    rows, _ = assembly_starts.settle(task, make_engine(task, count), poses)
    return rows, poses


def relative(readings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The tip's position [N, 3] and the tool's quaternion [N, 4] in the socket's frame."""
    socket = readings["socket_quat"]
    at = rotate_inverse(socket, readings["tcp_pos"] - readings["socket_pos"])
    return at, quat_multiply(quat_conjugate(socket), readings["tcp_quat"])


def successes(env: WorldsEnv, seed: int = 0) -> Tensor:
    """Bool [N]: the first episode of each world succeeds by the task's script."""
    env.reset(seed)
    done = torch.zeros(env.num_worlds, dtype=torch.bool)
    good = torch.zeros(env.num_worlds, dtype=torch.bool)
    for _ in range(env.max_episode_steps):
        _, _, terminated, _, info = env.step(env.task.script(env.engine, env._state))
        assert not info["invalid"].any()
        good |= info["success"] & ~done
        done |= terminated
        if done.all():
            break
    return good
