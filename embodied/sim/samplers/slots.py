"""What a sampler is built on: the configurations of a reset bank, and the worlds that start from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodied.spec.errors import BadInput


@dataclass(frozen=True)
class Slots:
    """The configurations ("slots") of a reset bank as a sampler sees them.

    Attributes:
        num_worlds: how many slots `sample` draws at a time.
        tags: int64 [num_slots], the kind of each configuration as an index into `tag_names`.
        tag_names: names of the kinds, used in metrics.
        difficulty: float64 [num_slots], larger is harder; of any unit.
        bank_hash: identity of the reset bank, kept in checkpoints.
        seed: of what is drawn; each rank of a distributed run draws differently from the same seed.
        device: where everything lives.

    Raises:
        BadInput: no slots, or tags or difficulties that do not fit.
    """

    num_worlds: int
    tags: Tensor
    tag_names: tuple[str, ...]
    difficulty: Tensor
    bank_hash: str
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        count = self.tags.numel()
        if count < 1:
            raise BadInput("the reset bank has 0 configurations, at least 1 is needed: generate it again")
        if self.tags.ndim != 1 or not 0 <= int(self.tags.min()) <= int(self.tags.max()) < len(self.tag_names):
            raise BadInput(
                f"the reset bank's tags must be a row of indices below {len(self.tag_names)} (its tag names), got shape "
                f"{list(self.tags.shape)}, {int(self.tags.min())} to {int(self.tags.max())}: generate the bank again"
            )
        if self.difficulty.shape != self.tags.shape or not bool(self.difficulty.isfinite().all()):
            raise BadInput(
                f"the reset bank's difficulties must be {count} finite numbers, one a configuration, got shape "
                f"{list(self.difficulty.shape)}: generate the bank again"
            )

    @property
    def num_slots(self) -> int:
        """Number of configurations."""
        return self.tags.numel()
