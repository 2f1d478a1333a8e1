"""World i always starts from configuration i: for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Fixed:
    """A `Sampler` that draws nothing and keeps nothing."""

    def __init__(self, num_worlds: int, device: torch.device) -> None:
        self._slots = torch.arange(num_worlds, device=device)

    def sample(self) -> Tensor:
        """Slot i for world i."""
        return self._slots

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes are the evaluation's own business."""

    def metrics(self) -> dict[str, Tensor]:
        """Nothing to show."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""
