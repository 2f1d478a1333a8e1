"""A round pin with a flat end, and a round hole, which a hexagon of boxes stands for.

Why a hexagon: every wall costs a call of the general convex collider for each of its boxes. Microseconds a physics step at
0.5 mm clearance, one thread, best of 12 runs in turn; the square peg takes 6 above the hole, as the rod does, 6 in it and 11
pushed against a wall:

| walls | in the hole | against a wall | the true hole's clearance, by direction |
|---|---|---|---|
| 6 | 18 us | 23 us | -7 to +7 % |
| 8 | 25 us | 28 us | -4 to +4 % |
| 12 | 31 us | 36 us | -2 to +2 % |
| 16 | 42 us | 47 us | -1 to +1 % |

A capsule in eight walls without chamfers takes 9 and 12 us, but its round end finds any hole; training varies the clearance by
20 %, contacts give way by up to 0.1 mm.
"""

from __future__ import annotations

import math

from embodied.sim.tasks.parts.part import CYLINDER, ORANGE, Draw, Part, Place, Shape, wall

RADIUS, LENGTH, HOLE, CHAMFER, WALL = 0.008, 0.06, 0.032, 0.0005, 0.02  # [m]
MASS = 0.11  # steel [kg]
WALLS = 6
# inner faces a little nearer than the clearance, for the corners are farther: the error is as large either way
SHARE = 2.0 / (1.0 + 1.0 / math.cos(math.pi / WALLS))


def _socket(clearance: float) -> tuple[Shape, ...]:
    opening = RADIUS + SHARE * clearance
    half_length = (opening + WALL) * math.tan(math.pi / WALLS)
    shapes: list[Shape] = []
    for k in range(WALLS):
        turn = 2.0 * math.pi * k / WALLS
        grows = (SHARE * math.cos(turn), SHARE * math.sin(turn))
        shapes += wall(str(k), turn, grows, opening, half_length, HOLE, CHAMFER, WALL)
    return tuple(shapes)


def _inserted(draw: Draw, clearance: float, depth: float) -> Place:
    at = draw.towards_end(depth + 0.002, 0.001)
    lateral = draw.disc(0.9 * clearance)
    # the widest tilt that the clearance lets through at this depth
    room = (2.0 * clearance / at.clamp(min=0.004)).clamp(max=math.radians(10.0))
    return Place(at, lateral, 0.4 * room * draw.uniform(), math.radians(20.0) * draw.signed())


ROD = Part(
    tool=(Shape("rod", CYLINDER, (0, 0, LENGTH / 2 - 0.005), (RADIUS, LENGTH / 2 + 0.005, 0), rgba=ORANGE, mass=MASS),),
    socket=_socket,
    inserted=_inserted,
    length=LENGTH,
    hole=HOLE,
    outer=(RADIUS + WALL) / math.cos(math.pi / WALLS),
    depth=0.025,
    lateral=RADIUS / 2,
)
