"""Running statistics that make inputs of any unit and offset fit a network, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from embodied.spec.ranks import rank_count, sum_over_ranks

CLIP = 10.0  # standard deviations
CHUNK = 1 << 14  # rows copied at a time

Moments = tuple[Tensor, Tensor, Tensor]
"""Number of rows int64 [], mean [D], sum of squared deviations from it [D], both float64."""


class RunningNormaliser(nn.Module):
    """(x - mean) / sqrt(variance + eps), clipped to +-10, over every row ever given to `update`.

    Before the first update mean is 0 and variance 1. Nothing changes outside `update`.

    Args:
        size: D, length of the last axis.
        eps: added to the variance: a spread below sqrt(eps) is taken for noise and not magnified to one.
    """

    count: Tensor
    mean: Tensor
    m2: Tensor
    shift: Tensor
    inverse_std: Tensor

    def __init__(self, size: int, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(size, dtype=torch.float64))
        # what `forward` reads: float32 copies, refreshed by `update`
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("inverse_std", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised float32 copy of x [..., D]."""
        return (x - self.shift).mul_(self.inverse_std).clamp_(-CLIP, CLIP)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Merge the rows of x [M, D] where mask bool [M]; other rows may hold anything. Every rank must call it."""
        batch = (torch.zeros_like(self.count), torch.zeros_like(self.mean), torch.zeros_like(self.m2))
        for rows, keep in zip(x.split(CHUNK), mask.split(CHUNK), strict=True):
            batch = _merge(batch, _moments(rows, keep))
        count, mean, m2 = _merge((self.count, self.mean, self.m2), _merge_ranks(batch))
        self.count.copy_(count)
        self.mean.copy_(mean)
        self.m2.copy_(m2)
        self.shift.copy_(mean)
        variance = torch.where(count > 0, m2 / count.clamp(min=1), 1.0)
        self.inverse_std.copy_((variance + self.eps).rsqrt())


def _moments(x: Tensor, mask: Tensor) -> Moments:
    """Of the rows of x [M, D] where mask [M].

    Sums are float64, deviations from the mean float32: neither an offset nor the number of rows costs precision, and no
    float64 copy of x is made.
    """
    keep = mask.unsqueeze(-1)
    count = mask.sum()
    mean = _sum(torch.where(keep, x, 0.0)) / count.clamp(min=1)
    centre = mean.float()
    squares = _sum(torch.where(keep, x - centre, 0.0).square_())
    return count, mean, (squares - count * (mean - centre).square()).clamp_(min=0)


def _sum(x: Tensor) -> Tensor:
    """Sum over the rows of x [M, D], float64 [D]."""
    # in pieces that stay in the cache, for torch first makes a float64 copy
    return torch.stack([rows.sum(0, dtype=torch.float64) for rows in x.split(4096)]).sum(0)


def _merge(a: Moments, b: Moments) -> Moments:
    """Moments of two sets together (Chan, Golub and LeVeque 1979)."""
    (count_a, mean_a, m2_a), (count_b, mean_b, m2_b) = a, b
    count = count_a + count_b
    difference = mean_b - mean_a
    share = count_b / count.clamp(min=1).double()
    return count, mean_a + difference * share, m2_a + m2_b + difference.square() * (count_a * share)


def _merge_ranks(local: Moments) -> Moments:
    """Moments of all ranks' sets together."""
    if rank_count() == 1:
        return local
    count, mean, m2 = local
    total = sum_over_ranks(count.clone())
    total_mean = sum_over_ranks(count * mean) / total.clamp(min=1)
    return total, total_mean, sum_over_ranks(m2 + count * (mean - total_mean).square())
