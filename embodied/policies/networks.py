"""Multi-layer perceptrons with orthogonal initialisation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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


def mlp(sizes: Sequence[int], activation: str, last_gain: float = 1.0, generator: torch.Generator | None = None) -> MLP:
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
    return MLP(layers, activation)


class MLP(nn.Sequential):
    """What `mlp` builds; the same function as its layers in sequence.

    On a CPU, where memory that is not in the cache costs as much as the arithmetic, it works in buffers that are kept; its
    gradient cannot be differentiated again there.
    """

    def __init__(self, layers: Sequence[nn.Module], activation: str) -> None:
        super().__init__(*layers)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Output [M, sizes[-1]] for x [M, sizes[0]]."""
        buffered = x.device.type == "cpu" and x.ndim == 2 and self.activation in _IN_PLACE
        if not buffered or torch.jit.is_tracing():
            return super().forward(x)
        return _Buffered.apply(self.activation, x, *self.parameters())


_free: list[Tensor] = []
"""Buffers that nobody uses."""


class _Buffers:
    """Memory to work in, which goes back to the others' when this object does."""

    def __init__(self) -> None:
        self._taken: list[Tensor] = []

    def take(self, like: Tensor, width: int) -> Tensor:
        """Uninitialised [M, width] of the dtype of `like` [M, ...]."""
        shape = (len(like), width)
        try:
            flat = _free.pop()
        except IndexError:  # not asked before: threads share them
            flat = like.new_empty(0)
        if flat.dtype != like.dtype or flat.numel() < shape[0] * width:
            flat = like.new_empty(shape[0] * width)
        self._taken.append(flat)
        return flat[: shape[0] * width].view(shape)

    def __del__(self) -> None:
        _free.extend(reversed(self._taken))


class _Buffered(torch.autograd.Function):
    """A perceptron and its gradient by hand: x [M, D], then weight and bias of each layer."""

    @staticmethod
    def forward(ctx: Any, activation: str, x: Tensor, *parameters: Tensor) -> Tensor:
        function, inputs, buffers = _IN_PLACE[activation][0], [x], _Buffers()
        layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        for weight, bias in layers[:-1]:
            hidden = buffers.take(x, len(bias))
            torch.addmm(bias, inputs[-1], weight.t(), out=hidden)
            function(hidden)
            inputs.append(hidden)
        if any(ctx.needs_input_grad):
            ctx.activation, ctx.inputs, ctx.buffers = activation, inputs, buffers
            ctx.save_for_backward(*parameters)  # torch then notices if one is changed before the gradient is taken
        weight, bias = layers[-1]
        # the narrow matrix first, as in `_outer`
        return torch.addmm(bias.unsqueeze(1), weight, inputs[-1].t()).t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parameters, derivative, buffers = ctx.saved_tensors, _IN_PLACE[ctx.activation][1], _Buffers()
        gradients: list[Tensor] = []
        for weight, inputs in zip(reversed(parameters[2::2]), reversed(ctx.inputs[1:]), strict=True):
            gradients += [gradient.sum(0), _outer(gradient, inputs)]
            gradient = torch.mm(gradient, weight, out=buffers.take(gradient, weight.shape[1]))
            derivative(gradient, inputs)
        x, weight = ctx.inputs[0], parameters[0]
        gradients += [gradient.sum(0), _outer(gradient, x)]
        return None, gradient @ weight if ctx.needs_input_grad[1] else None, *reversed(gradients)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a.T @ b, [A, B] of a [M, A] and b [M, B], with the narrower of them first, which MKL does faster."""
    return a.t() @ b if a.shape[1] <= b.shape[1] else (b.t() @ a).t()


def _elu(x: Tensor) -> None:
    # x where it is positive, else exp(x) - 1, which is never below x
    buffers = _Buffers()
    negative = torch.clamp(x, max=0.0, out=buffers.take(x, x.shape[1]))
    torch.maximum(x, negative.exp_().sub_(1.0), out=x)


def _elu_derivative(gradient: Tensor, output: Tensor) -> None:
    torch.ops.aten.elu_backward.grad_input(gradient, 1.0, 1.0, 1.0, True, output, grad_input=gradient)


def _relu_derivative(gradient: Tensor, output: Tensor) -> None:
    torch.ops.aten.threshold_backward.grad_input(gradient, output, 0.0, grad_input=gradient)


def _tanh_derivative(gradient: Tensor, output: Tensor) -> None:
    torch.ops.aten.tanh_backward.grad_input(gradient, output, grad_input=gradient)


_IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor, Tensor], None]]] = {
    "elu": (_elu, _elu_derivative),
    "relu": (torch.relu_, _relu_derivative),
    "tanh": (torch.tanh_, _tanh_derivative),
}
"""Activations, and their derivatives from what they gave, multiplied into the gradient."""
