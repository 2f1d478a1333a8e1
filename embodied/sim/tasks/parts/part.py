"""What a part to be assembled is: shapes to hold, shapes to put them into, and when that has succeeded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mujoco
import torch
from torch import Tensor

from embodied.spec.policy import Term

Vector = tuple[float, float, float]
Quaternion = tuple[float, float, float, float]

BOX, CAPSULE, CYLINDER = mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_CYLINDER
ORANGE, BLUE, YELLOW = (0.85, 0.45, 0.15, 1.0), (0.35, 0.45, 0.6, 1.0), (0.8, 0.8, 0.3, 1.0)


@dataclass(frozen=True)
class Shape:
    """A convex geom, in the tool's frame (z out of the hand) or in the socket body's (origin in the mouth's centre, z up).

    Attributes:
        name: unique in the cell.
        kind: box, capsule or cylinder.
        pos: of its centre [m].
        size: as MuJoCo has it for its kind [m].
        quat: orientation, wxyz.
        rgba: colour.
        mass: of a shape of the tool [kg].
        grows: how far the shape moves along x and y for each metre that the clearance grows by.
        touches: the tool's shapes that a shape of the socket can meet; None: all.
    """

    name: str
    kind: mujoco.mjtGeom
    pos: Vector
    size: Vector
    quat: Quaternion = (1.0, 0.0, 0.0, 0.0)
    rgba: Quaternion = BLUE
    mass: float = 0.0
    grows: tuple[float, float] = (0.0, 0.0)
    touches: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Draw:
    """Random numbers of `count` starts, float64, from one stream."""

    generator: torch.Generator
    count: int

    def uniform(self, *columns: int) -> Tensor:
        """In [0, 1), [count, *columns]."""
        return torch.rand(self.count, *columns, generator=self.generator, dtype=torch.float64)

    def signed(self, *columns: int) -> Tensor:
        """In [-1, 1), [count, *columns]."""
        return 2.0 * self.uniform(*columns) - 1.0

    def log_uniform(self, low: float, high: float) -> Tensor:
        """Between low and high, evenly over magnitudes, [count]."""
        return low * (high / low) ** self.uniform()

    def disc(self, radius: float) -> Tensor:
        """Points evenly over a disc about the origin, [count, 2]."""
        distance, around = radius * self.uniform().sqrt(), 2.0 * math.pi * self.uniform()
        return torch.stack([distance * around.cos(), distance * around.sin()], -1)

    def towards_end(self, full: float, finest: float) -> Tensor:
        """Places on a way of length `full`: half of them evenly over it, half log-uniform in what remains, [count].

        Evenly, for each piece of the way is a step to be learned; log-uniform, from `finest` on, for the first successes come
        from the very end.
        """
        return torch.where(self.uniform() < 0.5, full * self.uniform(), full - self.log_uniform(finest, full))


class Place(NamedTuple):
    """Where tools are in the socket's frame (z into the hole): depth [n] and lateral [n, 2] of the tip [m], tilt [n] and
    twist [n] of the tool [rad]; which way it is tilted is not a part's business.
    """

    depth: Tensor
    lateral: Tensor
    tilt: Tensor
    twist: Tensor


@dataclass(frozen=True)
class Part:
    """A part and its socket.

    Attributes:
        tool: the shapes that are held; the tool's frame has its origin at the grasp point.
        socket: the socket's shapes above its floor, for a clearance a side [m].
        inserted: draws places from the mouth to success, for a clearance a side and the depth of success [m].
        length: from the grasp point to the tip [m].
        hole: depth of the floor below the mouth [m].
        outer: half the width of the socket's pedestal, less the clearance [m].
        depth: of the tip, from which on success counts [m].
        lateral: of the tip beside the axis, up to which success counts [m].
        turn: rotation about z from which on success counts [rad]; None: any.
        episode_s: time limit [s].
        max_clearance: a side, beyond which the part would not do what it is for [m].
        terms: what the policy sees of this part beside what it sees of all.
    """

    tool: tuple[Shape, ...]
    socket: Callable[[float], tuple[Shape, ...]]
    inserted: Callable[[Draw, float, float], Place]
    length: float
    hole: float
    outer: float
    depth: float
    lateral: float
    turn: float | None = None
    episode_s: float = 3.2
    max_clearance: float = 0.005
    terms: tuple[Term, ...] = ()


def wall_geoms(side: str) -> tuple[str, str, str]:
    """The three boxes of one wall: shaft, rim (above the chamfer, set back by it) and chamfer."""
    return f"shaft_{side}", f"rim_{side}", f"chamfer_{side}"


def wall(
    side: str,
    turn: float,
    grows: tuple[float, float],
    opening: float,
    half_length: float,
    hole: float,
    chamfer: float,
    thick: float,
) -> tuple[Shape, ...]:
    """A wall of a hole, with a chamfer of 45 degrees at the mouth: `wall_geoms` of `side`.

    Args:
        side: its name.
        turn: about z, from a wall whose inner face is at x = opening [rad].
        grows: see `Shape`.
        opening: distance of the inner face from the axis [m].
        half_length: half its extent along the mouth [m].
        hole: depth of its lower end [m].
        chamfer: height and width of the chamfer [m].
        thick: of the wall [m].
    """
    shaft_height, bar = (hole - chamfer) / 2, 0.002
    # in the plane (outward, up): centre and half size
    shaft = ((opening + thick / 2, -chamfer - shaft_height), (thick / 2, shaft_height))
    rim = ((opening + chamfer + thick / 2, -0.003), (thick / 2, 0.003))
    # the chamfer face runs from (opening + chamfer, 0) down to (opening, -chamfer); the bar lies behind it, inside the wall
    middle = (opening + chamfer / 2, -chamfer / 2)
    slope = chamfer / math.sqrt(2)
    bar_centre = (middle[0] + bar / math.sqrt(2), middle[1] - bar / math.sqrt(2))
    boxes = [(*shaft, 0.0), (*rim, 0.0), (bar_centre, (bar, slope), math.pi / 4)]
    # about z, then, for the chamfer, about the wall's own y axis (along the wall)
    w1, z1 = math.cos(turn / 2), math.sin(turn / 2)
    shapes = []
    for name, ((outward, up), (half_thick, high), tilt) in zip(wall_geoms(side), boxes, strict=True):
        pos = (outward * math.cos(turn), outward * math.sin(turn), up)
        w2, y2 = math.cos(tilt / 2), math.sin(tilt / 2)
        quat = (w1 * w2, -z1 * y2, w1 * y2, z1 * w2)
        rgba = YELLOW if name.startswith("chamfer") else BLUE
        shapes.append(Shape(name, BOX, pos, (half_thick, half_length, high), quat, rgba, grows=grows))
    return tuple(shapes)
