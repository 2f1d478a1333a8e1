"""A square peg and its square hole."""

from __future__ import annotations

import math

from embodied.sim.tasks.parts.part import BOX, ORANGE, Draw, Part, Place, Shape, wall

SIDE, LENGTH, HOLE, CHAMFER, WALL = 0.016, 0.06, 0.032, 0.0005, 0.02  # [m]
MASS = 0.12  # [kg]
SIDES = ("px", "nx", "py", "ny")
"""The four walls, by the side of the socket on which they stand."""
_TURN = {"px": 0.0, "py": math.pi / 2, "nx": math.pi, "ny": -math.pi / 2}
_OUTWARD = {"px": (1.0, 0.0), "nx": (-1.0, 0.0), "py": (0.0, 1.0), "ny": (0.0, -1.0)}


def _socket(clearance: float) -> tuple[Shape, ...]:
    opening = SIDE / 2 + clearance
    half_length = {"x": opening + WALL, "y": opening + CHAMFER}
    walls = (wall(s, _TURN[s], _OUTWARD[s], opening, half_length[s[1]], HOLE, CHAMFER, WALL) for s in SIDES)
    return tuple(shape for shapes in walls for shape in shapes)


def _inserted(draw: Draw, clearance: float, depth: float) -> Place:
    at = draw.towards_end(depth + 0.002, 0.001)
    lateral = 0.7 * clearance * draw.signed(2)
    # the widest tilt that the clearance lets through at this depth
    room = (2.0 * clearance / at.clamp(min=0.004)).clamp(max=math.radians(10.0))
    return Place(at, lateral, 0.4 * room * draw.uniform(), 0.3 * (2.0 * clearance / SIDE) * draw.signed())


PEG = Part(
    tool=(Shape("peg", BOX, (0, 0, LENGTH / 2 - 0.005), (SIDE / 2, SIDE / 2, LENGTH / 2 + 0.005), rgba=ORANGE, mass=MASS),),
    socket=_socket,
    inserted=_inserted,
    length=LENGTH,
    hole=HOLE,
    outer=SIDE / 2 + WALL,
    depth=0.025,
    lateral=SIDE / 4,
)
