"""Resets drawn uniformly from the bank: what other samplers are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.table import OutcomeTable, check_history
from embodied.spec.registry import register


@dataclass
class UniformOptions:
    """Uniform resets; outcomes are kept for the metrics only."""

    history: int = 50  # outcomes kept of each reset configuration


@register("sampler", "uniform", UniformOptions)
class Uniform:
    """Every reset configuration is equally likely."""

    def __init__(
        self,
        options: UniformOptions,
        num_worlds: int,
        num_slots: int,
        tags: Tensor,
        tag_names: Sequence[str],
        bank_hash: str,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.table = OutcomeTable(num_slots, options.history, tags, tag_names, bank_hash, device)
        self.num_worlds = num_worlds
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    @staticmethod
    def validate(options: UniformOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: the history is shorter than 1.
        """
        check_history(options.history)

    def sample(self) -> Tensor:
        """One slot a world, int64 [num_worlds]."""
        return torch.randint(self.table.num_slots, (self.num_worlds,), generator=self.generator, device=self.device)

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes of episodes, see `OutcomeTable.record`; returns are not used."""
        self.table.record(slots, success, valid)

    def metrics(self) -> dict[str, Tensor]:
        """Those of `OutcomeTable.metrics`."""
        n = self.table.num_slots
        return self.table.metrics(torch.full((n,), 1.0 / n, dtype=torch.float64, device=self.device))

    def state_dict(self) -> dict[str, Any]:
        """The table with its bank's hash, and the generator."""
        return {**self.table.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; BadInput if it is of another bank or size."""
        self.table.load_state_dict(state)
        self.generator.set_state(state["generator"].cpu())
