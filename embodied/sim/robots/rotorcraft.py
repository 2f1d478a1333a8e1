"""Rotorcraft as data: a body, its rotors and a `RotorcraftSpec` become an MjSpec."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mujoco

from embodied.sim.robots.shapes import VISUAL
from embodied.spec.robot import RotorcraftSpec


@dataclass(frozen=True)
class Rotorcraft:
    """A whole rotorcraft: what the policy's side knows of it (`spec`) and what only physics needs.

    mass [kg], inertia (xx, yy, zz) [kg m^2] about the centre of mass, which is the body frame's origin; `blade`: radius of
    a rotor, for the eye [m].
    """

    spec: RotorcraftSpec
    mass: float
    inertia: tuple[float, float, float]
    blade: float


def build_rotorcraft(craft: Rotorcraft) -> mujoco.MjSpec:
    """One free body with a thruster for each rotor, whose control is the thrust [N] that its speed would give at rest.

    `filterexact` actuators carry the rotors' delay: thrust follows its control with time constant `spec.delay`. A real rotor's
    *speed* follows so, and thrust is its square: between rest and full speed thrust is then late or early by up to a quarter of
    what it changes by. With no delay the actuators are plain ones. Nothing touches anything.
    """
    robot = craft.spec
    spec = mujoco.MjSpec()
    spec.modelname = robot.name
    spec.option.timestep = robot.physics_dt
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    body = spec.worldbody.add_body(
        name=robot.body, mass=craft.mass, inertia=list(craft.inertia), ipos=[0, 0, 0], explicitinertial=True
    )
    body.add_freejoint()
    body.add_geom(name="frame", type=mujoco.mjtGeom.mjGEOM_BOX, size=[0.016, 0.016, 0.006], rgba=[0.2, 0.2, 0.22, 1], **VISUAL)
    top = max(robot.rpm) ** 2 * robot.thrust
    for rotor in robot.rotors:
        body.add_site(name=rotor.name, pos=[*rotor.place, 0], group=4)
        ahead = rotor.place[0] > 0
        body.add_geom(
            name=f"{rotor.name}_disc",
            type=mujoco.mjtGeom.mjGEOM_CYLINDER,
            pos=[*rotor.place, 0.01],
            size=[craft.blade, 0.001, 0],
            rgba=[0.85, 0.45, 0.15, 0.8] if ahead else [0.35, 0.45, 0.6, 0.8],
            **VISUAL,
        )
        actuator = spec.add_actuator(
            name=rotor.name,
            trntype=mujoco.mjtTrn.mjTRN_SITE,
            target=rotor.name,
            gear=[0, 0, 1, 0, 0, rotor.torque],
            ctrlrange=[0, top],
            ctrllimited=mujoco.mjtLimited.mjLIMITED_TRUE,
        )
        if robot.delay > 0:
            actuator.dyntype = mujoco.mjtDyn.mjDYN_FILTEREXACT
            actuator.dynprm[0] = robot.delay
    body.add_camera(name="side", pos=[-0.35, -0.35, 0.2], xyaxes=[0.707, -0.707, 0, 0.256, 0.256, 0.932], mode=_FOLLOW)
    spec.worldbody.add_light(pos=[0, 0, 3], dir=[0.2, 0.3, -1], diffuse=[0.6, 0.6, 0.6])
    spec.visual.headlight.ambient = [0.35, 0.35, 0.35]
    return spec


_FOLLOW = mujoco.mjtCamLight.mjCAMLIGHT_TRACK


def hover_speed(craft: Rotorcraft, gravity: float = 9.81) -> float:
    """Revolutions per minute of every rotor at which thrust carries the weight."""
    return math.sqrt(craft.mass * gravity / (len(craft.spec.rotors) * craft.spec.thrust))
