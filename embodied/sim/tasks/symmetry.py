"""A legged robot's left and right: what its policy sees and does, as seen in a mirror that stands in its xz plane."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embodied.sim.robots.legged import Legged
from embodied.spec.policy import PolicySpec

Mirrored = tuple[list[int], list[float]]
"""Of each number: which one of the original stands there, and with what sign."""

ARROW: Mirrored = ([0, 1, 2], [1.0, -1.0, 1.0])
"""A position, velocity or force: y changes its sign."""
SPIN: Mirrored = ([0, 1, 2], [-1.0, 1.0, -1.0])
"""An angular velocity or torque: x and z change theirs."""


def limbs(legged: Legged) -> list[int]:
    """The limb on the other side of each, by their names, which end in L or R."""
    names = [limb.name for limb in legged.limbs]
    return [names.index(_other(name)) for name in names]


def _other(name: str) -> str:
    # by the last letter: RL is the left one behind
    return name[:-1] + {"L": "R", "R": "L"}[name[-1]]


def joints(legged: Legged) -> Mirrored:
    """Joint vectors: left and right change places, and what turns about x its sign."""
    links = [(i, link) for i, limb in enumerate(legged.limbs) for link in limb.links]
    partner = limbs(legged)
    keys = [(i, link.name) for i, link in links]
    index = [keys.index((partner[i], link.name)) for i, link in links]
    return index, [-1.0 if link.axis[0] else 1.0 for _, link in links]


def joined(parts: Sequence[Mirrored]) -> Mirrored:
    """The mirror of several vectors behind one another."""
    index: list[int] = []
    sign: list[float] = []
    for where, signs in parts:
        index += [len(sign) + i for i in where]
        sign += signs
    return index, sign


def scan(rows: int, width: int) -> Mirrored:
    """Numbers on a grid of `rows` along x, each `width` along y and as far to the left as to the right: mirrored row by row."""
    return [row * width + width - 1 - column for row in range(rows) for column in range(width)], [1.0] * (rows * width)


def mirror(
    legged: Legged, spec: PolicySpec, request: Mirrored, privileged: Sequence[Mirrored], heights: Mirrored = ([], [])
) -> dict[str, tuple[Tensor, Tensor]]:
    """The mirror of the groups `policy` and `critic` (the policy's terms, then `privileged`) and of `action`."""
    body = joints(legged)
    kinds = {
        "gyro": SPIN,
        "gravity": ARROW,
        **dict.fromkeys(("joint_position", "joint_velocity", "last_action"), body),
        # diagonal legs step together, so that the mirror's time is half a period ahead
        "clock": ([0, 1], [-1.0, -1.0]),
        "request": request,
        "heights": heights,
    }
    terms = [kinds[term.kind] for term in spec.terms]
    made: dict[str, Mirrored] = {"policy": joined(terms), "critic": joined([*terms, *privileged]), "action": body}
    return {name: (torch.tensor(index), torch.tensor(sign)) for name, (index, sign) in made.items()}
