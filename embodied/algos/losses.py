"""Losses of PPO: pure functions over the M transitions of a minibatch, of which only the `valid` ones count."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean of x [M] where valid bool [M]; 0 if nowhere."""
    return torch.where(valid, x, 0.0).sum() / valid.sum().clamp(min=1)


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, valid: Tensor, clip: float) -> Tensor:
    """Policy loss (Schulman et al. 2017, equation 7, negated).

    Args:
        log_ratio: log-probability now minus that when the action was taken [M].
        advantage: normalised [M].
        valid: bool [M].
        clip: a ratio further than this from 1 earns nothing more.
    """
    ratio = log_ratio.exp()
    return -masked_mean(torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage), valid)


def value_loss(prediction: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """Mean squared error of predictions [M] of normalised returns [M]."""
    return masked_mean((prediction - target).square(), valid)


def approx_kl(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """KL(old || new) estimated from log-ratios [M] of the old policy's actions; never negative.

    Source: the estimator k3 of J. Schulman, "Approximating KL divergence" (2020).
    """
    return masked_mean(log_ratio.expm1() - log_ratio, valid)


def clip_fraction(log_ratio: Tensor, valid: Tensor, clip: float) -> Tensor:
    """Share of the valid transitions whose ratio lies outside 1 +- clip."""
    return masked_mean((log_ratio.expm1().abs() > clip).float(), valid)


def adapted_rate(rate: Tensor, kl: Tensor, desired_kl: float, bounds: tuple[float, float]) -> Tensor:
    """The learning rate 1.5 times lower if the KL is over twice the desired one, higher if under half, in bounds.

    Source: Schulman et al. 2017, section 4, applied to the learning rate instead of a penalty.
    """
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, torch.where(kl < desired_kl / 2, 1.5, 1.0))
    return (rate * factor).clamp(*bounds)
