"""A linear curriculum of levels, one a world (the game-inspired curriculum of legged_gym: Rudin et al. 2021, arXiv 2109.11978).

The bank's configurations are sorted into equal ranges of difficulty, the levels. A world starts from a configuration drawn
uniformly from its level; a success promotes it, a failure demotes it, and a success at the last level sends it to a random
one. legged_gym promotes a robot that walked beyond its terrain and demotes one that walked less than half of what was
commanded; an outcome here is success or failure, with nothing between.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.sim.samplers.drawing import METRICS_HISTORY, DrawingSampler
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import check_history
from embodied.spec.errors import BadInput
from embodied.spec.registry import register


@dataclass
class LinearOptions:
    """A linear curriculum with legged_gym's values."""

    num_levels: int = 10  # equal ranges of difficulty; those that hold no configuration are left out
    max_init_level: int = 5  # worlds begin at levels drawn uniformly from 0 to this one
    history: int = METRICS_HISTORY  # outcomes kept of each reset configuration, for the metrics only


@register("sampler", "linear", LinearOptions)
class Linear(DrawingSampler):
    """Each world climbs a ladder of difficulty: up after a success, down after a failure.

    Raises:
        BadInput: options out of range.
    """

    def __init__(self, options: LinearOptions, slots: Slots) -> None:
        self.validate(options)
        super().__init__(slots, options.history)
        difficulty = slots.difficulty.to(slots.device, torch.float64)
        low, high = difficulty.aminmax()
        share = (difficulty - low) / torch.where(high > low, high - low, 1.0)
        bins = (options.num_levels * share).long().clamp(max=options.num_levels - 1)
        self.level_of = torch.unique(bins, return_inverse=True)[1]
        self.size = torch.bincount(self.level_of)
        self._members = self.level_of.argsort(stable=True)
        self._first = self.size.cumsum(0) - self.size
        begin = min(options.max_init_level, len(self.size) - 1) + 1
        self.levels = torch.randint(begin, (slots.num_worlds,), generator=self.generator, device=slots.device)

    @staticmethod
    def validate(options: LinearOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: one is out of its range.
        """
        check_history(options.history)
        if options.num_levels < 1:
            raise BadInput(f"sampler.num_levels must be at least 1, got {options.num_levels}")
        if not 0 <= options.max_init_level < options.num_levels:
            raise BadInput(
                f"sampler.max_init_level must be from 0 to {options.num_levels - 1} (sampler.num_levels less one), "
                f"got {options.max_init_level}"
            )

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes of episodes, row i of world i: see `OutcomeTable.record`. Moves the worlds between levels."""
        super().record(slots, success, valid, episode_return)
        moves = torch.where(success, 1, -1).masked_fill((slots < 0) | ~valid, 0)
        levels = (self.levels + moves).clamp(min=0)
        anywhere = torch.randint(len(self.size), levels.shape, generator=self.generator, device=levels.device)
        self.levels.copy_(torch.where(levels < len(self.size), levels, anywhere))
        self._stale = True

    def sample(self) -> Tensor:
        """One slot of its level for each world, int64 [num_worlds]."""
        u = torch.rand(self.levels.shape, dtype=torch.float64, generator=self.generator, device=self.levels.device)
        size = self.size[self.levels]
        # u is below 1, but its product with a large size may round up to it
        within = (u * size).long().minimum(size - 1)
        return self._members[self._first[self.levels] + within]

    def _rescore(self) -> Tensor:
        """Probability of each slot for a world drawn at random."""
        worlds = torch.zeros_like(self.size, dtype=torch.float64)
        worlds.index_add_(0, self.levels, torch.ones_like(self.levels, dtype=torch.float64))
        return (worlds / len(self.levels) / self.size)[self.level_of]

    def metrics(self) -> dict[str, Tensor]:
        """Those of `OutcomeTable.metrics`, and the mean `level` of the worlds."""
        return {**super().metrics(), "level": self.levels.float().mean()}

    def _own_state(self) -> dict[str, Tensor]:
        return {"levels": self.levels}
