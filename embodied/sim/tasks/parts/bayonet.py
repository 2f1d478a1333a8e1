"""A bayonet: a round-nosed pin with a cross pin, which goes in through a slot and locks by a turn of 60 degrees.

The socket is a lip with a round hole and a slot through it, above a cavity. The lugs (the ends of the cross pin) pass the lip
only along the slot, and turn in the cavity, clockwise as seen from above: turned, they lie under the lip, and no pull takes the
part out. Posts in the cavity end the turn at both sides. All shapes are round on the tool's side: capsules against boxes and
capsules, which MuJoCo solves in closed form, and whose roundness is the lead-in of nose and lugs.
"""

from __future__ import annotations

import math

from embodied.sim.tasks.parts.part import BOX, CAPSULE, ORANGE, YELLOW, Draw, Part, Place, Shape
from embodied.spec.policy import Term

RADIUS, LENGTH, LIP, OUTER = 0.008, 0.06, 0.012, 0.03  # of the pin; beyond the grasp; of the lip; half the socket's width [m]
LUG, REACH, LUG_HEIGHT = 0.0025, 0.0115, 0.008  # the cross pin's radius, half its straight length, its axis above the tip [m]
PLAY = 0.001  # of the lugs between lip and floor [m]
HOLE = LIP + PLAY + LUG + LUG_HEIGHT  # the tip stands on the floor when the lugs are PLAY below the lip
LOCKED = LIP + LUG + LUG_HEIGHT  # depth of the tip when the lugs touch the lip from below
POST, POST_AT = 0.003, 0.0125  # radius of the posts and their distance from the axis [m]
TURN, END, BACK = math.radians(60.0), math.radians(75.0), math.radians(-6.0)  # success; where the posts end the turn
MASS = 0.12  # [kg]
# the hole's inner faces a little nearer than the clearance, for its corners are farther
SHARE = 0.9


def _socket(clearance: float) -> tuple[Shape, ...]:
    opening, slot = RADIUS + SHARE * clearance, LUG + clearance
    # the hole is bounded by two faces, at y = +-opening, and the four edges where the slot begins, as far from the axis
    edge = math.sqrt(opening**2 - slot**2)
    grows = ((opening * SHARE - slot) / edge, 1.0)
    half_x, half_y, deep = (OUTER - edge) / 2, (OUTER - slot) / 2, LIP / 2
    shapes = [
        Shape(
            f"slot_{'p' if x > 0 else 'n'}{'p' if y > 0 else 'n'}",
            BOX,
            (x * (edge + half_x), y * (slot + half_y), -deep),
            (half_x, half_y, deep),
            grows=(x * grows[0], y * grows[1]),
        )
        for x in (1.0, -1.0)
        for y in (1.0, -1.0)
    ]
    half = (OUTER - opening) / 2
    shapes += [
        Shape(f"lip_{name}", BOX, (0, y * (opening + half), -deep), (edge, half, deep), grows=(0.0, y * SHARE))
        for name, y in (("p", 1.0), ("n", -1.0))
    ]
    return (*shapes, *_posts(), *_casing())


def _posts() -> tuple[Shape, ...]:
    """What ends the turn. A positive turn, about z into the hole, is a negative one about the socket body's z."""
    lean = math.asin((LUG + POST) / POST_AT)  # between a lug and the post that it leans against
    middle, half = -(LIP + HOLE) / 2, (HOLE - LIP) / 2
    angles = {"end_p": math.pi - END - lean, "end_n": -END - lean, "back_p": -BACK + lean, "back_n": math.pi - BACK + lean}
    return tuple(
        Shape(
            name,
            CAPSULE,
            (POST_AT * math.cos(angle), POST_AT * math.sin(angle), middle),
            (POST, half, 0),
            rgba=YELLOW,
            touches=("lugs",),
        )
        for name, angle in angles.items()
    )


def _casing() -> tuple[Shape, ...]:
    """The cavity's outer walls, which nothing reaches: they carry the lip for the eye."""
    middle, half, thick = -(LIP + HOLE) / 2, (HOLE - LIP) / 2, 0.003
    at, inner = OUTER - thick, OUTER - 2 * thick
    return (
        *(Shape(f"casing_{n}x", BOX, (x * at, 0, middle), (thick, OUTER, half), touches=()) for n, x in (("p", 1), ("n", -1))),
        *(Shape(f"casing_{n}y", BOX, (0, y * at, middle), (inner, thick, half), touches=()) for n, y in (("p", 1), ("n", -1))),
    )


def _inserted(draw: Draw, clearance: float, depth: float) -> Place:
    # one half of the way leads in, to half the play, the other turns, to a little beyond success
    way = draw.towards_end(2.0, 0.02)
    top = max(depth, LOCKED)
    at = (top + HOLE) / 2 * way.clamp(max=1.0) + 0.3 * (HOLE - top) * draw.signed() * (way > 1.0)
    twist = (TURN + math.radians(4.0)) * (way - 1.0).clamp(min=0.0) + 0.4 * (clearance / REACH) * draw.signed()
    lateral = draw.disc(0.8 * clearance)
    # the widest tilt that the clearance lets through at this depth; below the lip's it does not grow less
    room = (2.0 * clearance / at.clamp(min=0.004, max=LIP)).clamp(max=math.radians(10.0))
    return Place(at, lateral, 0.3 * room * draw.uniform(), twist)


BAYONET = Part(
    tool=(
        Shape("pin", CAPSULE, (0, 0, LENGTH / 2 - 0.005), (RADIUS, LENGTH / 2 + 0.005 - RADIUS, 0), rgba=ORANGE, mass=MASS),
        Shape(
            "lugs",
            CAPSULE,
            (0, 0, LENGTH - LUG_HEIGHT),
            (LUG, REACH, 0),
            (math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0),
            rgba=ORANGE,
            mass=0.01,
        ),
    ),
    socket=_socket,
    inserted=_inserted,
    length=LENGTH,
    hole=HOLE,
    outer=OUTER,
    # under a pull the lugs give way by some hundredths of a millimetre
    depth=LOCKED - 0.0003,
    lateral=RADIUS / 2,
    turn=TURN,
    # an action turns by 0.3 rad/s at most: the lock alone takes 3.5 s
    episode_s=8.0,
    max_clearance=0.002,
    terms=(Term("tip rotation, fine", "rotation", "rad", 0.05, frame="socket", clip=3.0),),
)
