"""Unitree Go1, a quadruped of 12 joints.

Sources. Offsets, limits of position, velocity and torque, masses, centres of mass and inertias: Unitree's go1_description
(unitree_ros, BSD-3-Clause), xacro/const.xacro and urdf/go1.urdf. What it fixes to a link (rotors of the joints behind, the
foot) is one body with it here, by the parallel axis theorem. The rotors of the hip joints are left out, as in MuJoCo
Menagerie: all is then 12.74 kg, where the URDF says 12.84 in words and sums up to 13.10 with these rotors. Armature, dry
friction, radius of the feet, rest pose: MuJoCo Menagerie, unitree_go1 (BSD-3-Clause). Stiffness and damping: MuJoCo
Playground's Go1 (35, 0.5); Walk These Ways (arXiv 2212.03238) has 20 and 0.5. Shapes: drawn here around those of the URDF.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from embodied.sim.robots.arm import Capsule
from embodied.sim.robots.legged import Inertia, Legged, Limb, Link, Vector
from embodied.spec.errors import BadInput
from embodied.spec.registry import register
from embodied.spec.robot import JointSpec, LeggedSpec


@dataclass
class Go1Options:
    """The robot is as published; how often it is commanded is free."""

    control_dt: float = 0.02  # between commands [s], a multiple of the physics step


PHYSICS_DT = 0.005

# of each leg: name, lower, upper [rad], velocity [rad/s], torque [N m], rest pose [rad]
_JOINTS = (
    ("hip", -0.863, 0.863, 30.1, 23.7, 0.0),
    ("thigh", -0.686, 4.501, 30.1, 23.7, 0.9),
    ("calf", -2.818, -0.888, 20.06, 35.55, -1.8),
)
_LEGS = (("FR", 1, -1), ("FL", 1, 1), ("RR", -1, -1), ("RL", -1, 1))  # in Unitree's order; ahead or behind, left or right
_FEET = tuple(f"{name}_foot" for name, _, _ in _LEGS)

_HIP, _THIGH, _SHANK, _RADIUS = (0.1881, 0.04675, 0.0), 0.08, 0.213, 0.023  # hip's place, lengths, radius of a foot [m]
_ARMATURE, _FRICTION = 0.01, 0.2
_STROKES = {"hip": 0.3, "thigh": 0.6, "calf": 0.6}  # of actions [rad]: sideways less than ahead

_TRUNK = Inertia(
    5.204,
    (0.0223, 0.002, -0.0005),
    (0.0168128557, 0.063009565, 0.0716547275, -0.0002296769, -0.0002945293, -0.0000418731),
)
# of the front left leg: link with rotor, link with rotor, link with foot
_HIP_INERTIA = Inertia(
    0.68,
    (-0.00491660, -0.00762615, -0.0000886500),
    (0.0003993798, 0.0007334194, 0.0004684221, -1.459011e-05, 1.246099e-06, 1.575326e-06),
)
_THIGH_INERTIA = Inertia(
    1.009,
    (-0.00304722, -0.0193150, -0.0305004),
    (0.004598796, 0.004689224, 0.0008174479, 6.137391e-05, -0.0002275291, 0.0006108083),
)
_CALF_INERTIA = Inertia(
    0.195862,
    (0.00429862, 0.000976676, -0.146197),
    (0.001484484, 0.001497635, 3.606827e-05, -6.188266e-07, -1.772092e-05, -3.566262e-06),
)


def _mirrored(inertia: Inertia, ahead: int, left: int) -> Inertia:
    """The same body on another leg: x and y change sign with `ahead` and `left` (1 or -1)."""
    x, y, z = inertia.com
    xx, yy, zz, xy, xz, yz = inertia.tensor
    return Inertia(inertia.mass, (ahead * x, left * y, z), (xx, yy, zz, ahead * left * xy, ahead * xz, left * yz))


def _leg(name: str, ahead: int, left: int) -> Limb:
    """A leg; thighs are built alike in front and behind, calves are one part everywhere."""
    x, y, z = _HIP

    def link(part: str, offset: Vector, axis: Vector, inertia: Inertia, shape: Capsule) -> Link:
        return Link(part, offset, axis, inertia, _ARMATURE, _FRICTION, _STROKES[part], shape)

    hip = Capsule((0, 0.045 * left, 0), (0, 0.065 * left, 0), 0.046)
    thigh = Capsule((-0.015, 0, -0.02), (-0.01, 0, -0.19), 0.017)
    calf = Capsule((0.005, 0, -0.02), (0.005, 0, -0.19), 0.011)
    links = (
        link("hip", (ahead * x, left * y, z), (1, 0, 0), _mirrored(_HIP_INERTIA, ahead, left), hip),
        link("thigh", (0, left * _THIGH, 0), (0, 1, 0), _mirrored(_THIGH_INERTIA, 1, left), thigh),
        link("calf", (0, 0, -_SHANK), (0, 1, 0), _CALF_INERTIA, calf),
    )
    return Limb(name, links, foot=(0, 0, -_SHANK), radius=_RADIUS)


def _height(thigh: float, calf: float) -> float:
    """Of the trunk's origin when the feet touch flat ground in a pose without abduction [m]."""
    return _SHANK * (math.cos(thigh) + math.cos(thigh + calf)) + _RADIUS


@register("robot", "go1", Go1Options)
def go1(options: Go1Options) -> Legged:
    """Unitree Go1, a quadruped of 12 joints held at position targets at 50 Hz."""
    steps = options.control_dt / PHYSICS_DT
    if not (1 <= steps <= 20 and abs(steps - round(steps)) < 1e-6):
        raise BadInput(
            f"robot.control_dt={options.control_dt}: expected a multiple of {PHYSICS_DT} s, at most {20 * PHYSICS_DT}"
        )
    joints = tuple(
        JointSpec(f"{leg}_{part}_joint", lower, upper, velocity, None, None, effort, home)
        for leg, _, _ in _LEGS
        for part, lower, upper, velocity, effort, home in _JOINTS
    )
    spec = LeggedSpec(
        name="go1",
        joints=joints,
        physics_dt=PHYSICS_DT,
        control_dt=options.control_dt,
        fallback="damp",
        stiffness=(35.0,) * len(joints),
        damping=(0.5,) * len(joints),
        trunk="trunk",
        feet=_FEET,
        height=_height(_JOINTS[1][-1], _JOINTS[2][-1]),
    )
    return Legged(spec, _TRUNK, box=(0.1881, 0.09, 0.057), limbs=tuple(_leg(*leg) for leg in _LEGS))
