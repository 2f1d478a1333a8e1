"""World i always starts from the same configuration: for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Fixed:
    """A `Sampler` that draws nothing and keeps nothing.

    Attributes:
        slots: int64 [num_worlds], where each world starts: configuration i for world i unless set otherwise.
    """

    def __init__(self, num_worlds: int, device: torch.device) -> None:
        self.slots = torch.arange(num_worlds, device=device)

    def sample(self) -> Tensor:
        """The slot of each world."""
        return self.slots

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes are the evaluation's own business."""

    def end_iteration(self) -> int:
        """Nothing to do."""
        return 0

    def metrics(self) -> dict[str, Tensor]:
        """Nothing to show."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
