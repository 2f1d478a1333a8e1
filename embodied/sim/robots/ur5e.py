"""Universal Robots UR5e with a Robotiq 2F-85 gripper.

Sources. Kinematics, masses and centres of mass: Universal Robots, "DH parameters for calculations of kinematics and
dynamics", UR5e. They are given in the standard convention; the table here is the same chain in Craig's, whose frames are those
of the official description (Universal_Robots_ROS2_Description). Inertias: that description, config/ur5e/
physical_parameters.yaml, turned into these frames. Joint names and limits: its joint_limits.yaml, after the user manual and
"Max. joint torques"; the elbow's +-180 degrees are half of what the manual allows, for beyond the arm is in its own way.
Largest joint acceleration: what ur_rtde accepts (rtde_control_interface.h). Rotor inertia: MuJoCo Menagerie,
universal_robots_ur5e, not tuned as it says; none is published. Collision capsules: drawn around the published link dimensions.

The gripper: 149.3 mm from its mounting face to the open fingertips, 162.8 mm to the closed, pads of 22 by 37.5 mm (Robotiq,
2F-85 instruction manual, specifications); 0.925 kg (Kinova Gen3 user guide, configuration of this gripper); coupling, centre of
mass and inertia from the links of MuJoCo Menagerie's robotiq_2f85, closed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from embodied.sim.robots.arm import Arm, Capsule, Hand, Link, commanded_every
from embodied.spec.registry import register
from embodied.spec.robot import ArmSpec, ImpedanceSpec, JointSpec, MotionSpec

PI, HALF = math.pi, math.pi / 2


@dataclass
class Ur5eOptions:
    """The robot is as published; how often it is commanded is free."""

    control_dt: float = 0.04  # between commands [s], a multiple of the physics step


# jerk: none is published; this is the largest acceleration within a cycle of the 500 Hz interface
_FREE = (PI, 40.0, 20000.0)  # velocity [rad/s], acceleration [rad/s^2], jerk [rad/s^3] of every joint
# name, lower, upper [rad], torque [N m], rest pose [rad]: the tool points down, 0.5 m in front of the base
_JOINTS = (
    ("shoulder_pan_joint", -2 * PI, 2 * PI, 150.0, 2.87),
    ("shoulder_lift_joint", -2 * PI, 2 * PI, 150.0, -1.56),
    ("elbow_joint", -PI, PI, 150.0, 1.84),
    ("wrist_1_joint", -2 * PI, 2 * PI, 28.0, -1.85),
    ("wrist_2_joint", -2 * PI, 2 * PI, 28.0, -HALF),
    ("wrist_3_joint", -2 * PI, 2 * PI, 28.0, -0.27),
)

SPEC = ArmSpec(
    name="ur5e",
    joints=tuple(JointSpec(name, low, high, *_FREE, effort, home) for name, low, high, effort, home in _JOINTS),
    tcp="tcp",
    impedance=ImpedanceSpec(
        # the Franka's, so that a part is as hard on either arm: their effective inertias at the tool are alike (1.2 to 1.8 kg
        # sideways, 5 kg along it, 0.06 to 0.15 kg m^2)
        stiffness=(1500.0, 20.0),
        damping=(120.0, 2.0),
        limit=(40.0, 4.0),
        null_damping=(1.0, 1.0, 1.0, 0.5, 0.5, 0.5),
        leash=(0.008, 0.05),
    ),
    motion=MotionSpec(
        # velocity: the reduced speed of ISO 10218-1, 250 mm/s (the fact sheet gives 1 m/s as typical). Acceleration and jerk in
        # Cartesian space are not published: the Franka's, half of what 40 rad/s^2 give half a metre from the base
        velocity=(0.25, 1.0),
        acceleration=(9.0, 17.0),
        jerk=(4500.0, 8500.0),
        # the range of the force sensor in its flange (fact sheet)
        wrench=(50.0, 10.0),
        press_s=0.2,
    ),
    workspace=((0.25, 0.75), (-0.35, 0.35), (0.0, 0.5)),
    physics_dt=0.002,
    control_dt=0.04,
    fallback="hold",
)

_ROTOR = 0.1  # armature of every joint

_LINKS = (
    Link(0.0, 0.0, 0.1625, 3.761, (0.0, -0.00193, -0.02561),
         (0.0070021, 0.00657286, 0.00648091, 1.053e-05, 7.3e-07, -0.00049994), _ROTOR,
         (Capsule((0, 0, -0.08), (0, 0, 0), 0.06),)),
    Link(0.0, HALF, 0.0, 8.058, (-0.2125, 0.0, 0.11336),
         (0.01505885, 0.33388086, 0.33247207, -5.4e-05, 5.63e-06, -1.81e-06), _ROTOR,
         (Capsule((0, 0, 0.02), (0, 0, 0.138), 0.06), Capsule((0, 0, 0.138), (-0.425, 0, 0.138), 0.05))),
    Link(-0.425, 0.0, 0.0, 2.846, (-0.2422, 0.0, 0.0265),
         (0.00399632, 0.07879254, 0.0784851, -1.365e-05, 0.00137272, -6.6e-06), _ROTOR,
         (Capsule((0, 0, 0.007), (0, 0, 0.12), 0.05), Capsule((0, 0, 0.007), (-0.3922, 0, 0.007), 0.04))),
    Link(-0.3922, 0.0, 0.1333, 1.37, (0.0, -0.01634, -0.0018),
         (0.00165491, 0.00126279, 0.00135962, 4.38e-06, -2.82e-06, -0.00010157), _ROTOR,
         (Capsule((0, 0, -0.07), (0, 0, 0.02), 0.04),)),
    Link(0.0, HALF, 0.0997, 1.3, (0.0, 0.01634, -0.0018),
         (0.00135617, 0.00096614, 0.00127827, 4.44e-06, 2.74e-06, 5.048e-05), _ROTOR,
         (Capsule((0, 0, -0.06), (0, 0, 0.02), 0.04),)),
    Link(0.0, -HALF, 0.0996, 0.365, (0.0, 0.0, -0.001159),
         (0.00018694, 0.00018908, 0.00025756, 6e-08, -1.7e-07, -9.2e-07), _ROTOR,
         (Capsule((0, 0, -0.05), (0, 0, -0.02), 0.035),)),
)  # fmt: skip

_HAND = Hand(
    flange=0.0108,  # the coupling
    turn=-HALF,
    mass=0.925,
    com=(0.0, 0.0, 0.042),
    inertia=(0.00068, 0.00053, 0.00027),
    boxes=(
        ((0, 0, 0.045), (0.0375, 0.0375, 0.045)),
        ((0, 0.03, 0.105), (0.0135, 0.01, 0.022)),
        ((0, -0.03, 0.105), (0.0135, 0.01, 0.022)),
        ((0, 0.0145, 0.144), (0.011, 0.0065, 0.01875)),
        ((0, -0.0145, 0.144), (0.011, 0.0065, 0.01875)),
    ),
    grasp=0.149,
)


@register("robot", "ur5e", Ur5eOptions)
def ur5e(options: Ur5eOptions) -> Arm:
    """Universal Robots UR5e, 6 joints, with a Robotiq 2F-85 gripper."""
    return Arm(commanded_every(SPEC, options.control_dt), _LINKS, _HAND, base=(Capsule((0, 0, 0.03), (0, 0, 0.06), 0.075),))
