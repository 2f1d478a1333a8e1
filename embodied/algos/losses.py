"""Losses of PPO: pure functions over the M transitions of a minibatch, or of a piece of one.

Each counts with its weight [M]: 0 where it is not valid, and the weights of a whole minibatch add up to 1, so that the sums
over its pieces are means over what is valid.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    """Sum of x [M] by weight; where that is 0, x may hold anything."""
    return torch.where(weight > 0, x * weight, 0.0).sum()


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, weight: Tensor, low: float, high: float) -> Tensor:
    """Policy loss (Schulman et al. 2017, equation 7, negated).

    Args:
        log_ratio: log-probability now minus that when the action was taken [M].
        advantage: normalised [M].
        weight: [M].
        low: a ratio further than this below 1 earns nothing more.
        high: a ratio further than this above 1 earns nothing more.
    """
    ratio = log_ratio.exp()
    return -weighted(torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage), weight)


def value_loss(prediction: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared error of predictions [M] of normalised returns [M]."""
    return weighted((prediction - target).square(), weight)


def approx_kl(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """KL(old || new) estimated from log-ratios [M] of the old policy's actions; never negative.

    Source: the estimator k3 of J. Schulman, "Approximating KL divergence" (2020).
    """
    return weighted(log_ratio.expm1() - log_ratio, weight)


def clip_fraction(log_ratio: Tensor, weight: Tensor, low: float, high: float) -> Tensor:
    """Share of the valid transitions whose ratio lies outside of 1 - low to 1 + high."""
    beyond = log_ratio.expm1()
    return weighted(((beyond < -low) | (beyond > high)).float(), weight)


def adapted_rate(rate: Tensor, kl: Tensor, desired_kl: float, bounds: tuple[float, float]) -> Tensor:
    """The learning rate 1.5 times lower if the KL is over twice the desired one, higher if under half, in bounds.

    Source: Schulman et al. 2017, section 4, applied to the learning rate instead of a penalty.
    """
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, torch.where(kl < desired_kl / 2, 1.5, 1.0))
    return (rate * factor).clamp(*bounds)
