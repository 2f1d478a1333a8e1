"""Multi-layer perceptrons with orthogonal initialisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from embodied.spec.errors import BadInput, nearest

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "elu": partial(nn.ELU, inplace=True),  # in place: its gradient then needs no second exponential
    "relu": partial(nn.ReLU, inplace=True),
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def check_mlp(sizes: Sequence[int], activation: str) -> None:
    """Refuse what `mlp` could not build.

    Raises:
        BadInput: an unknown activation or a width below 1.
    """
    if activation not in ACTIVATIONS:
        raise BadInput(f"unknown activation '{activation}': {nearest(activation, ACTIVATIONS)}")
    if min(sizes, default=1) < 1:
        raise BadInput(f"a network of widths {list(sizes)}: every width must be at least 1")


def mlp(
    sizes: Sequence[int], activation: str, last_gain: float = 1.0, generator: torch.Generator | None = None
) -> nn.Sequential:
    """Linear layers with an activation between them.

    Weights start orthogonal (Saxe et al. 2014) with gain sqrt(2), the last layer's with `last_gain`; biases at zero.

    Args:
        sizes: width of the input, of each hidden layer, and of the output.
        activation: a name in `ACTIVATIONS`.
        last_gain: gain of the last layer; small makes the first outputs nearly zero.
        generator: draws the weights; None: torch's global one.

    Raises:
        BadInput: an unknown activation or a width below 1.
    """
    check_mlp(sizes, activation)
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        last = i == len(sizes) - 2
        linear = nn.Linear(fan_in, fan_out)
        nn.init.orthogonal_(linear.weight, last_gain if last else math.sqrt(2), generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if last else [linear, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)
