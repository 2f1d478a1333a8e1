"""Rejection sampling: act, keep the episodes that went well, imitate those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algos.chunks import ChunkQueue
from embodied.algos.cotraining import CoOptions, co_training, imitate
from embodied.algos.windows import Windows
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs, Policy, Symmetry
from embodied.spec.ranks import rank_count
from embodied.spec.registry import register


@dataclass
class HiORSOptions(CoOptions):
    """Rejection sampling and imitation of what is kept."""

    num_steps: int = 24  # steps of every world an iteration
    updates: int = 50  # gradient steps an iteration
    batch_size: int = 512  # moments
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    sampled: bool = True  # act with the noise of exploration; a flow policy varies without it, too
    gamma: float = 0.99  # an episode is worth this to the power of its steps if it succeeds, else nothing
    quantile: float = 0.5  # the threshold rises to this quantile of what an iteration's episodes were worth
    min_steps: int = 3  # an episode of fewer is not learned from
    idle: float = 0.01  # a moment at which a smaller action (its norm) was taken is not learned from
    capacity: int = 200_000  # moments that are kept, the newest


@register("algo", "hiors", HiORSOptions)
class HiORS:
    """Outcome-based rejection sampling (Hi-ORS, arXiv 2510.26406): no critic, no likelihood, a supervised loss.

    An episode is kept if it succeeded and is worth at least the threshold, which never falls: as the policy learns, the slow
    ones go. That compares episodes of like beginnings only: use `sampler=uniform` and starts as far as those of evaluation.
    The shaped reward does not count, for it says how hard one tried. Demonstrations and corrections come in by `co_data`, at
    every gradient step. The policy's statistics stay those that it came with.

    Storing what is kept reads the device at every step at which an episode ends.

    Args:
        options: see `HiORSOptions`.
        policy: moved to `device`; its noise is seeded here.
        obs_sizes: width of each observation group; `policy` is read.
        action_size: A.
        num_worlds: N.
        device: where everything lives.
        seed: of noise and of the order of moments.
        mirror: not used.
        max_episode_steps: after which an episode is over.

    Raises:
        BadInput: see `validate`; several ranks.
    """

    def __init__(
        self,
        options: HiORSOptions,
        policy: Policy,
        obs_sizes: Mapping[str, int],
        action_size: int,
        num_worlds: int,
        device: torch.device | str,
        seed: int,
        mirror: Symmetry | None = None,
        max_episode_steps: int = 1,
    ) -> None:
        self.validate(options, num_worlds)
        if rank_count() > 1:
            raise BadInput("algo=hiors learns in one process: start it without torchrun")
        self.options, self.device = options, torch.device(device)
        self.steps_per_iteration = options.num_steps
        noise, order, co_order = (int(s) for s in np.random.SeedSequence([seed, 0]).generate_state(3))
        self.policy = policy.to(self.device)
        self.policy.seed(noise)
        self.generator = torch.Generator(self.device).manual_seed(order)
        self.queue = ChunkQueue(self.policy, num_worlds, action_size, self.device)
        self.co = co_training(options, policy, obs_sizes, action_size, self.device, co_order)
        self.optimiser = torch.optim.Adam(self.policy.parameters(), options.learning_rate, fused=True)
        sizes = obs_sizes["policy"], action_size
        # of episodes under way [L, N, ...], and how many steps of them there are
        self._now = [torch.zeros(max_episode_steps, num_worlds, size, device=self.device) for size in sizes]
        self._at = torch.zeros(num_worlds, dtype=torch.int64, device=self.device)
        self._worlds = torch.arange(num_worlds, device=self.device)
        # a ring of moments that are kept, each older than those that follow in its episode
        state, action = (torch.zeros(options.capacity, size, device=self.device) for size in sizes)
        left = torch.zeros(options.capacity, dtype=torch.int64, device=self.device)
        self.kept = Windows(state, action, left, policy.horizon, "", "what was kept")
        self.count = 0  # of moments ever kept
        self.threshold = 0.0
        self._worth: list[Tensor] = []  # of the episodes of this iteration
        self._accepted = 0
        # the first episodes to be over are the short ones: nothing is learned, and nothing compared, before all kinds have come
        self._waiting = 2 * max_episode_steps

    @staticmethod
    def validate(options: HiORSOptions, num_worlds: int) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an option outside its range, or no dataset.
        """
        ranges = [
            ("gamma", 0 < options.gamma <= 1, "above 0, at most 1"),
            ("quantile", 0 <= options.quantile <= 1, "in [0, 1]"),
            ("idle", options.idle >= 0, "0 or more"),
            *(
                (name, getattr(options, name) > 0, "more than 0")
                for name in ("num_steps", "updates", "batch_size", "learning_rate", "max_grad_norm", "min_steps", "capacity")
            ),
        ]
        for name, good, expected in ranges:
            if not good:
                raise BadInput(f"algo.{name}={getattr(options, name)}: expected {expected}")
        options.check_co()

    @torch.no_grad()
    def act(self, obs: Obs) -> Tensor:
        """The policy's action [N, A], clipped to [-1, 1] as it is learned from."""
        action = self.queue.next(obs, deterministic=not self.options.sampled).action.clamp(-1, 1)
        for storage, x in zip(self._now, (obs["policy"], action), strict=True):
            storage[self._at, self._worlds] = x
        self._at = self._at + 1
        return action

    @torch.no_grad()
    def observe(self, obs: Obs, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Keep the episodes that ended and are good enough; the arguments are what `VecEnv.step` returned."""
        ended, complete = terminated | truncated | info["invalid"], info["episode"]["ended"]
        worth = torch.where(info["success"], self.options.gamma ** self._at.double(), 0.0)
        self._worth.append(worth[complete])
        good = complete & (worth > 0) & (worth >= self.threshold) & (self._at >= self.options.min_steps)
        if bool(good.any()):
            self._accepted += int(good.sum())
            self._keep(torch.nonzero(good)[:, 0])
        self.queue.cut(ended)
        self._at = torch.where(ended, 0, self._at)

    def _keep(self, worlds: Tensor) -> None:
        """Put the present episodes of some worlds int64 [M] into the ring, the oldest moments of which go."""
        steps = self._at[worlds]
        left = steps[:, None] - torch.arange(len(self._now[0]), device=self.device)
        there = left > 0
        size = self.options.capacity
        new = [x[:, worlds].transpose(0, 1)[there][-size:] for x in self._now]
        left = left[there][-size:]
        places = (self.count + torch.arange(len(left), device=self.device)) % size
        for storage, x in zip((self.kept.state, self.kept.action, self.kept.left), (*new, left), strict=True):
            storage[places] = x
        self.count += len(left)

    def update(self) -> dict[str, Tensor]:
        """Raise the threshold, and take `updates` gradient steps on what was kept so far, if there is anything, once the worlds
        had the time of two episodes.

        Raises:
            Fault: the loss is not finite.
        """
        worth = torch.cat(self._worth)
        figures = {"threshold": self.threshold, "episodes_kept": self._accepted / max(len(worth), 1)}
        self._waiting = max(0, self._waiting - self.options.num_steps)
        if len(worth) and not self._waiting:
            self.threshold = max(self.threshold, float(worth.quantile(self.options.quantile)))
        self._worth, self._accepted = [], 0
        moving = self.kept.action[: self.count].norm(dim=1) >= self.options.idle
        among = torch.nonzero(moving)[:, 0]
        figures["moments"] = float(len(among))
        metrics = {name: torch.tensor(x, device=self.device) for name, x in figures.items()}
        return metrics | self._learn(among) if len(among) and not self._waiting else metrics

    def _learn(self, among: Tensor) -> dict[str, Tensor]:
        options = self.options

        def draw() -> tuple[Obs, Tensor, Tensor]:
            drawn = torch.randint(len(among), (options.batch_size,), generator=self.generator, device=self.device)
            return self.kept.at(among[drawn])

        return imitate(self.policy, self.optimiser, draw, options.updates, options.max_grad_norm, self.co)

    def state_dict(self) -> dict[str, Any]:
        """All that continuing exactly needs, as tensors and plain data: what was kept included."""
        filled = min(self.count, self.options.capacity)
        return {
            "policy": self.policy.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generators": {"noise": self.policy.generator.get_state(), "order": self.generator.get_state()},
            "queue": self.queue.state_dict(),
            "now": [*self._now, self._at],
            # cloned, because saving a view would save all that lies behind it
            "kept": [x[:filled].clone() for x in (self.kept.state, self.kept.action, self.kept.left)],
            "count": self.count,
            "threshold": self.threshold,
            "worth": self._worth,
            "accepted": self._accepted,
            "waiting": self._waiting,
            "co": None if self.co is None else self.co.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, on this learner's device."""
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.policy.generator.set_state(state["generators"]["noise"].cpu())
        self.generator.set_state(state["generators"]["order"].cpu())
        self.queue.load_state_dict(state["queue"])
        *now, at = (x.to(self.device).clone() for x in state["now"])
        self._now, self._at = now, at
        for storage, x in zip((self.kept.state, self.kept.action, self.kept.left), state["kept"], strict=True):
            storage[: len(x)] = x.to(self.device)
        self.count, self.threshold, self._accepted = state["count"], state["threshold"], state["accepted"]
        self._waiting = state["waiting"]
        self._worth = [x.to(self.device) for x in state["worth"]]
        if self.co is not None:
            self.co.load_state_dict(state["co"])
