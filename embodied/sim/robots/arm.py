"""Serial arms as data: a table of links and a `ArmSpec` become an MjSpec. Another arm is another table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mujoco

from embodied.sim.robots.shapes import VISUAL
from embodied.spec.errors import BadInput
from embodied.spec.robot import ArmSpec


@dataclass(frozen=True)
class Capsule:
    """A collision capsule in its link's frame: both ends [m] and radius [m]."""

    start: tuple[float, float, float]
    end: tuple[float, float, float]
    radius: float


@dataclass(frozen=True)
class Link:
    """One link behind its joint, by modified (Craig) Denavit-Hartenberg parameters.

    a [m], alpha [rad] and d [m] place the joint frame; the joint turns about its z. mass [kg], centre of mass [m] and
    inertia (xx, yy, zz, xy, xz, yz) [kg m^2] about it are in that frame; armature is the rotor's reflected inertia [kg m^2].
    """

    a: float
    alpha: float
    d: float
    mass: float
    com: tuple[float, float, float]
    inertia: tuple[float, float, float, float, float, float]
    armature: float
    shape: tuple[Capsule, ...] = ()


@dataclass(frozen=True)
class Hand:
    """The end effector, fixed to the last link: flange offset [m], turn about z [rad], inertia, boxes (centre, half size) [m].

    `grasp` is the point between the fingertips, from the flange along z [m].
    """

    flange: float
    turn: float
    mass: float
    com: tuple[float, float, float]
    inertia: tuple[float, float, float]
    boxes: tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...]
    grasp: float


@dataclass(frozen=True)
class Arm:
    """A whole arm: what the policy's side knows of it (`spec`) and what only physics needs."""

    spec: ArmSpec
    links: tuple[Link, ...]
    hand: Hand
    base: tuple[Capsule, ...] = ()


def commanded_every(spec: ArmSpec, control_dt: float) -> ArmSpec:
    """The robot, commanded every `control_dt` [s].

    Raises:
        BadInput: that is not a number of physics steps, or too long.
    """
    steps = control_dt / spec.physics_dt
    if not (1 <= steps <= 100 and abs(steps - round(steps)) < 1e-6):
        raise BadInput(
            f"robot.control_dt={control_dt}: expected a multiple of {spec.physics_dt} s, at most {100 * spec.physics_dt}"
        )
    return replace(spec, control_dt=control_dt)


def _capsule(body: mujoco.MjsBody, name: str, shape: Capsule, rgba: list[float]) -> None:
    body.add_geom(
        name=name,
        type=mujoco.mjtGeom.mjGEOM_CAPSULE,
        fromto=[*shape.start, *shape.end],
        size=[shape.radius, 0, 0],
        rgba=rgba,
        **VISUAL,
    )


