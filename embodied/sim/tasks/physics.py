"""What tasks share: changing the physics of some worlds, and noise on what is measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from embodied.spec.protocols import Engine


def put(engine: Engine, name: str, where: tuple[int | slice, ...], values: Tensor, mask: Tensor) -> None:
    """Write values [N, ...] to the part `where` of a model field in the worlds of `mask`; `commit` makes them effective."""
    live = engine.parameters(name)[(slice(None), *where)]
    if live.device.type == "cpu":
        # few worlds end in a step, and a CPU need not avoid shapes that depend on data
        ids = torch.nonzero(mask)[:, 0]
        live[ids] = values[ids].to(live.dtype)
    else:
        live.copy_(torch.where(mask.view(-1, *[1] * (live.ndim - 1)), values.to(live.dtype), live))


def noisy(truth: dict[str, Tensor], sigma: Mapping[str, float], generator: torch.Generator) -> dict[str, Tensor]:
    """The readings, with noise of `sigma` on those [N, K] that it names."""
    sizes = [truth[name].shape[1] for name in sigma]
    some = truth[next(iter(sigma))]
    noise = torch.randn(len(some), sum(sizes), generator=generator, device=some.device)
    parts = zip(sigma.items(), noise.split(sizes, 1), strict=True)
    return truth | {name: torch.add(truth[name], part, alpha=size) for (name, size), part in parts}
