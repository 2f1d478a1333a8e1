"""Supervised fine-tuning: imitation of the episodes of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algos.cotraining import CoOptions, co_training, imitate
from embodied.algos.windows import Windows, check_folder
from embodied.data.lerobot import read
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs, Policy, Symmetry
from embodied.spec.ranks import rank_count
from embodied.spec.registry import register


@dataclass
class SFTOptions(CoOptions):
    """Supervised fine-tuning on a dataset."""

    data: str = ""  # folder of the dataset: LeRobot v3, as `embodied collect` writes it
    only_success: bool = True  # leave out episodes that failed
    updates: int = 200  # gradient steps an iteration
    batch_size: int = 256  # moments
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0


@register("algo", "sft", SFTOptions)
class SFT:
    """Makes what was done likely, or what the policy calls likely: `Policy.imitate`.

    The worlds are for evaluation alone: an iteration takes no step of them. Statistics of the data, those of `co_data`
    included, normalise the policy, once.

    Args:
        options: see `SFTOptions`.
        policy: moved to `device`; its noise is seeded here.
        obs_sizes: width of each observation group.
        action_size: A.
        num_worlds: not used.
        device: where everything lives.
        seed: of noise and of the order of moments.
        mirror: not used.
        max_episode_steps: not used.

    Raises:
        BadInput: see `validate`; a dataset is of other observations or actions, or no episode of it can be used.
    """

    steps_per_iteration = 0

    def __init__(
        self,
        options: SFTOptions,
        policy: Policy,
        obs_sizes: Mapping[str, int],
        action_size: int,
        num_worlds: int,
        device: torch.device | str,
        seed: int,
        mirror: Symmetry | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        self.validate(options, num_worlds)
        if rank_count() > 1:
            raise BadInput("algo=sft learns in one process: start it without torchrun")
        self.options, self.device = options, torch.device(device)
        self.policy = policy.to(self.device)
        noise, order, co_order = (int(s) for s in np.random.SeedSequence([seed, 0]).generate_state(3))
        self.policy.seed(noise)
        self.generator = torch.Generator(self.device).manual_seed(order)
        self.windows = Windows.of(read(options.data), policy.horizon, options.only_success, self.device, "algo.data")
        self.windows.check(obs_sizes["policy"], action_size)
        self.co = co_training(options, policy, obs_sizes, action_size, self.device, co_order)
        sources = [self.windows] if self.co is None else [self.windows, self.co.windows]
        state, action = torch.cat([x.state for x in sources]), torch.cat([x.action for x in sources])
        self.policy.take_statistics({"policy": state}, action)
        self.optimiser = torch.optim.AdamW(
            self.policy.parameters(), options.learning_rate, weight_decay=options.weight_decay, fused=True
        )

    @staticmethod
    def validate(options: SFTOptions, num_worlds: int) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: an option outside its range, or no dataset.
        """
        check_folder("data", options.data)
        options.check_co()
        for name in ("updates", "batch_size", "learning_rate", "max_grad_norm"):
            if getattr(options, name) <= 0:
                raise BadInput(f"algo.{name}={getattr(options, name)}: expected more than 0")
        if options.weight_decay < 0:
            raise BadInput(f"algo.weight_decay={options.weight_decay}: expected 0 or more")

    def act(self, obs: Obs) -> Tensor:
        """Not part of this learner."""
        raise RuntimeError("this learner takes no steps")

    def observe(self, obs: Obs, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """Not part of this learner."""
        raise RuntimeError("this learner takes no steps")

    def update(self) -> dict[str, Tensor]:
        """Take `updates` gradient steps; the mean loss and gradient norm.

        Raises:
            Fault: the loss is not finite.
        """
        options = self.options

        def draw() -> tuple[Obs, Tensor, Tensor]:
            return self.windows.draw(options.batch_size, self.generator)

        return imitate(self.policy, self.optimiser, draw, options.updates, options.max_grad_norm, self.co)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next but the data, which is read again."""
        return {
            "policy": self.policy.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "generators": {"noise": self.policy.generator.get_state(), "order": self.generator.get_state()},
            "data_sha256": self.windows.digest,
            "co": None if self.co is None else self.co.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            BadInput: the dataset is not the one that was learned from.
        """
        self.windows.check_same(state["data_sha256"])
        if self.co is not None:
            self.co.load_state_dict(state["co"])
        self.policy.load_state_dict(state["policy"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.policy.generator.set_state(state["generators"]["noise"].cpu())
        self.generator.set_state(state["generators"]["order"].cpu())
