"""How many threads work on what, on a CPU.

Small networks on batches of thousands are made of operations of a tenth of a millisecond or less. Threads inside of torch
would have to wait for each other at every one of them; threads that each take a piece of the batch wait once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

ROWS = 8192  # of a piece, at most: what is kept for its gradient is bounded, however large the batch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread(when: bool = True) -> Iterator[int]:
    """Let torch use one thread for each operation (not if `when` is false); gives how many it used before."""
    threads = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def pieces(index: Tensor, threads: int, uses: int) -> Sequence[Tensor]:
    """An index tensor [M] in pieces, so many that with `uses` of each every thread has as much to do; one if not on a CPU."""
    if index.device.type != "cpu":
        return [index]
    step = threads // math.gcd(threads, uses)
    return index.tensor_split(max(1, min(len(index), step * -(-len(index) // (step * ROWS)))))


def each(function: Callable[[Item], Result], items: Sequence[Item], threads: int) -> list[Result]:
    """The function of every item, in order, on as many threads; gradients must be returned, not accumulated."""
    if threads == 1 or len(items) == 1:
        return [function(item) for item in items]
    return list(_pool(threads).map(function, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "learner", initializer=torch.set_num_threads, initargs=(1,))
