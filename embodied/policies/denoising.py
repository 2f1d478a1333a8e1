"""What policies share that draw a chunk of actions by denoising: one way to tell time, to sample, to score and to imitate.

A chunk of H actions of A numbers is worked on as one row of H A numbers, normalised by statistics of demonstrations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from embodied.spec.errors import BadInput

FREQUENCIES = 4  # pairs of sine and cosine that tell a network the time

Transition = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Mean and standard deviation [M, H A] of what follows, of seen [M, D], x [M, H A], step int64 [M], and noisy bool [M]."""


class Schedule(NamedTuple):
    """Of each denoising step [K]: its time, the weights of what is taken for action and noise, and the standard deviation."""

    time: Tensor
    action: Tensor
    noise: Tensor
    std: Tensor


def check_options(options: object, checks: tuple[tuple[str, bool, str], ...]) -> None:
    """Refuse the first option that is not good, of (its name, whether it is good, what is expected).

    Raises:
        BadInput: see there.
    """
    for name, good, expected in checks:
        if not good:
            raise BadInput(f"policy.{name}={getattr(options, name)}: expected {expected}")


def time_features(time: Tensor) -> Tensor:
    """Sines, then cosines [M, 2 FREQUENCIES], of times [M] from 0 to 1."""
    angle = time[:, None] * (math.pi * 2.0 ** torch.arange(FREQUENCIES, device=time.device))
    return torch.cat([angle.sin(), angle.cos()], -1)


def denoise(
    transition: Transition, seen: Tensor, x: Tensor, index: Tensor, steps: int, generator: torch.Generator | None
) -> Tensor:
    """The chain [N, K + 1, H A] that begins with x [N, H A].

    Args:
        transition: see `Transition`.
        seen: normalised observations [N, D].
        x: noise to begin with.
        index: the step that is noisy, int64 [N]; below 0: all are.
        steps: K.
        generator: draws the noise of steps; None: no step is noisy.
    """
    chain = [x]
    for k in range(steps):
        step = torch.full_like(index, k)
        noisy = torch.zeros_like(step, dtype=torch.bool) if generator is None else (index == k) | (index < 0)
        x, std = transition(seen, x, step, noisy)
        if generator is not None:
            x = x + std * torch.randn(x.shape, generator=generator, device=x.device)
        chain.append(x)
    return torch.stack(chain, 1)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Logarithm of the normal density at x, number by number."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)


def normalised(action: Tensor, mask: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Chunks as rows of normalised numbers [M, H A], 0 where not kept, and which are kept, bool [M, H A].

    Args:
        action: [M, H, A].
        mask: bool [M, H], false behind the end of an episode, where actions may hold anything.
        mean: of actions [A].
        std: of actions [A].
    """
    kept = mask.repeat_interleave(action.shape[2], 1)
    return torch.where(kept, ((action - mean) / std).flatten(1), 0.0), kept


def mean_where(kept: Tensor, error: Tensor) -> Tensor:
    """Mean [] of the numbers of `error` that are kept; 0 if none is."""
    return torch.where(kept, error, 0.0).sum() / kept.sum().clamp(min=1)


def statistics(action: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [A] of actions [L, A]; a component that never moves gets a small one."""
    return action.mean(0), action.std(0).clamp(min=1e-3)
