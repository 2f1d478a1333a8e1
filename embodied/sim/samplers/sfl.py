"""Sampling For Learnability (Rutherford et al. 2024, arXiv 2408.15099).

Every T iterations N configurations drawn at random are tried with the present policy; the K of the highest learnability
p (1 - p) become the set that a share rho of the resets is drawn from, uniformly; the others are uniform over the bank.

The trials are environment steps like any others, and are counted as such. The paper's values for its navigation task (N 5,000
levels of 1,000 steps each, K 100, T 50 updates of 131,072 steps, rho 0.5) try three steps for every four that are learned
from. N, K and T are scaled here to learning in a hundred iterations, at about that share: 512 configurations, four episodes
of 80 steps each, for ten iterations of 24,576. Of each configuration a given number of whole episodes is run, as in the
authors' XLand-MiniGrid code: a given number of steps would count short episodes, which are the successful ones, more often.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.drawing import METRICS_HISTORY, DrawingSampler
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import check_history
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Trials
from embodied.spec.ranks import gather_rows, rank_count, rank_index
from embodied.spec.registry import register

SHARED_STREAM = 7_919  # apart from the stream of draws


@dataclass
class SFLOptions:
    """Sampling For Learnability, scaled to a laptop."""

    num_levels: int = 512  # N, configurations tried at each refresh, all if the bank has fewer
    episodes: int = 4  # tried of each
    buffer_size: int = 32  # K, configurations kept
    update_period: int = 10  # T, iterations between refreshes
    rho: float = 0.5  # share of the draws that goes to the configurations kept
    history: int = METRICS_HISTORY  # outcomes kept of each reset configuration, for the metrics only


@register("sampler", "sfl", SFLOptions)
class SFL(DrawingSampler):
    """Half of the resets are drawn from the configurations found most learnable in trials of the present policy.

    Attributes:
        evaluate: runs one episode of the present policy in each of the slots int64 [M] it is given, with the seed it is
            given; to be set before the first iteration ends. Every T iterations, from the first on, it is called.

    Raises:
        BadInput: options out of range.
    """

    evaluate: Callable[[Tensor, int], Trials] | None

    def __init__(self, options: SFLOptions, slots: Slots) -> None:
        self.validate(options)
        super().__init__(slots, options.history)
        self.options = options
        self.evaluate = None
        self.chosen = torch.zeros(slots.num_slots, dtype=torch.bool, device=slots.device)
        self.learnability = torch.zeros((), dtype=torch.float64, device=slots.device)  # mean over the chosen
        self._iterations = torch.zeros((), dtype=torch.int64)
        self._shared = torch.Generator().manual_seed(slots.seed + SHARED_STREAM)  # the same on every rank

    @staticmethod
    def validate(options: SFLOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: one is out of its range.
        """
        check_history(options.history)
        for name in ("num_levels", "episodes", "buffer_size", "update_period"):
            if getattr(options, name) < 1:
                raise BadInput(f"sampler.{name} must be at least 1, got {getattr(options, name)}")
        if options.buffer_size > options.num_levels:
            raise BadInput(
                f"sampler.buffer_size={options.buffer_size} must not be above sampler.num_levels={options.num_levels}, "
                "from which they are chosen"
            )
        if not 0 <= options.rho <= 1:
            raise BadInput(f"sampler.rho must be from 0 to 1, got {options.rho}")

    def end_iteration(self) -> int:
        """Exchange outcomes, and try configurations when it is time; every rank must call it. Steps that the trials took."""
        super().end_iteration()
        due = int(self._iterations) % self.options.update_period == 0
        self._iterations += 1
        return self._try() if due else 0

    def _try(self) -> int:
        """Try a random set of configurations, split over the ranks, and keep the most learnable; steps taken here."""
        if self.evaluate is None:
            raise RuntimeError("sampler sfl needs its `evaluate` before the first iteration ends")
        options = self.options
        candidates = torch.randperm(self.slots.num_slots, generator=self._shared)[: options.num_levels]
        mine = candidates[rank_index() :: rank_count()].to(self.slots.device)
        seed = int(torch.randint(2**62, (), generator=self.generator, device=self.slots.device))
        trials = self.evaluate(mine.repeat_interleave(options.episodes), seed)
        shape = (len(mine), options.episodes)
        solved = (trials.success & trials.valid).view(shape).sum(1)
        rows = gather_rows(torch.stack([mine, solved, trials.valid.view(shape).sum(1)], 1))
        rates = rows[:, 1].double() / rows[:, 2].clamp(min=1)
        # candidates are in random order, so equals are kept at random
        best = (rates * (1 - rates)).sort(descending=True, stable=True)
        kept = slice(options.buffer_size)
        self.chosen.zero_()
        self.chosen[rows[best.indices[kept], 0]] = True
        self.learnability.copy_(best.values[kept].mean())
        self._stale = True
        return trials.steps

    def _rescore(self) -> Tensor:
        count = self.slots.num_slots
        uniform = torch.full((count,), 1.0 / count, dtype=torch.float64, device=self.slots.device)
        chosen = self.chosen.double()
        kept = torch.where(chosen.sum() > 0, chosen / chosen.sum().clamp(min=1), uniform)
        return self.options.rho * kept + (1 - self.options.rho) * uniform

    def metrics(self) -> dict[str, Tensor]:
        """Those of `OutcomeTable.metrics`, and the mean `learnability` of the configurations kept, when they were tried."""
        return {**super().metrics(), "learnability": self.learnability.float()}

    def _own_state(self) -> dict[str, Tensor]:
        return {"chosen": self.chosen, "learnability": self.learnability, "iterations": self._iterations}

    def state_dict(self) -> dict[str, Any]:
        """Also the generator of the configurations tried."""
        return {**super().state_dict(), "shared_generator": self._shared.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; BadInput if it is of another bank or size."""
        super().load_state_dict(state)
        self._shared.set_state(state["shared_generator"].cpu())
