"""A Crazyflie 2.1 class quadrotor.

Source of every figure: Eschmann, Albani, Loianno, "Learning to Fly in Seconds" (arXiv 2311.13081): mass, inertia, places of the
rotors, thrust and torque coefficients, range of speeds, motor delay, control rate. Thrust-to-weight is 2.25 with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from embodied.sim.robots.rotorcraft import Rotorcraft
from embodied.spec.errors import BadInput
from embodied.spec.registry import register
from embodied.spec.robot import RotorcraftSpec, RotorSpec

_ARM, _TORQUE = 0.028, 0.005964552  # place of the rotors along x and y [m]; torque for each newton of thrust [m]


@dataclass
class CrazyflieOptions:
    """The robot is as published, but for what a control experiment takes away."""

    motor_delay: float = 0.15  # time constant of the rotors' answer [s]; 0: none, which no motor has


@register("robot", "crazyflie", CrazyflieOptions)
def crazyflie(options: CrazyflieOptions) -> Rotorcraft:
    """Crazyflie 2.1, a quadrotor of 27 g, commanded by rotor speeds at 100 Hz."""
    if not 0 <= options.motor_delay <= 1:
        raise BadInput(f"robot.motor_delay={options.motor_delay}: expected 0 to 1 s")
    # yaw: each pair on a diagonal turns alike
    places = (("front_right", 1, -1, -1), ("back_right", -1, -1, 1), ("back_left", -1, 1, -1), ("front_left", 1, 1, 1))
    spec = RotorcraftSpec(
        name="crazyflie",
        joints=(),
        physics_dt=0.005,
        control_dt=0.01,
        fallback="land",
        rotors=tuple(RotorSpec(name, (x * _ARM, y * _ARM), turn * _TORQUE) for name, x, y, turn in places),
        rpm=(0.0, 21702.0),
        thrust=3.16e-10,
        delay=options.motor_delay,
        body="body",
    )
    return Rotorcraft(spec, mass=0.027, inertia=(3.85e-6, 3.85e-6, 5.9675e-6), blade=0.023)
