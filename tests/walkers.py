"""Walking robots for tests: worlds in which they start where a test puts them, with the physics that it gives them."""

from __future__ import annotations

from typing import Any

import torch

from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.resets import ResetBank
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.samplers.fixed import Fixed
from embodied.sim.tasks.locomotion import CommandOptions, Locomotion, LocomotionOptions
from embodied.sim.tasks.walker import WalkerBankOptions, WalkerRandomiseOptions

DT, GRAVITY, FRICTION = 0.02, 9.81, 0.8
CALM: dict[str, Any] = {
    "friction": [1.0, 1.0],
    "gains": [1.0, 1.0],
    "strength": [1.0, 1.0],
    "mass": [0.0, 0.0],
    "centre": [0.0, 0.0],
}
CALM |= {"delay": 0.0, "push_s": 1e9}
"""Randomised in name only: nominal physics, nobody pushed."""
NOMINAL = {"friction": 1.0, "mass": 0.0, "centre_x": 0.0, "centre_y": 0.0, "gains": 1.0}
NOMINAL |= {"strength": 1.0, "delay": 0.0, "restless": 0.0}


def make(ranges: dict[str, Any] | None = None, command: dict[str, Any] | None = None, **changes: Any) -> Locomotion:
    randomise = WalkerRandomiseOptions(**(ranges or {}))
    options = LocomotionOptions(
        bank=WalkerBankOptions(64), command=CommandOptions(**(command or {})), randomise=randomise, **changes
    )
    return Locomotion(options, go1(Go1Options()))


TASK = make()
HOME = torch.tensor(TASK.spec.robot.home, dtype=torch.float64)


def make_engine(task: Locomotion, worlds: int) -> CpuEngine:
    engine = CpuEngine(task.model, worlds, task.parameters, threads=1)
    engine.bind((*task.fields, "subtree_com"))
    return engine


def start_at(task: Locomotion, worlds: int, height: float) -> WorldsEnv:
    """Worlds that start at rest, in the rest pose, at a height of the trunk [m]; randomised."""
    engine = make_engine(task, worlds)
    put(engine, height)
    tags = torch.zeros(worlds, dtype=torch.int64)
    bank = ResetBank(engine.get_state(), tags, ("there",), engine.signature, "there")
    return WorldsEnv(engine, task, Fixed(worlds, engine.device), bank, stagger=False)


def put(engine: CpuEngine, height: float, quat: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)) -> None:
    base = torch.tensor([0.0, 0.0, height, *quat], dtype=torch.float64)
    engine.set_state(engine.default_row.expand(engine.num_worlds, -1))
    engine.write("qpos", torch.cat([base, HOME]).expand(engine.num_worlds, -1))
    engine.write("ctrl", HOME.expand(engine.num_worlds, -1))


def give(engine: CpuEngine, **changes: list[float]) -> None:
    """Nominal physics but for `changes`, which have a value for each world."""
    count = engine.num_worlds
    factors = {name: torch.tensor(changes.get(name, [usual] * count)) for name, usual in NOMINAL.items()}
    TASK.walker.set_physics(engine, torch.ones(count, dtype=torch.bool), factors)
