"""Resets drawn uniformly from the bank: what other samplers are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.sim.samplers.drawing import METRICS_HISTORY, DrawingSampler
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import check_history
from embodied.spec.registry import register


@dataclass
class UniformOptions:
    """Uniform resets; outcomes are kept for the metrics only."""

    history: int = METRICS_HISTORY  # outcomes kept of each reset configuration


@register("sampler", "uniform", UniformOptions)
class Uniform(DrawingSampler):
    """Every reset configuration is equally likely."""

    def __init__(self, options: UniformOptions, slots: Slots) -> None:
        super().__init__(slots, options.history)

    @staticmethod
    def validate(options: UniformOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: a history that no table could keep.
        """
        check_history(options.history)

    def _rescore(self) -> Tensor:
        count = self.slots.num_slots
        return torch.full((count,), 1.0 / count, dtype=torch.float64, device=self.slots.device)

    def sample(self) -> Tensor:
        """One slot a world, int64 [num_worlds]."""
        size = (self.slots.num_worlds,)
        return torch.randint(self.slots.num_slots, size, generator=self.generator, device=self.slots.device)
