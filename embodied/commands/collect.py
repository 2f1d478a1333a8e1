"""`embodied collect`: episodes of a trained policy, or of a task's script, as a LeRobot dataset, to imitate or to look at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algos import checkpoint
from embodied.algos.chunks import ChunkQueue
from embodied.algos.trainer import single_threaded
from embodied.commands.build import make_fresh_env, make_task
from embodied.commands.evaluate import load_policy
from embodied.commands.train import eval_seed
from embodied.compose import Invocation
from embodied.data.episodes import Episode, Feature
from embodied.data.lerobot import DatasetWriter
from embodied.sim.fresh import FreshStarts
from embodied.spec import registry
from embodied.spec.errors import BadInput
from embodied.spec.policy import PolicySpec
from embodied.spec.protocols import Obs, Policy

Act = Callable[[Obs, Tensor], Tensor]
"""Actions [N, A] by what is seen, and where an episode ended with the last step, bool [N]."""

COLLECT_SEED = 3
"""Stream of the starts: not those of evaluations."""


def run(invocation: Invocation) -> int:
    """Collect, and print what came of it; the last line as JSON."""
    config, folder = invocation.config, invocation.run_dir
    if "out" not in {word.partition("=")[0] for word in invocation.overrides}:
        raise BadInput("out= is missing: a new folder for the dataset, e.g. out=data/demos")
    if invocation.expert is not None:
        check_script(config["task"]["name"])
    checkpoint.deterministic()
    task = make_task(config)
    spec: PolicySpec = task.spec
    env = make_fresh_env(config, task, config["episodes"], print)
    seed = eval_seed(config["seed"], COLLECT_SEED)
    if invocation.expert is None:
        policy = load_policy(invocation, task)
        act = of_policy(env, policy, seed)
        who = {"checkpoint": str(invocation.checkpoint), "weights_sha256": checkpoint.weights_hash(policy.state_dict())}
    else:
        act, who = of_script(env), {"expert": invocation.expert}
    with single_threaded(env.num_worlds):
        episodes = record(env, act, spec, seed)
    rate = 1.0 / spec.robot.control_dt
    if abs(rate - round(rate)) > 1e-9:
        raise BadInput(f"task={spec.task} runs at {rate} Hz, a dataset's frames at a whole number")
    extra: dict[str, Any] = {"spec": spec.to_dict(), **who, "seed": seed, "randomise": config["eval"]["randomise"]}
    with DatasetWriter(folder, round(rate), spec.robot.name, describe(spec), extra) as writer:
        for one in episodes:
            writer.add(one)
    successes = sum(bool(one.features["next.success"][-1]) for one in episodes)
    frames = sum(one.length for one in episodes)
    print(f"{folder}: {len(episodes)} episodes, {successes} of them successful, {frames} frames at {rate:g} Hz")
    print(json.dumps({"out": str(folder), "episodes": len(episodes), "successes": successes, "frames": frames}))
    return 0


def check_script(task: str) -> None:
    """Refuse a task that has no script.

    Raises:
        BadInput: with those that have one.
    """
    having = [name for name in registry.names("task") if hasattr(registry.find("task", name).build, "script")]
    if task not in having:
        raise BadInput(
            f"expert=script: task={task} has no script, only {', '.join(having)}: "
            "collect from a trained policy with checkpoint=<run>"
        )


def of_policy(env: FreshStarts, policy: Policy, seed: int) -> Act:
    """A policy's most likely actions, chunk by chunk; the seed decides its noise."""
    policy.seed(seed)
    queue = ChunkQueue(policy, env.num_worlds, env.action_size, env.device)

    def act(obs: Obs, ended: Tensor) -> Tensor:
        queue.cut(ended)
        return queue.next(obs, deterministic=True).action

    return act


def of_script(env: FreshStarts) -> Act:
    """What the task's script does, whatever a policy would see."""
    return lambda obs, ended: env.scripted()


def describe(spec: PolicySpec) -> dict[str, Feature]:
    """The features of an episode of that policy."""
    state = [f"{term.name}[{i}]" for term, size in zip(spec.terms, spec.sizes, strict=True) for i in range(size)]
    action = [f"action[{i}]" for i in range(spec.action.size)]
    return {
        "observation.state": Feature("float32", (len(state),), state),
        "action": Feature("float32", (len(action),), action),
        "next.reward": Feature("float32", (1,), None),
        "next.done": Feature("bool", (1,), None),
        "next.success": Feature("bool", (1,), None),
    }


@dataclass(frozen=True)
class _Step:
    state: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    done: np.ndarray
    success: np.ndarray


@torch.no_grad()
def record(env: FreshStarts, act: Act, spec: PolicySpec, seed: int) -> list[Episode]:
    """One episode in each world, as a policy would see it and as it was commanded; faulty ones are left out.

    Raises:
        BadInput: every episode was invalid.
    """
    obs = env.reset(seed)
    done = over = torch.zeros(env.num_worlds, dtype=torch.bool, device=env.device)
    valid, steps = ~over, []
    while not bool(over.all()):
        action = act(obs, done).clamp(-1, 1)
        following, reward, terminated, truncated, info = env.step(action)
        done = terminated | truncated | info["invalid"]
        values = (obs["policy"], action, reward, done, info["success"])
        steps.append(_Step(*(x.cpu().numpy().copy() for x in values)))
        valid &= over | ~info["invalid"]
        over = over | done
        obs = following
    lengths = np.argmax(np.stack([step.done for step in steps]), 0) + 1
    episodes = []
    for world in torch.nonzero(valid.cpu())[:, 0].tolist():
        rows = steps[: lengths[world]]
        names = {"observation.state": "state", "action": "action"}
        names |= {f"next.{name}": name for name in ("reward", "done", "success")}
        features = {key: np.stack([getattr(row, name)[world] for row in rows]) for key, name in names.items()}
        episodes.append(Episode(features, spec.task))
    if not episodes:
        raise BadInput("every episode had a numerical fault: nothing to keep")
    return episodes
