"""Evaluation: one episode a world, from fresh starts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.algos.chunks import ChunkQueue
from embodied.spec.protocols import Policy, VecEnv


@dataclass(frozen=True)
class Evaluation:
    """What came of one episode in each of N worlds; masks bool [N], figures [N], invalid episodes included. Errors are NaN in
    episodes that say nothing of them.
    """

    success: Tensor
    invalid: Tensor
    episode_return: Tensor
    length: Tensor
    errors: dict[str, Tensor]

    def summary(self) -> dict[str, float | int]:
        """Means over valid episodes that have the figure. Success terminates, so success at the end is success at any time."""
        valid = ~self.invalid
        count = int(valid.sum())
        mean = {name: float(x[valid].double().nanmean()) if count else float("nan") for name, x in self.errors.items()}
        successes = int((self.success & valid).sum())
        return {
            "episodes": count,
            "successes": successes,
            "success_once": successes / count if count else float("nan"),
            "success_at_end": successes / count if count else float("nan"),
            "return_mean": float(self.episode_return[valid].double().mean()) if count else float("nan"),
            "length_mean": float(self.length[valid].double().mean()) if count else float("nan"),
            "invalid": int(self.invalid.sum()),
            **mean,
        }


@torch.no_grad()
def evaluate(env: VecEnv, policy: Policy, seed: int, deterministic: bool = True) -> Evaluation:
    """Run `policy` for one episode in every world of `env`, which must start its worlds afresh at `reset`.

    The policy's noise comes from the seed, too, and the stream that it had goes on afterwards as if nothing had been.
    """
    stream = policy.generator
    policy.seed(seed)
    try:
        return _evaluate(env, policy, seed, deterministic)
    finally:
        policy.generator = stream


def _evaluate(env: VecEnv, policy: Policy, seed: int, deterministic: bool) -> Evaluation:
    obs = env.reset(seed)
    queue = ChunkQueue(policy, env.num_worlds, env.action_size, env.device)
    count, device = env.num_worlds, env.device
    done = torch.zeros(count, dtype=torch.bool, device=device)
    success, invalid = torch.zeros_like(done), torch.zeros_like(done)
    episode_return, length = torch.zeros(count, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    errors: dict[str, Tensor] = {}
    for _ in range(env.max_episode_steps):
        action = queue.next(obs, deterministic).action
        obs, _, terminated, truncated, info = env.step(action)
        queue.cut(terminated | truncated | info["invalid"])
        now = (terminated | truncated | info["invalid"]) & ~done
        success |= now & info["success"]
        invalid |= now & info["invalid"]
        episode_return = torch.where(now, info["episode"]["return"], episode_return)
        length = torch.where(now, info["episode"]["length"], length)
        errors = {name: torch.where(now, x, errors.get(name, torch.zeros_like(x))) for name, x in info["errors"].items()}
        done |= now
    return Evaluation(success, invalid, episode_return, length, errors)
