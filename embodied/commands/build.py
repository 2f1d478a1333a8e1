"""From a resolved configuration to worlds and brains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.algos.evaluate import evaluate
from embodied.algos.trainer import single_threaded
from embodied.compose import options
from embodied.config import SimOptions
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank, bank_path
from embodied.sim.samplers.fixed import Fixed
from embodied.spec import registry
from embodied.spec.protocols import Engine, Policy, Trials

Config = Mapping[str, Any]

TRIAL_WORLDS = 256  # at most, for a sampler that tries configurations


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
    engine = make_engine(config, task, min(task.bank_size, 2048))
    key = task.bank_hash(engine.signature)
    path = bank_path(key)
    if path.exists():
        bank = ResetBank.load(path)
        if bank.hash == key:
            bank.check(engine.signature)
            return bank
    say(f"generating {task.bank_size} reset configurations (kept in {path.parent})")
    bank = task.make_bank(engine)
    bank.save(path)
    return bank


def make_training_env(config: Config, task: Any, say: Callable[[str], None]) -> WorldsEnv:
    """The worlds that are trained on: randomised, started by the configured sampler."""
    bank = load_bank(config, task, say)
    num_worlds = options("sim", config).num_worlds
    engine = make_engine(config, task, num_worlds)
    slots = bank.slots(num_worlds, config["seed"], engine.device)
    sampler = registry.find("sampler", config["sampler"]["name"]).build(options("sampler", config), slots)
    return WorldsEnv(engine, task, sampler, bank, warn=say, max_steps=task.training_steps)


def make_trials(
    config: Config, task: Any, bank: ResetBank, policy: Policy, say: Callable[[str], None]
) -> Callable[[Tensor, int], Trials]:
    """What a `TryingSampler` asks for: one episode of the policy, sampling its actions, in each slot that is given.

    The worlds are separate from those trained on, and randomised alike. Worlds that are left over in the last batch run from
    the first slot; every step of every world counts.
    """
    count = min(options("sim", config).num_worlds, TRIAL_WORLDS)
    engine = make_engine(config, task, count)
    fixed = Fixed(count, engine.device)
    env = WorldsEnv(engine, task, fixed, bank, stagger=False, warn=say)

    def evaluate_slots(slots: Tensor, seed: int) -> Trials:
        success, valid = [], []
        filled = torch.cat([slots, slots[:1].expand(-len(slots) % count)])
        for number, batch in enumerate(filled.split(count)):
            fixed.slots = batch
            with single_threaded(count):
                result = evaluate(env, policy, seed + number, deterministic=False)
            success.append(result.success)
            valid.append(~result.invalid)
        steps = len(filled) * task.spec.max_steps
        return Trials(torch.cat(success)[: len(slots)], torch.cat(valid)[: len(slots)], steps)

    return evaluate_slots


def make_fresh_env(config: Config, task: Any, episodes: int, say: Callable[[str], None]) -> FreshStarts:
    """One world an episode, started afresh at each reset: never from the training bank."""
    return FreshStarts(make_engine(config, task, episodes), task, config["eval"]["randomise"], say)


def make_policy(config: Config, obs_sizes: Mapping[str, int], action_size: int) -> Policy:
    """The configured policy, its weights drawn from the run's seed."""
    torch.manual_seed(config["seed"])
    policy: Policy = registry.find("policy", config["policy"]["name"]).build(options("policy", config), obs_sizes, action_size)
    return policy
