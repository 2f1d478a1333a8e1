"""The training loop: collect, learn, count; the caller decides when to evaluate, save and stop."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from embodied.algos.threads import one_thread
from embodied.spec.protocols import Learner, VecEnv

ONE_THREAD_BELOW = 8192


def single_threaded(num_worlds: int) -> AbstractContextManager[int]:
    """Step worlds with one torch thread: tensors of so few rows are done before the other threads would be awake."""
    return one_thread(num_worlds <= ONE_THREAD_BELOW)


class Trainer:
    """One learner on one environment. Nothing it computes depends on wall time."""

    def __init__(self, env: VecEnv, learner: Learner) -> None:
        self.env, self.learner = env, learner
        self.iteration = 0
        self.env_steps = 0

    def reset(self, seed: int) -> None:
        """Start every world."""
        self.obs = self.env.reset(seed)

    def iterate(self) -> dict[str, float | int | None]:
        """Collect `steps_per_iteration` steps of every world, learn from them, and return the metrics row.

        `env_steps` counts the steps that a sampler took to try configurations, `learn_s` the time that they took.
        """
        started = time.perf_counter()
        totals: dict[str, Tensor] = {}
        group = getattr(self.learner, "group", None)
        with single_threaded(self.env.num_worlds):
            if group is not None:
                self.obs = self.env.restart(group)
            for _ in range(self.learner.steps_per_iteration):
                action = self.learner.act(self.obs)
                self.obs, reward, terminated, truncated, info = self.env.step(action)
                self.learner.observe(self.obs, reward, terminated, truncated, info)
                for name, value in _episode_sums(info).items():
                    totals[name] = totals[name] + value if name in totals else value
        collected = time.perf_counter()
        losses = self.learner.update()
        extra = self.env.end_iteration(getattr(self.learner, "advantage", None))
        figures = {**{f"loss/{name}": x for name, x in losses.items()}, **self.env.metrics(), **totals}
        # the one transfer of an iteration
        values = torch.stack([x.detach().double().reshape(()) for x in figures.values()]).tolist()
        learned = time.perf_counter()
        self.iteration += 1
        steps = self.learner.steps_per_iteration * self.env.num_worlds + extra
        self.env_steps += steps
        row: dict[str, float | int | None] = dict(zip(figures, values, strict=True))
        episodes = row.pop("episodes", 0) or 0
        sums = {name: row.pop(name, 0) or 0.0 for name in ("success", "return", "length")}
        mean = {name: value / episodes if episodes else None for name, value in sums.items()}
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "steps_per_s": steps / (learned - started),
            "sim_s": collected - started,
            "learn_s": learned - collected,
            "success_rate": mean["success"],
            "return_mean": mean["return"],
            "episode_length": mean["length"],
            "episodes": int(episodes),
            **row,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next; the present observation is the environment's."""
        return {
            "iteration": self.iteration,
            "env_steps": self.env_steps,
            "env": self.env.state_dict(),
            "learner": self.learner.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.iteration, self.env_steps = state["iteration"], state["env_steps"]
        self.obs = self.env.load_state_dict(state["env"])
        self.learner.load_state_dict(state["learner"])
        torch.set_rng_state(state["torch_rng"])


def _episode_sums(info: Mapping[str, Any]) -> dict[str, Tensor]:
    """Sums over the episodes that ended in this step: 0-d float tensors."""
    episode = info["episode"]
    ended = episode["ended"]
    return {
        "episodes": ended.sum(),
        "success": (ended & info["success"]).sum(),
        "return": torch.where(ended, episode["return"], 0.0).sum(dtype=torch.float64),
        "length": torch.where(ended, episode["length"], 0).sum(),
    }
