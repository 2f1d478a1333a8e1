"""Prioritised Level Replay (Jiang, Grefenstette and Rocktaeschel 2021, arXiv 2010.03934).

The score of a configuration is the mean |GAE| of the steps spent in it, as of the last rollout in which it was met: where
the critic was wrong there is something to learn. Configurations met are replayed with
P = (1 - rho) P_S + rho P_C, P_S proportional to rank(score)^(-1 / beta), P_C to staleness.

With a fixed set of configurations a draw is a replay with the probability that is the share of them already met, and
otherwise uniform over those not met yet (the paper's schedule for Procgen).

Where a thousand worlds make it differ from the paper's 64 processes: within a rollout all draws are from the same
distribution, and staleness is the time since a configuration's last outcome, not since it was last drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.sim.samplers.drawing import METRICS_HISTORY, DrawingSampler
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import check_history
from embodied.spec.errors import BadInput
from embodied.spec.ranks import sum_in_order
from embodied.spec.registry import register


@dataclass
class PLROptions:
    """Prioritised Level Replay, with the paper's values for Procgen."""

    beta: float = 0.1  # temperature of the ranks: the smaller, the more goes to the highest scores
    rho: float = 0.1  # share of the replays that goes to what was not met for long
    history: int = METRICS_HISTORY  # outcomes kept of each reset configuration, for the metrics only


def probabilities(scores: Tensor, met: Tensor, ages: Tensor, options: PLROptions) -> Tensor:
    """Probability of each slot, float64 [num_slots].

    Args:
        scores: float64 [num_slots].
        met: bool [num_slots], the score means something.
        ages: int64 [num_slots], staleness in any unit.
        options: `beta` and `rho`.
    """
    order = torch.where(met, scores, -torch.inf).sort(descending=True, stable=True).indices
    rank = torch.empty_like(scores)
    rank[order] = torch.arange(1, len(scores) + 1, dtype=rank.dtype, device=rank.device)
    by_score = _share(rank ** (-1 / options.beta) * met)
    stale = ages * met
    by_age = _share(torch.where(stale.sum() > 0, stale, met).to(rank.dtype))
    replay = (1 - options.rho) * by_score + options.rho * by_age
    share = met.double().mean()
    return share * replay + (1 - share) * _share((~met).to(rank.dtype))


def _share(weights: Tensor) -> Tensor:
    """Weights scaled to sum to 1; all 0 where they are."""
    total = weights.sum()
    return weights / torch.where(total > 0, total, 1.0)


@register("sampler", "plr", PLROptions)
class PLR(DrawingSampler):
    """Reset configurations where the critic was most wrong are drawn most.

    Raises:
        BadInput: options out of range.
    """

    def __init__(self, options: PLROptions, slots: Slots) -> None:
        self.validate(options)
        super().__init__(slots, options.history)
        self.options = options
        self.scores = torch.zeros(slots.num_slots, dtype=torch.float64, device=slots.device)
        self.met = torch.zeros(slots.num_slots, dtype=torch.bool, device=slots.device)
        self.ages = torch.zeros(slots.num_slots, dtype=torch.int64, device=slots.device)  # when the iteration began

    @staticmethod
    def validate(options: PLROptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: one is out of its range.
        """
        check_history(options.history)
        if not options.beta > 0:
            raise BadInput(f"sampler.beta must be above 0, got {options.beta}")
        if not 0 <= options.rho <= 1:
            raise BadInput(f"sampler.rho must be from 0 to 1, got {options.rho}")

    def score(self, slots: Tensor, abs_advantage: Tensor) -> None:
        """Take in a rollout, before `end_iteration`; every rank must call it.

        Args:
            slots: int64 [T, N], the configuration that each step belongs to; below 0: none.
            abs_advantage: [T, N].
        """
        count = self.slots.num_slots
        # the last row is a bin for steps that belong to none
        rows = torch.where(slots < 0, count, slots).flatten()
        sums = torch.zeros(2, count + 1, dtype=torch.float64, device=self.slots.device)
        sums[0].index_add_(0, rows, abs_advantage.flatten().double())
        sums[1].index_add_(0, rows, torch.ones_like(rows, dtype=torch.float64))
        total, steps = sum_in_order(sums)[:, :count]
        self.scores.copy_(torch.where(steps > 0, total / steps.clamp(min=1), self.scores))
        self.met |= steps > 0

    def end_iteration(self) -> int:
        """Exchange outcomes, and draw by the new scores from now on; every rank must call it. No steps are taken: 0."""
        super().end_iteration()
        self.ages.copy_(self.table.ages())
        self._stale = True
        return 0

    def _rescore(self) -> Tensor:
        return probabilities(self.scores, self.met, self.ages, self.options)

    def _own_state(self) -> dict[str, Tensor]:
        return {"scores": self.scores, "met": self.met, "ages": self.ages}
