"""Small real assembly worlds for tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from embodied.algos.ppo import PPO, PPOOptions
from embodied.algos.trainer import Trainer
from embodied.policies.gaussian import GaussianPolicy, MLPOptions
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank
from embodied.sim.robots.arm import Arm
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.samplers.success_guided import SuccessGuided, SuccessGuidedOptions
from embodied.sim.tasks.assembly import Assembly
from embodied.sim.tasks.assembly_options import AssemblyOptions, BankOptions


def joint_vectors(arm: Arm) -> st.SearchStrategy[np.ndarray]:
    """Joint positions anywhere between an arm's limits."""
    joints = arm.spec.joints
    shares = st.lists(st.floats(0.0, 1.0), min_size=len(joints), max_size=len(joints))
    return shares.map(lambda u: np.array([j.lower + x * (j.upper - j.lower) for j, x in zip(joints, u, strict=True)]))


def make_task(**changes: Any) -> Assembly:
    options = AssemblyOptions(bank=BankOptions(size=64))
    for name, value in changes.items():
        setattr(options, name, value)
    return Assembly(options, franka(FrankaOptions()))


def make_engine(task: Assembly, num_worlds: int, threads: int = 1) -> CpuEngine:
    engine = CpuEngine(task.model, num_worlds, task.parameters, threads)
    engine.bind(task.fields)
    return engine


@functools.cache
def small_bank() -> ResetBank:
    task = make_task()
    return task.make_bank(make_engine(task, 64))


def make_env(
    num_worlds: int = 8,
    seed: int = 0,
    warn: Callable[[str], None] | None = None,
    stagger: bool = True,
    randomise: bool = True,
    **changes: Any,
) -> WorldsEnv:
    task, bank = make_task(**changes), small_bank()
    sampler = SuccessGuided(SuccessGuidedOptions(), bank.slots(num_worlds, seed, torch.device("cpu")))
    return WorldsEnv(make_engine(task, num_worlds), task, sampler, bank, randomise, stagger, warn)


def make_fresh(num_worlds: int) -> FreshStarts:
    task = make_task()
    return FreshStarts(make_engine(task, num_worlds), task, randomise=False)


def make_trainer(num_worlds: int = 8, seed: int = 0) -> Trainer:
    env = make_env(num_worlds, seed)
    torch.manual_seed(seed)
    policy = GaussianPolicy(MLPOptions(hidden=[16]), env.obs_sizes, env.action_size)
    options = PPOOptions(num_steps=8, epochs=2, critic_hidden=[16])
    learner = PPO(options, policy, env.obs_sizes, env.action_size, num_worlds, torch.device("cpu"), seed)
    trainer = Trainer(env, learner)
    trainer.reset(seed)
    return trainer
