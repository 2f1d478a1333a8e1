"""Resets drawn around the frontier of what the policy can do (success-guided sampling, arXiv 2610.12465).

Of each configuration the mean p of its last H outcomes gives the weight
w = (p + eps)^(kappa t) (1 - p + eps)^(kappa (1 - t)), a Beta(1 + kappa t, 1 + kappa (1 - t)) kernel with its mode at t,
and P = softmax(log(w + eps) / T).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.table import OutcomeTable, check_history
from embodied.spec.errors import BadInput
from embodied.spec.registry import register


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


PRESETS: dict[str, dict[str, Any]] = {
    "manipulation": {
        "history": 100, "target": 0.5, "kappa": 1.0, "temperature": 2.0, "floor": 1e-4, "divide_by": "visits",
    },
    "locomotion": {
        "history": 100, "target": 0.66, "kappa": 5.0, "temperature": 2.0, "floor": 1e-8, "divide_by": "visits",
    },
}  # fmt: skip
"""Options as in the paper, by domain."""


def probabilities(rates: Tensor, options: SuccessGuidedOptions) -> Tensor:
    """Probability of each configuration, float64 [num_slots], from their success rates [num_slots]."""
    t, kappa, eps = options.target, options.kappa, options.floor
    rates = rates.double()  # float32 has no 1 - p + 1e-8
    weights = (rates + eps) ** (kappa * t) * (1 - rates + eps) ** (kappa * (1 - t))
    return torch.softmax(torch.log(weights + eps) / options.temperature, dim=0)


def draw(cumulative: Tensor, u: Tensor) -> Tensor:
    """Indices int64 [M] below N by inverting the cumulative probabilities float64 [N] at u float64 [M] in [0, 1]."""
    # the last sum may fall short of u by rounding
    return torch.searchsorted(cumulative, u, right=True).clamp_(max=len(cumulative) - 1)


@register("sampler", "success_guided", SuccessGuidedOptions)
class SuccessGuided:
    """Reset configurations that the policy sometimes solves are drawn most.

    Raises:
        BadInput: options out of range.
    """

    def __init__(
        self,
        options: SuccessGuidedOptions,
        num_worlds: int,
        num_slots: int,
        tags: Tensor,
        tag_names: Sequence[str],
        bank_hash: str,
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.validate(options)
        self.options = options
        self.table = OutcomeTable(num_slots, options.history, tags, tag_names, bank_hash, device, options.divide_by)
        self.num_worlds = num_worlds
        self.device = torch.device(device)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self._rescore()

    def _rescore(self) -> None:
        self.probabilities = probabilities(self.table.rates(), self.options)
        self._cumulative = self.probabilities.cumsum(0)
        self._stale = False

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

    def sample(self) -> Tensor:
        """One slot a world, int64 [num_worlds], drawn independently."""
        if self._stale:
            self._rescore()
        u = torch.rand(self.num_worlds, dtype=torch.float64, generator=self.generator, device=self.device)
        return draw(self._cumulative, u)

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes of episodes, see `OutcomeTable.record`; returns are not used."""
        self.table.record(slots, success, valid)
        self._stale = True

    def metrics(self) -> dict[str, Tensor]:
        """Those of `OutcomeTable.metrics`."""
        if self._stale:
            self._rescore()
        return self.table.metrics(self.probabilities)

    def state_dict(self) -> dict[str, Any]:
        """The table with its bank's hash, and the generator."""
        return {**self.table.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; BadInput if it is of another bank or size."""
        self.table.load_state_dict(state)
        self.generator.set_state(state["generator"].cpu())
        self._stale = True
