"""What samplers share: they keep an outcome table, and draw each world's slot independently by probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import OutcomeTable
from embodied.spec.ranks import gather_rows, rank_count, rank_seed

METRICS_HISTORY = 50
"""Outcomes kept of each configuration where they serve the metrics only."""


def cumulate(probabilities: Tensor) -> Tensor:
    """Running sums int64 [N] of probabilities float64 [N], in units of 2^-60.

    Whole numbers, because sums of floats on a GPU have no fixed order, and torch refuses them where determinism was asked for.
    """
    return (probabilities * 2.0**60).long().cumsum(0)


def draw(cumulative: Tensor, u: Tensor) -> Tensor:
    """Indices int64 [M] below N by inverting what `cumulate` gave, int64 [N], at u float64 [M] in [0, 1]."""
    total = cumulative[-1]
    # a product near the total may round up to it, where no slot is
    return torch.searchsorted(cumulative, (u * total).long().minimum(total - 1), right=True)


class DrawingSampler:
    """The shared part of samplers: a sampler says what its probabilities are, and sets `_stale` when they have changed.

    In a distributed run outcomes wait until the iteration's end, when those of all ranks are applied in rank order: every
    rank then holds the same table. Draws differ by rank.
    """

    def __init__(self, slots: Slots, history: int, divide_by: str = "visits") -> None:
        self.slots = slots
        self.table = OutcomeTable(slots, history, divide_by)
        self.generator = torch.Generator(slots.device).manual_seed(rank_seed(slots.seed))
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._stale = True

    def _rescore(self) -> Tensor:
        """Probability of each slot now, float64 [num_slots]."""
        raise NotImplementedError

    @property
    def probabilities(self) -> Tensor:
        """Probability of each slot, float64 [num_slots], computed anew where it has changed."""
        if self._stale:
            self._refresh()
        return self._probabilities

    def _refresh(self) -> None:
        self._probabilities = self._rescore()
        self._cumulative = cumulate(self._probabilities)
        self._stale = False

    def sample(self) -> Tensor:
        """One slot a world, int64 [num_worlds], drawn independently."""
        if self._stale:
            self._refresh()
        u = torch.rand(self.slots.num_worlds, dtype=torch.float64, generator=self.generator, device=self.slots.device)
        return draw(self._cumulative, u)

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes of episodes, see `OutcomeTable.record`; returns are not used."""
        if rank_count() == 1:
            self._take(slots, success, valid)
        else:
            self._waiting.append((torch.where(valid, slots, -1), success))

    def _take(self, slots: Tensor, success: Tensor, valid: Tensor, calls: int = 1) -> None:
        """Write outcomes into the table."""
        self.table.record(slots, success, valid, calls)

    def end_iteration(self) -> int:
        """Exchange outcomes with the other ranks; every rank must call it. No environment steps are taken: 0."""
        if self._waiting:
            slots, success = (torch.cat(column) for column in zip(*self._waiting, strict=True))
            ids = torch.nonzero(slots >= 0)[:, 0]
            rows = gather_rows(torch.stack([slots[ids], success[ids].long()], 1))
            everything = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
            self._take(rows[:, 0], rows[:, 1].bool(), everything, calls=len(self._waiting))
            self._waiting.clear()
        return 0

    def metrics(self) -> dict[str, Tensor]:
        """Those of `OutcomeTable.metrics`."""
        return self.table.metrics(self.probabilities)

    def _own_state(self) -> dict[str, Tensor]:
        """What a sampler keeps beside table and generator: live tensors, restored in place."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The table with its bank's hash, the generator, and what the sampler keeps beside them.

        Raises:
            RuntimeError: outcomes wait for the other ranks: save between iterations.
        """
        if self._waiting:
            raise RuntimeError("outcomes of this iteration are not exchanged yet: end the iteration before saving")
        own = {name: value.clone() for name, value in self._own_state().items()}
        return {**self.table.state_dict(), "generator": self.generator.get_state(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; BadInput if it is of another bank or size."""
        self.table.load_state_dict(state)
        self.generator.set_state(state["generator"].cpu())
        for name, value in self._own_state().items():
            value.copy_(state[name])
        self._waiting.clear()
        self._stale = True
