"""Robots on legs as data: a trunk, its limbs and a `LeggedSpec` become an MjSpec. Another robot is another table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco

from embodied.sim.robots.arm import Capsule
from embodied.sim.robots.shapes import VISUAL
from embodied.spec.robot import JointSpec, LeggedSpec

Vector = tuple[float, float, float]

CONTACT = {"condim": 3, "solref": [0.02, 1.0], "solimp": [0.99, 0.999, 0.001, 0.5, 2.0]}
"""What a pair of foot and ground should be given, beside friction. Softer impedance (MuJoCo's default) creeps at 1.7 mm/s while
standing instead of 0.6; a shorter time constant doubles the force of landing."""


@dataclass(frozen=True)
class Inertia:
    """mass [kg], centre of mass [m] and inertia (xx, yy, zz, xy, xz, yz) [kg m^2] about it, in the body's frame."""

    mass: float
    com: Vector
    tensor: tuple[float, float, float, float, float, float]


@dataclass(frozen=True)
class Link:
    """One link behind its joint, whose frame lies at `offset` in the frame before [m], parallel to it at joint angle 0.

    axis: of the joint; armature: the rotor's reflected inertia [kg m^2]; friction: of the joint, dry [N m]; stroke: how far an
    action of 1 moves the joint's target from the rest pose [rad].
    """

    name: str
    offset: Vector
    axis: Vector
    inertia: Inertia
    armature: float
    friction: float
    stroke: float
    shape: Capsule


@dataclass(frozen=True)
class Limb:
    """A leg: links from the trunk outward, and the foot, a sphere fixed to the last (centre [m], radius [m])."""

    name: str
    links: tuple[Link, ...]
    foot: Vector
    radius: float


@dataclass(frozen=True)
class Legged:
    """A whole robot: what the policy's side knows of it (`spec`) and what only physics needs.

    trunk: inertia of the body; box: half size of its shape about the trunk's origin [m]. The spec's joints and feet are
    those of the limbs, in order.
    """

    spec: LeggedSpec
    trunk: Inertia
    box: Vector
    limbs: tuple[Limb, ...]


def build_legged(legged: Legged) -> tuple[mujoco.MjSpec, mujoco.MjsBody]:
    """The robot in its rest pose, its trunk free at `spec.height` above the origin, x ahead. Ground is the task's.

    `qpos0` is the rest pose. One position actuator for each joint, of the joint's name, holds it with the spec's stiffness and
    damping and at most the joint's effort; its control is the target [rad]. Nothing touches anything until a task names pairs
    of shapes (see `CONTACT`): the trunk's is named like the trunk, a link's `<limb>_<link>`, a foot's as in `spec.feet`.
    Sites: each foot's centre, of the foot's name, and `imu` at the trunk's origin.

    Returns:
        The spec, and the trunk.
    """
    robot = legged.spec
    spec = mujoco.MjSpec()
    spec.modelname = robot.name
    spec.compiler.degree = False
    _set_options(spec.option, robot.physics_dt)
    trunk = spec.worldbody.add_body(name=robot.trunk, pos=[0, 0, robot.height], **_inertial(legged.trunk))
    trunk.add_freejoint(name=robot.trunk)
    trunk.add_geom(name=robot.trunk, type=mujoco.mjtGeom.mjGEOM_BOX, size=list(legged.box), rgba=_LIGHT, **VISUAL)
    trunk.add_site(name="imu", group=4)
    joints, feet = iter(robot.joints), iter(robot.feet)
    for limb in legged.limbs:
        body = trunk
        for link in limb.links:
            body = _add_link(body, f"{limb.name}_{link.name}", link, next(joints))
        foot = next(feet)
        body.add_site(name=foot, pos=list(limb.foot), group=4)
        body.add_geom(
            name=foot, type=mujoco.mjtGeom.mjGEOM_SPHERE, pos=list(limb.foot), size=[limb.radius, 0, 0], rgba=_DARK, **VISUAL
        )
    for joint, stiffness, damping in zip(robot.joints, robot.stiffness, robot.damping, strict=True):
        actuator = spec.add_actuator(
            name=joint.name,
            trntype=mujoco.mjtTrn.mjTRN_JOINT,
            target=joint.name,
            forcerange=[-joint.effort, joint.effort],
            forcelimited=mujoco.mjtLimited.mjLIMITED_TRUE,
            # a target beyond the joint's range is how a controller presses against its stop
            ctrllimited=mujoco.mjtLimited.mjLIMITED_FALSE,
        )
        actuator.set_to_position(kp=stiffness, kv=damping)
    trunk.add_camera(name="side", pos=[0.3, -1.3, 0.35], xyaxes=[1, 0.23, 0, -0.055, 0.24, 0.97], mode=_FOLLOW)
    trunk.add_light(pos=[0, 0, 3], dir=[0, 0, -1], diffuse=[0.6, 0.6, 0.6], mode=_FOLLOW)
    spec.visual.headlight.ambient = [0.35, 0.35, 0.35]
    return spec, trunk


_LIGHT, _DARK = [0.92, 0.92, 0.94, 1.0], [0.2, 0.2, 0.22, 1.0]
_FOLLOW = mujoco.mjtCamLight.mjCAMLIGHT_TRACK


def _set_options(option: mujoco.MjOption, timestep: float) -> None:
    """What was fastest while it stands and trots as with steps of 0.5 ms (distance and height within 2 %)."""
    option.timestep = timestep
    # the controllers' dampers are soft at 5 ms: implicitfast walks alike and costs a tenth more
    option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    # 3 iterations, at most 7, to the last digit; CG takes 50. A cap of 4 makes falls wrong and saves nothing on average
    option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    # elliptic cones take twice as many iterations
    option.cone = mujoco.mjtCone.mjCONE_PYRAMIDAL
    # all is one island: looking for more costs 7 % of a step. Started from the free acceleration instead of the last one, the
    # solver iterates less: steps take 16 % less while trotting, though a quarter more while standing still
    option.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND | mujoco.mjtDisableBit.mjDSBL_WARMSTART


def _inertial(inertia: Inertia) -> dict[str, object]:
    return {
        "mass": inertia.mass,
        "ipos": list(inertia.com),
        "fullinertia": list(inertia.tensor),
        "explicitinertial": True,
    }


def _add_link(parent: mujoco.MjsBody, name: str, link: Link, joint: JointSpec) -> mujoco.MjsBody:
    half = joint.home / 2
    sine = math.sin(half)
    body = parent.add_body(
        name=name,
        pos=list(link.offset),
        # turned by the rest pose, to which `ref` gives its angle: MuJoCo's reference is then the rest pose
        quat=[math.cos(half), *(sine * part for part in link.axis)],
        **_inertial(link.inertia),
    )
    body.add_joint(
        name=joint.name,
        axis=list(link.axis),
        ref=joint.home,
        range=[joint.lower, joint.upper],
        limited=mujoco.mjtLimited.mjLIMITED_TRUE,
        armature=link.armature,
        frictionloss=link.friction,
    )
    body.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_CAPSULE,
        fromto=[*link.shape.start, *link.shape.end],
        size=[link.shape.radius, 0, 0],
        rgba=_LIGHT,
        **VISUAL,
    )
    return body
