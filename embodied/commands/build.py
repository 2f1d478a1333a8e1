"""From a resolved configuration to worlds and brains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from embodied.compose import options
from embodied.config import SimOptions
from embodied.policies.gaussian import GaussianPolicy
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank, bank_path
from embodied.spec import registry
from embodied.spec.protocols import Engine

Config = Mapping[str, Any]


def make_task(config: Config) -> Any:
    """The configured task on the configured robot."""
    robot = registry.find("robot", config["robot"]["name"]).build(options("robot", config))
    return registry.find("task", config["task"]["name"]).build(options("task", config), robot)


def make_engine(config: Config, task: Any, num_worlds: int) -> Engine:
    """An engine of `num_worlds` worlds of the task's model."""
    sim: SimOptions = options("sim", config)
    engine: Engine = registry.find("engine", sim.engine).build(task.model, num_worlds, task.parameters, sim.threads)
    engine.bind(task.fields)
    return engine


def load_bank(config: Config, task: Any, say: Callable[[str], None]) -> ResetBank:
    """The task's training bank: from the cache, or generated and kept there. Its content does not depend on the seed."""
    engine = make_engine(config, task, min(task.options.bank.size, 2048))
    key = task.bank_hash(engine.signature)
    path = bank_path(key)
    if path.exists():
        bank = ResetBank.load(path)
        if bank.hash == key:
            bank.check(engine.signature)
            return bank
    say(f"generating {task.options.bank.size} reset configurations (kept in {path.parent})")
    bank = task.make_bank(engine)
    bank.save(path)
    return bank


def make_training_env(config: Config, task: Any, say: Callable[[str], None]) -> WorldsEnv:
    """The worlds that are trained on: randomised, started by the configured sampler."""
    bank = load_bank(config, task, say)
    num_worlds = options("sim", config).num_worlds
    engine = make_engine(config, task, num_worlds)
    sampler = registry.find("sampler", config["sampler"]["name"]).build(
        options("sampler", config),
        num_worlds,
        bank.tags.numel(),
        bank.tags,
        bank.tag_names,
        bank.hash,
        config["seed"],
        engine.device,
    )
    return WorldsEnv(engine, task, sampler, bank, warn=say)


def make_fresh_env(config: Config, task: Any, episodes: int, say: Callable[[str], None]) -> FreshStarts:
    """One world an episode, started afresh at each reset: never from the training bank."""
    return FreshStarts(make_engine(config, task, episodes), task, config["eval"]["randomise"], say)


def make_policy(config: Config, obs_sizes: Mapping[str, int], action_size: int) -> GaussianPolicy:
    """The configured policy, its weights drawn from the run's seed."""
    torch.manual_seed(config["seed"])
    policy: GaussianPolicy = registry.find("policy", config["policy"]["name"]).build(
        options("policy", config), obs_sizes, action_size
    )
    return policy
