"""Resets drawn around the frontier of what the policy can do (success-guided sampling, arXiv 2610.12465).

Of each configuration the mean p of its last H outcomes gives the weight
w = (p + eps)^(kappa t) (1 - p + eps)^(kappa (1 - t)), a Beta(1 + kappa t, 1 + kappa (1 - t)) kernel with its mode at t,
and P = softmax(log(w + eps) / T).

Three further options, off by default because the paper has none of them, answer ways in which this fails:
a mastered configuration is forgotten unnoticed (`max_age`), parts of the bank are never visited (`uniform_fraction`), and
what cannot be solved takes up the draws because there is so much of it (`quarantine`). The last is for presets that draw the
unsolved often (kappa 1): what will be solved next has not been solved either, and with kappa 5 quarantine hides it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.sim.samplers.drawing import DrawingSampler
from embodied.sim.samplers.slots import Slots
from embodied.sim.samplers.table import OutcomeTable, check_history
from embodied.spec.errors import BadInput
from embodied.spec.registry import register

QUARANTINED = 0.01  # by which the probability of a quarantined configuration is multiplied


@dataclass
class SuccessGuidedOptions:
    """Success-guided resets: the paper's locomotion preset, its history and floor scaled to a laptop's few worlds.

    A thousand worlds visit a configuration tens of times where the paper's million visit it thousands: a shorter history
    follows the policy, a higher floor gives unsolved configurations a second chance.
    """

    history: int = 32  # H, outcomes kept of each reset configuration
    target: float = 0.66  # t, the success rate most sought
    kappa: float = 5.0  # sharpness around the target
    temperature: float = 2.0  # T of the softmax
    floor: float = 1e-6  # eps: keeps solved and unsolved configurations drawn now and then
    divide_by: str = "visits"  # p while fewer than H outcomes exist: relative to visits, or to history (zero-filled)
    max_age: int | None = None  # steps without an outcome after which a configuration is drawn as if p were the target
    uniform_fraction: float = 0.0  # of the draws, uniform over the bank
    quarantine: int | None = None  # outcomes after which a configuration whose last H all failed is drawn 100 times less


def logits(rates: Tensor, options: SuccessGuidedOptions) -> Tensor:
    """log(w + eps) / T of success rates, float64 of the same shape."""
    t, kappa, eps = options.target, options.kappa, options.floor
    rates = rates.double()  # float32 has no 1 - p + 1e-8
    weights = (rates + eps) ** (kappa * t) * (1 - rates + eps) ** (kappa * (1 - t))
    return torch.log(weights + eps) / options.temperature


def probabilities(table: OutcomeTable, logit: Tensor, options: SuccessGuidedOptions) -> Tensor:
    """Probability of each slot, float64 [num_slots].

    Args:
        table: what came of each slot.
        logit: of each slot by its success rate, float64 [num_slots], see `logits`.
        options: the target, and the answers to failures.
    """
    unsolved = table.sums[: table.num_slots] == 0
    if options.max_age is not None:
        aged = table.ages() > options.max_age
        logit = torch.where(aged, logits(logit.new_tensor(options.target), options), logit)
        unsolved = unsolved & ~aged
    if options.quarantine is not None:
        hopeless = unsolved & (table.visits[: table.num_slots] >= options.quarantine)
        logit = torch.where(hopeless, logit + math.log(QUARANTINED), logit)
    guided, share = torch.softmax(logit, dim=0), options.uniform_fraction
    return guided if share == 0 else (1 - share) * guided + share / table.num_slots


@register("sampler", "success_guided", SuccessGuidedOptions)
class SuccessGuided(DrawingSampler):
    """Reset configurations that the policy sometimes solves are drawn most.

    Raises:
        BadInput: options out of range.
    """

    def __init__(self, options: SuccessGuidedOptions, slots: Slots) -> None:
        self.validate(options)
        self.options = options
        super().__init__(slots, options.history, options.divide_by)
        # rates are k of n outcomes: looked up, for powers and logarithms of a whole bank would be a tenth of a step's time
        counts = torch.arange(options.history + 1, dtype=torch.float64, device=slots.device)
        self._logits = logits((counts / counts.clamp(min=1)[:, None]).clamp(max=1), options)  # [n, k]

    @staticmethod
    def validate(options: SuccessGuidedOptions) -> None:
        """Check the options before anything is built.

        Raises:
            BadInput: one is out of its range.
        """
        check_history(options.history, options.divide_by)
        if not 0 < options.target < 1:
            raise BadInput(f"sampler.target must be between 0 and 1, both excluded, got {options.target}")
        for name in ("kappa", "temperature", "floor"):
            if not getattr(options, name) > 0:
                raise BadInput(f"sampler.{name} must be above 0, got {getattr(options, name)}")
        for name in ("max_age", "quarantine"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise BadInput(f"sampler.{name} must be at least 1, or null for none, got {getattr(options, name)}")
        if not 0 <= options.uniform_fraction <= 1:
            raise BadInput(f"sampler.uniform_fraction must be from 0 to 1, got {options.uniform_fraction}")

    def _rescore(self) -> Tensor:
        logit = self._logits[self.table.held(), self.table.sums[: self.table.num_slots]]
        return probabilities(self.table, logit, self.options)

    def _take(self, slots: Tensor, success: Tensor, valid: Tensor, calls: int = 1) -> None:
        super()._take(slots, success, valid, calls)
        self._stale = True