def build_arm(arm: Arm, tool_length: float) -> tuple[mujoco.MjSpec, mujoco.MjsBody]:
    """The arm at the world's origin, with Cartesian impedance actuators at its tool centre point.

    The `tcp` site lies `tool_length` [m] beyond the grasp point; its z axis points out of the hand. Gravity is left to the
    task (a Franka's controller cancels it). Sensors: `tcp_pos`, `tcp_quat`, `tcp_linvel`, `tcp_angvel`, and `force`,
    `torque` at the wrist in the tcp's orientation: minus what the environment exerts on the tool, and the tool's inertia.

    Returns:
        The spec, and the body of the hand, to which a task fixes what is held (frame at the grasp point).
    """
    spec = mujoco.MjSpec()
    spec.compiler.degree = False
    white, dark = [0.92, 0.92, 0.94, 1.0], [0.2, 0.2, 0.22, 1.0]
    parent = spec.worldbody
    for i, shape in enumerate(arm.base):
        _capsule(parent, f"base_{i}", shape, white)
    for joint, link, damping in zip(arm.spec.joints, arm.links, arm.spec.impedance.null_damping, strict=True):
        sine, cosine = math.sin(link.alpha), math.cos(link.alpha)
        body = parent.add_body(
            name=f"{joint.name}_link",
            pos=[link.a, -link.d * sine, link.d * cosine],
            quat=[math.cos(link.alpha / 2), math.sin(link.alpha / 2), 0, 0],
            mass=link.mass,
            ipos=list(link.com),
            fullinertia=list(link.inertia),
            explicitinertial=True,
        )
        body.add_joint(
            name=joint.name,
            axis=[0, 0, 1],
            range=[joint.lower, joint.upper],
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            armature=link.armature,
            damping=[damping, 0, 0],
            actfrcrange=[-joint.effort, joint.effort],
            actfrclimited=mujoco.mjtLimited.mjLIMITED_TRUE,
        )
        for i, shape in enumerate(link.shape):
            _capsule(body, f"{joint.name}_shape_{i}", shape, white)
        parent = body
    hand = parent.add_body(
        name="hand",
        pos=[0, 0, arm.hand.flange],
        quat=[math.cos(arm.hand.turn / 2), 0, 0, math.sin(arm.hand.turn / 2)],
        mass=arm.hand.mass,
        ipos=list(arm.hand.com),
        inertia=list(arm.hand.inertia),
        explicitinertial=True,
    )
    for i, (centre, half) in enumerate(arm.hand.boxes):
        hand.add_geom(
            name=f"hand_{i}",
            type=mujoco.mjtGeom.mjGEOM_BOX,
            pos=list(centre),
            size=list(half),
            rgba=dark,
            **VISUAL,
        )
    tool = hand.add_body(name="tool", pos=[0, 0, arm.hand.grasp])
    tool.add_site(name="wrist", pos=[0, 0, 0], group=4)
    tool.add_site(name="tcp", pos=[0, 0, tool_length], group=4)
    _add_impedance(spec, arm.spec)
    for name, kind in (
        ("tcp_pos", mujoco.mjtSensor.mjSENS_FRAMEPOS),
        ("tcp_quat", mujoco.mjtSensor.mjSENS_FRAMEQUAT),
        ("tcp_linvel", mujoco.mjtSensor.mjSENS_FRAMELINVEL),
        ("tcp_angvel", mujoco.mjtSensor.mjSENS_FRAMEANGVEL),
    ):
        spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="tcp")
    for name, kind in (("force", mujoco.mjtSensor.mjSENS_FORCE), ("torque", mujoco.mjtSensor.mjSENS_TORQUE)):
        spec.add_sensor(name=name, type=kind, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="wrist")
    return spec, tool


def _add_impedance(spec: mujoco.MjSpec, robot: ArmSpec) -> None:
    """Six position actuators on the tcp relative to a site at the base.

    The base site is oriented like a tool that points down: orientation is a rotation vector relative to it, which is
    singular half a turn away.
    """
    spec.worldbody.add_site(name="reference", quat=list(REFERENCE_QUAT), group=4)
    for i, axis in enumerate(("x", "y", "z", "rx", "ry", "rz")):
        kind = i // 3
        gear = [0.0] * 6
        gear[i] = 1.0
        actuator = spec.add_actuator(
            name=f"tcp_{axis}",
            trntype=mujoco.mjtTrn.mjTRN_SITE,
            target="tcp",
            refsite="reference",
            gear=gear,
            forcerange=[-robot.impedance.limit[kind], robot.impedance.limit[kind]],
            forcelimited=mujoco.mjtLimited.mjLIMITED_TRUE,
            ctrllimited=mujoco.mjtLimited.mjLIMITED_FALSE,
        )
        actuator.set_to_position(kp=robot.impedance.stiffness[kind], kv=robot.impedance.damping[kind])


REFERENCE_QUAT = (0.0, 1.0, 0.0, 0.0)
"""Orientation (wxyz) of a tool that points down, x forward: half a turn about x."""
