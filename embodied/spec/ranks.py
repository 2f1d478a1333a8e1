"""The processes ("ranks") of a distributed run: who this one is, and sums and rows of all of them."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def rank_count() -> int:
    """Processes of a distributed run; 1 otherwise."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank_index() -> int:
    """This process among them; 0 in a run of one."""
    return dist.get_rank() if rank_count() > 1 else 0


def rank_seed(seed: int) -> int:
    """A seed of this rank's own; in a run of one process `seed` itself."""
    return int(np.random.SeedSequence([seed, rank_index()]).generate_state(1)[0]) if rank_count() > 1 else seed


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, in place; `x` itself in a run of one process."""
    if rank_count() > 1:
        dist.all_reduce(x)
    return x


def sum_in_order(x: Tensor) -> Tensor:
    """The sum of `x` over all ranks, added in rank order: bit-equal on every rank."""
    return gather_rows(x.unsqueeze(0)).sum(0) if rank_count() > 1 else x


def gather_rows(rows: Tensor) -> Tensor:
    """The rows [M, D] of all ranks, each with an M of its own, in rank order: the same on every rank."""
    if rank_count() == 1:
        return rows
    count = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(rank_count())]
    dist.all_gather(counts, count)
    sizes = [int(c) for c in counts]
    padded = torch.cat([rows, rows.new_zeros(max(sizes) - len(rows), *rows.shape[1:])])
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
