"""Franka Research 3 with its hand.

Sources. Kinematics: Franka Control Interface documentation, "Robot and interface specifications", Denavit-Hartenberg
parameters (Craig's convention). Limits of position, velocity, acceleration, jerk and torque: the same page, FR3. Masses,
centres of mass and inertias: franka_description (Apache-2.0), robots/fr3/inertials.yaml and the hand's. Rotor inertia
(armature): MuJoCo Menagerie, franka_fr3. Collision capsules: drawn here around the published link dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from embodied.sim.robots.arm import Arm, Capsule, Hand, Link, commanded_every
from embodied.spec.registry import register
from embodied.spec.robot import ArmSpec, ImpedanceSpec, JointSpec, MotionSpec

HALF = math.pi / 2


@dataclass
class FrankaOptions:
    """The robot is as published; how often it is commanded is free."""

    control_dt: float = 0.04  # between commands [s], a multiple of the physics step


# name, lower, upper [rad], velocity [rad/s], acceleration [rad/s^2], jerk [rad/s^3], torque [N m], rest pose [rad]
_JOINTS = (
    ("fr3_joint1", -2.7437, 2.7437, 2.62, 10.0, 5000.0, 87.0, 0.0),
    ("fr3_joint2", -1.7837, 1.7837, 2.62, 10.0, 5000.0, 87.0, 0.0),
    ("fr3_joint3", -2.9007, 2.9007, 2.62, 10.0, 5000.0, 87.0, 0.0),
    ("fr3_joint4", -3.0421, -0.1518, 2.62, 10.0, 5000.0, 87.0, -2.1),
    ("fr3_joint5", -2.8065, 2.8065, 5.26, 10.0, 5000.0, 12.0, 0.0),
    ("fr3_joint6", 0.5445, 4.5169, 4.18, 10.0, 5000.0, 12.0, 2.1),
    ("fr3_joint7", -3.0159, 3.0159, 5.26, 10.0, 5000.0, 12.0, HALF / 2),
)

SPEC = ArmSpec(
    name="franka",
    joints=tuple(JointSpec(*row) for row in _JOINTS),
    tcp="tcp",
    impedance=ImpedanceSpec(
        # of the order used for contact-rich manipulation on this arm (serl_franka_controllers: 2000 N/m, 150 N m/rad,
        # error clipped to some millimetres); damping near critical for the arm's effective inertia at the tool
        stiffness=(1500.0, 20.0),
        damping=(120.0, 2.0),
        limit=(40.0, 4.0),
        null_damping=(1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5),
        leash=(0.008, 0.05),
    ),
    motion=MotionSpec(
        # acceleration and jerk: "Limits for Cartesian space" of the same page. Velocity: the reduced speed of ISO 10218-1,
        # 250 mm/s (the arm could do 3.0 m/s and 2.5 rad/s)
        velocity=(0.25, 1.0),
        acceleration=(9.0, 17.0),
        jerk=(4500.0, 8500.0),
        # of 1000 episodes of a trained policy none was measured above 37 N and 2 N m for 0.2 s; impacts reach 500 N for 2 ms
        wrench=(60.0, 8.0),
        press_s=0.2,
    ),
    workspace=((0.25, 0.75), (-0.35, 0.35), (0.0, 0.5)),
    physics_dt=0.002,
    control_dt=0.04,
    fallback="hold",
)

_LARGE, _SMALL = 0.195, 0.074  # armature of joints 1-4 and 5-7

_LINKS = (
    Link(0.0, 0.0, 0.333, 2.92747, (4.128e-07, -0.0181251, -0.0386036),
         (0.0239273, 0.0224822, 0.0063501, 1.33179e-05, -0.000114048, -0.00199503), _LARGE,
         (Capsule((0, 0, -0.19), (0, 0, -0.01), 0.06),)),
    Link(0.0, -HALF, 0.0, 2.93554, (0.00318289, -0.0743222, 0.00881461),
         (0.0419389, 0.0251451, 0.0617021, 0.000202573, 0.00407778, -0.00422522), _LARGE,
         (Capsule((0, 0, -0.06), (0, 0, 0.06), 0.06),)),
    Link(0.0, HALF, 0.316, 2.2449, (0.0407016, -0.00482006, -0.0289731),
         (0.0241014, 0.0197405, 0.0190445, 0.00240469, -0.00285627, -0.00210421), _LARGE,
         (Capsule((0, 0, -0.15), (0, 0, -0.04), 0.06),)),
    Link(0.0825, HALF, 0.0, 2.6156, (-0.0459101, 0.0630493, -0.00851879),
         (0.03453, 0.0288816, 0.0412547, 0.0132255, 0.0101514, -0.000976283), _LARGE,
         (Capsule((0, 0, -0.06), (0, 0, 0.06), 0.06),)),
    Link(-0.0825, -HALF, 0.384, 2.32712, (-0.00160396, 0.0292536, -0.0972966),
         (0.0516103, 0.0478773, 0.0164236, -0.00571517, -0.00356732, 0.010674), _SMALL,
         (Capsule((0, 0, -0.26), (0, 0, -0.2), 0.06), Capsule((0, 0.08, -0.14), (0, 0.08, -0.01), 0.025))),
    Link(0.0, HALF, 0.0, 1.81704, (0.0597131, -0.0410295, -0.0101693),
         (0.00541233, 0.0140583, 0.0160808, 0.00619346, 0.00142193, -0.00131408), _SMALL,
         (Capsule((0, 0, -0.07), (0, 0, 0.01), 0.05),)),
    Link(0.088, HALF, 0.0, 0.627143, (0.00452258, 0.00862619, -0.0161633),
         (0.000210924, 0.000177186, 5.99319e-05, -2.4333e-05, 4.56448e-05, 8.74407e-05), _SMALL,
         (Capsule((0, 0, -0.06), (0, 0, 0.06), 0.04),)),
)  # fmt: skip

_HAND = Hand(
    flange=0.107,
    turn=-math.pi / 4,
    mass=0.6544 + 2 * 0.0291,
    com=(0.0, 0.0099, 0.0207),
    inertia=(0.00186, 0.0003, 0.00174),
    boxes=(
        ((0, 0, 0.033), (0.02, 0.1, 0.033)),
        ((0, 0.015, 0.083), (0.01, 0.007, 0.025)),
        ((0, -0.015, 0.083), (0.01, 0.007, 0.025)),
    ),
    grasp=0.1034,
)


@register("robot", "franka", FrankaOptions)
def franka(options: FrankaOptions) -> Arm:
    """Franka Research 3, 7 joints, with its parallel hand."""
    return Arm(commanded_every(SPEC, options.control_dt), _LINKS, _HAND, base=(Capsule((0, 0, 0.06), (-0.05, 0, 0.06), 0.06),))
