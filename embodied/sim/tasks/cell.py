"""The assembly cell: a table, a socket on it, and an arm that holds the part."""

from __future__ import annotations

import mujoco

from embodied.sim.robots.arm import Arm, build_arm
from embodied.sim.robots.shapes import VISUAL
from embodied.sim.tasks.parts.part import BOX, Part, Shape

# Stiff and damped at 2 ms: penetration stays near a tenth of a millimetre under 20 N
SOLREF, SOLIMP = [0.004, 1.0], [0.95, 0.99, 0.0005, 0.5, 2.0]
MOUTH_HEIGHT = 0.1  # of the socket's mouth above the table [m]
CENTRE = (0.5, 0.0)  # about which sockets are placed, in the base frame [m]
FRICTION = 0.3  # of part against socket, nominal: steel on steel, dry to lightly oiled


def build_cell(arm: Arm, part: Part, clearance: float) -> mujoco.MjSpec:
    """The cell's model. The socket is a mocap body whose frame lies in the mouth's centre, z up, so that a world's socket
    pose is part of its state; the part's tip is the `tcp` site. Gravity is off: the arm's controller cancels arm and payload.
    """
    spec, tool = build_arm(arm, part.length)
    spec.modelname = "assembly"
    option = spec.option
    option.timestep = arm.spec.physics_dt
    option.gravity = [0, 0, 0]
    option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    # dampers are soft at 2 ms: taking them explicitly spares a factorisation a step
    option.disableflags |= mujoco.mjtDisableBit.mjDSBL_EULERDAMP
    for shape in part.tool:
        _add(tool, shape)
    spec.worldbody.add_geom(
        name="table",
        type=mujoco.mjtGeom.mjGEOM_PLANE,
        size=[1, 1, 0.05],
        rgba=[0.55, 0.52, 0.48, 1],
        **VISUAL,
    )
    socket = spec.worldbody.add_body(name="socket", pos=[*CENTRE, MOUTH_HEIGHT], mocap=True)
    shapes = part.socket(clearance)
    for shape in shapes:
        _add(socket, shape)
    low, outer = (part.hole + MOUTH_HEIGHT) / 2, part.outer + clearance
    _add(socket, Shape("floor", BOX, (0, 0, -low), (outer, outer, MOUTH_HEIGHT - low), rgba=(0.25, 0.3, 0.4, 1)))
    socket.add_site(name="mouth", size=[0.002, 0, 0], group=4)
    met: dict[str, tuple[str, ...] | None] = {"table": None, "floor": None, **{shape.name: shape.touches for shape in shapes}}
    for held in part.tool:
        for name, touches in met.items():
            if touches is None or held.name in touches:
                _add_pair(spec, held.name, name)
    _add_contact_sensor(spec, part)
    spec.visual.headlight.ambient = [0.35, 0.35, 0.35]
    spec.visual.headlight.diffuse = [0.5, 0.5, 0.5]
    spec.worldbody.add_light(pos=[0.6, -0.8, 1.5], dir=[-0.1, 0.5, -1.0], diffuse=[0.5, 0.5, 0.5])
    spec.worldbody.add_camera(name="side", pos=[1.05, -0.75, 0.55], xyaxes=[0.81, 0.586, 0, -0.246, 0.34, 0.908], fovy=42)
    return spec


def _add(body: mujoco.MjsBody, shape: Shape) -> None:
    body.add_geom(
        name=shape.name,
        type=shape.kind,
        pos=shape.pos,
        size=shape.size,
        quat=shape.quat,
        rgba=shape.rgba,
        **{**VISUAL, "mass": shape.mass},
    )


def _add_pair(spec: mujoco.MjSpec, held: str, met: str) -> None:
    spec.add_pair(
        name=f"{held}_{met}",
        geomname1=held,
        geomname2=met,
        condim=3,
        friction=[FRICTION, FRICTION, 0.005, 0.0001, 0.0001],
        solref=SOLREF,
        solimp=SOLIMP,
    )


def _add_contact_sensor(spec: mujoco.MjSpec, part: Part) -> None:
    """One number: the distance of the deepest contact between part and socket, 0 without one."""
    single = len(part.tool) == 1
    contact = spec.add_sensor(
        name="contact",
        type=mujoco.mjtSensor.mjSENS_CONTACT,
        objtype=mujoco.mjtObj.mjOBJ_GEOM if single else mujoco.mjtObj.mjOBJ_BODY,
        objname=part.tool[0].name if single else "tool",
        reftype=mujoco.mjtObj.mjOBJ_BODY,
        refname="socket",
    )
    contact.intprm[:3] = [1 << int(mujoco.mjtConDataField.mjCONDATA_DIST), 1, 1]
