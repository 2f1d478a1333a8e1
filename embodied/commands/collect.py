"""`embodied collect`: episodes of a trained policy as a LeRobot dataset, to imitate or to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import torch

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
from embodied.spec.errors import BadInput
from embodied.spec.policy import PolicySpec
from embodied.spec.protocols import Policy

COLLECT_SEED = 3
"""Stream of the starts: not those of evaluations."""


def run(invocation: Invocation) -> int:
    """Collect, and print what came of it; the last line as JSON."""
    config, folder = invocation.config, invocation.run_dir
    if "out" not in {word.partition("=")[0] for word in invocation.overrides}:
        raise BadInput("out= is missing: a new folder for the dataset, e.g. out=data/demos")
    checkpoint.deterministic()
    task = make_task(config)
    spec: PolicySpec = task.spec
    policy = load_policy(invocation, task)
    env = make_fresh_env(config, task, config["episodes"], print)
    seed = eval_seed(config["seed"], COLLECT_SEED)
    with single_threaded(env.num_worlds):
        episodes = record(env, policy, spec, seed)
    rate = 1.0 / spec.robot.control_dt
    if abs(rate - round(rate)) > 1e-9:
        raise BadInput(f"task={spec.task} runs at {rate} Hz, a dataset's frames at a whole number")
    extra = {
        "spec": spec.to_dict(),
        "checkpoint": str(invocation.checkpoint),
        "weights_sha256": checkpoint.weights_hash(policy.state_dict()),
        "seed": seed,
        "randomise": config["eval"]["randomise"],
    }
    with DatasetWriter(folder, round(rate), spec.robot.name, describe(spec), extra) as writer:
        for one in episodes:
            writer.add(one)
    successes = sum(bool(one.features["next.success"][-1]) for one in episodes)
    frames = sum(one.length for one in episodes)
    print(f"{folder}: {len(episodes)} episodes, {successes} of them successful, {frames} frames at {rate:g} Hz")
    print(json.dumps({"out": str(folder), "episodes": len(episodes), "successes": successes, "frames": frames}))
    return 0


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
def record(env: FreshStarts, policy: Policy, spec: PolicySpec, seed: int) -> list[Episode]:
    """One episode of the deterministic policy in each world, as it was seen and commanded; faulty ones are left out.

    Raises:
        BadInput: every episode was invalid.
    """
    policy.seed(seed)
    obs, queue = env.reset(seed), ChunkQueue(policy, env.num_worlds, env.action_size, env.device)
    over = torch.zeros(env.num_worlds, dtype=torch.bool, device=env.device)
    valid, steps = ~over, []
    while not bool(over.all()):
        action = queue.next(obs, deterministic=True).action.clamp(-1, 1)
        following, reward, terminated, truncated, info = env.step(action)
        done = terminated | truncated | info["invalid"]
        queue.cut(done)
        values = (obs["policy"], action, reward, done, info["success"])
        steps.append(_Step(*(x.cpu().numpy().copy() for x in values)))
        valid &= over | ~info["invalid"]
        over |= done
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
