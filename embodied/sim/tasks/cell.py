"""The assembly cell: table, square socket with a chamfered mouth, square peg held in the hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco

from embodied.sim.robots.arm import VISUAL, Arm, build_arm

# Stiff and damped at 2 ms: penetration stays near a tenth of a millimetre under 20 N
SOLREF, SOLIMP = [0.004, 1.0], [0.95, 0.99, 0.0005, 0.5, 2.0]
MOUTH_HEIGHT = 0.1  # of the socket's mouth above the table [m]
CENTRE = (0.5, 0.0)  # about which sockets are placed, in the base frame [m]
FRICTION = 0.3  # of part against socket, nominal: steel on steel, dry to lightly oiled


@dataclass(frozen=True)
class PegGeometry:
    """Square peg and socket [m]: side of the peg, its length beyond the fingertips, hole depth, chamfer, wall, mass [kg]."""

    side: float = 0.016
    length: float = 0.06
    hole: float = 0.032
    chamfer: float = 0.0005
    wall: float = 0.02
    mass: float = 0.12


SIDES = ("px", "nx", "py", "ny")
"""The four walls, by the side of the socket frame on which they stand."""


def wall_geoms(side: str) -> tuple[str, str, str]:
    """The three boxes of one wall: shaft, rim (above the chamfer, set back by it) and chamfer."""
    return f"shaft_{side}", f"rim_{side}", f"chamfer_{side}"


def build_cell(arm: Arm, peg: PegGeometry, clearance: float) -> mujoco.MjSpec:
    """The cell's model. The socket is a mocap body whose frame lies in the mouth's centre, z up, so that a world's socket
    pose is part of its state; the peg's tip is the `tcp` site. Gravity is off: the arm's controller cancels arm and payload.
    """
    spec, tool = build_arm(arm, peg.length)
    spec.modelname = "assembly"
    option = spec.option
    option.timestep = arm.spec.physics_dt
    option.gravity = [0, 0, 0]
    option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    # dampers are soft at 2 ms: taking them explicitly spares a factorisation a step
    option.disableflags |= mujoco.mjtDisableBit.mjDSBL_EULERDAMP
    half = peg.side / 2
    tool.add_geom(
        name="peg",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        pos=[0, 0, peg.length / 2 - 0.005],
        size=[half, half, peg.length / 2 + 0.005],
        rgba=[0.85, 0.45, 0.15, 1],
        **{**VISUAL, "mass": peg.mass},
    )
    spec.worldbody.add_geom(
        name="table",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[1, 1, 0.05],
        rgba=[0.55, 0.52, 0.48, 1],
        **VISUAL,
    )
    socket = spec.worldbody.add_body(name="socket", pos=[*CENTRE, MOUTH_HEIGHT], mocap=True)
    for side in SIDES:
        for name, (pos, size, quat) in zip(wall_geoms(side), _wall(side, peg, half + clearance), strict=True):
            rgba = [0.35, 0.45, 0.6, 1] if not name.startswith("chamfer") else [0.8, 0.8, 0.3, 1]
            socket.add_geom(name=name, type=mujoco.mjtGeom.mjGEOM_BOX, pos=pos, size=size, quat=quat, rgba=rgba, **VISUAL)
    low = (peg.hole + MOUTH_HEIGHT) / 2
    outer = half + clearance + peg.wall
    socket.add_geom(
        name="floor",
        type=mujoco.mjtGeom.mjGEOM_BOX,
        pos=[0, 0, -low],
        size=[outer, outer, MOUTH_HEIGHT - low],
        rgba=[0.25, 0.3, 0.4, 1],
        **VISUAL,
    )
    socket.add_site(name="mouth", size=[0.002, 0, 0], group=4)
    for name in ["table", "floor", *(name for side in SIDES for name in wall_geoms(side))]:
        spec.add_pair(
            name=f"peg_{name}",
            geomname1="peg",
            geomname2=name,
            condim=3,
            friction=[FRICTION, FRICTION, 0.005, 0.0001, 0.0001],
            solref=SOLREF,
            solimp=SOLIMP,
        )
    contact = spec.add_sensor(
        name="contact",
        type=mujoco.mjtSensor.mjSENS_CONTACT,
        objtype=mujoco.mjtObj.mjOBJ_GEOM,
        objname="peg",
        reftype=mujoco.mjtObj.mjOBJ_BODY,
        refname="socket",
    )
    # one contact, the deepest, and of it the distance alone
    contact.intprm[:3] = [1 << int(mujoco.mjtConDataField.mjCONDATA_DIST), 1, 1]
    spec.visual.headlight.ambient = [0.35, 0.35, 0.35]
    spec.visual.headlight.diffuse = [0.5, 0.5, 0.5]
    spec.worldbody.add_light(pos=[0.6, -0.8, 1.5], dir=[-0.1, 0.5, -1.0], diffuse=[0.5, 0.5, 0.5])
    spec.worldbody.add_camera(name="side", pos=[1.05, -0.75, 0.55], xyaxes=[0.81, 0.586, 0, -0.246, 0.34, 0.908], fovy=42)
    return spec


def _wall(side: str, peg: PegGeometry, opening: float) -> list[tuple[list[float], list[float], list[float]]]:
    """Position, half size and quaternion of the shaft, rim and chamfer boxes of a wall whose inner face is at `opening`."""
    chamfer, wall = peg.chamfer, peg.wall
    half_length = opening + wall if side[1] == "x" else opening + chamfer
    shaft_height, bar = (peg.hole - chamfer) / 2, 0.002
    # in the plane (outward, up): centre and half size
    shaft = ((opening + wall / 2, -chamfer - shaft_height), (wall / 2, shaft_height))
    rim = ((opening + chamfer + wall / 2, -0.003), (wall / 2, 0.003))
    # the chamfer face runs from (opening + chamfer, 0) down to (opening, -chamfer); the bar lies behind it, inside the wall
    middle = (opening + chamfer / 2, -chamfer / 2)
    slope = chamfer / math.sqrt(2)
    bar_centre = (middle[0] + bar / math.sqrt(2), middle[1] - bar / math.sqrt(2))
    boxes = [(*shaft, 0.0), (*rim, 0.0), (bar_centre, (bar, slope), math.pi / 4)]
    turn = {"px": 0.0, "py": math.pi / 2, "nx": math.pi, "ny": -math.pi / 2}[side]
    about_z = [math.cos(turn / 2), 0.0, 0.0, math.sin(turn / 2)]
    out = []
    for (outward, up), (thick, high), tilt in boxes:
        pos = [outward * math.cos(turn), outward * math.sin(turn), up]
        # tilt about the wall's own y axis (along the wall)
        about_y = [math.cos(tilt / 2), 0.0, math.sin(tilt / 2), 0.0]
        quat = [0.0] * 4
        w1, _, _, z1 = about_z
        w2, _, y2, _ = about_y
        quat[0], quat[1], quat[2], quat[3] = w1 * w2, -z1 * y2, w1 * y2, z1 * w2
        out.append((pos, [thick, half_length, high], quat))
    return out
