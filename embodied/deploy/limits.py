"""Limits of motion: what one axis of the tool may do from tick to tick, and how it stops inside that.

Commands are float32, as the wire carries them. Velocity, acceleration and jerk are their finite differences, in float64.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from embodied.spec.errors import BadInput
from embodied.spec.robot import ArmSpec

AXES = ("tcp x", "tcp y", "tcp z", "tcp rx", "tcp ry", "tcp rz")
XYZ = ("x", "y", "z")

MARGIN = 1e-3  # plans leave this share of velocity, acceleration and jerk to the rounding to float32
TURN_ROUNDING = 2.0**-23  # rad: four components, each off by 2^-25 at most, turn a unit quaternion by 2 sqrt(4) 2^-25 at most
REACH = 100.0  # m, rad: bounds are nearer than this to 0
TICKS = 32  # velocity ends no later: limits must allow that from full velocity, and what would take longer is not sent
STILL = 1e-12  # m/s, rad/s: what float64 may leave of a velocity that is to be 0

FLOAT32 = struct.Struct("f")
Vector = tuple[float, ...]


class Axis(NamedTuple):
    """Limits of one axis: position, velocity, acceleration, and `swing`, the change of acceleration in a tick (jerk * dt)."""

    lower: float
    upper: float
    velocity: float
    acceleration: float
    swing: float

    def shrunk(self, keep: float) -> Axis:
        """The same bounds of position, the share `keep` of the rest."""
        return Axis(self.lower, self.upper, keep * self.velocity, keep * self.acceleration, keep * self.swing)


FREE = Axis(-math.inf, math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Limits:
    """Limits by axis (x, y, z, rx, ry, rz of the base frame; m, rad), of the measured wrench [N, N m] and the measured joints.

    Velocity, acceleration and jerk are finite differences of successive commands: for rotation, of the rotation vectors from
    one to the next. Rotation has no bounds (-inf, inf). `joints`: (name, lower, upper [rad], velocity [rad/s]). `press`: ticks
    in a row that the wrench must be beyond its limits to latch.

    Raises:
        BadInput: values that are not positive and finite, too small for commands in float32, or too small to stop in time.
    """

    dt: float
    lower: Vector
    upper: Vector
    velocity: Vector
    acceleration: Vector
    jerk: Vector
    force: float
    torque: float
    joints: tuple[tuple[str, float, float, float], ...]
    press: int = 1

    def __post_init__(self) -> None:
        for complaint in _complaints(self):
            raise BadInput(f"guard limits: {complaint}")

    @classmethod
    def of(cls, robot: ArmSpec, dt: float | None = None) -> Limits:
        """The limits of `robot`, at a tick of `dt` seconds (default: the robot's control step)."""
        motion, turns = robot.motion, (math.inf,) * 3
        lower = (*(low for low, _ in robot.workspace), *(-turn for turn in turns))
        upper = (*(high for _, high in robot.workspace), *turns)
        rates = ((move,) * 3 + (turn,) * 3 for move, turn in (motion.velocity, motion.acceleration, motion.jerk))
        velocity, acceleration, jerk = rates
        joints = tuple((joint.name, joint.lower, joint.upper, joint.velocity) for joint in robot.joints)
        dt = robot.control_dt if dt is None else dt
        press = max(1, math.ceil(motion.press_s / dt - 1e-9))
        return cls(dt, lower, upper, velocity, acceleration, jerk, *motion.wrench, joints, press)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The limits, axis by axis. Bounds of position are the outermost float32 values inside."""
        lower, upper = map(_inside, self.lower, self.upper), map(_inside, self.upper, self.lower)
        return tuple(map(Axis, lower, upper, self.velocity, self.acceleration, [jerk * self.dt for jerk in self.jerk]))

    @cached_property
    def alone(self) -> tuple[Axis, ...]:
        """What one axis alone is judged by: turns are rounded when all three are known, so that half the margin is kept."""
        return self.axes[:3] + tuple(axis.shrunk(1.0 - MARGIN / 2.0) for axis in self.axes[3:])

    @cached_property
    def inner(self) -> tuple[Axis, ...]:
        """What is planned with."""
        return tuple(axis.shrunk(1.0 - MARGIN) for axis in self.axes)

    @cached_property
    def fields(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Readings that must be there, with the names of their components."""
        joints = tuple(joint[0] for joint in self.joints)
        return (("joint_pos", joints), ("joint_vel", joints), ("force", XYZ), ("torque", XYZ))


def brake(axis: Axis, v: float, a: float, dt: float) -> float:
    """The velocity of the next tick on the way from velocity `v` and acceleration `a` to rest.

    Time-optimal feedback for the double integrator a' = a + dt j, v' = v + dt a' with bounded j (as fhan does for explicit
    Euler: Han, IEEE Trans. Ind. Electron. 56(3), 2009): the deceleration from which full jerk ends with v = 0 and a = 0 at once
    is approached as fast as the jerk allows, then kept to, and ends exactly. With S the swing, decelerations b, b - S, ...,
    b - m S > 0 shed ((m + 1) b - S m (m + 1) / 2) dt; that is solved for b.
    """
    _, _, _, most, swing = axis
    shed = abs(v) / dt
    m = int((math.sqrt(1.0 + 8.0 * shed / swing) - 1.0) / 2.0)
    b = shed / (m + 1) + swing * m / 2.0
    a1 = -math.copysign(b, v)
    low, high = a - swing, a + swing
    low = low if low > -most else -most  # min() and max() would take half of the time of all this
    high = high if high < most else most
    a1 = low if a1 < low else high if a1 > high else a1
    v1 = v + dt * a1
    return v1 if abs(v1) > STILL else 0.0


def stop(axis: Axis, inner: Axis, x: float, v: float, a: float, to: float, dt: float) -> float:
    """Where an axis comes to rest if `to` is sent now and then it brakes; nan if that breaks a limit or takes too long."""
    lower, upper, velocity, acceleration, swing = axis
    for _ in range(TICKS):
        v1 = (to - x) / dt
        a1 = (v1 - v) / dt
        fits = abs(v1) <= velocity and abs(a1) <= acceleration and abs(a1 - a) <= swing
        if not (fits and lower <= to <= upper):
            break
        if v1 == 0.0 and abs(a1) <= inner.swing:  # the next tick stays and ends the acceleration
            return to
        x, v, a = to, v1, a1
        to = to32(x + dt * brake(inner, v, a, dt))
    return math.nan


def _complaints(limits: Limits) -> Iterator[str]:
    """What is wrong with limits, one line each."""
    dt, names = limits.dt, ("velocity", "acceleration", "jerk")
    for name in ("lower", "upper", *names):
        if len(getattr(limits, name)) != len(AXES):
            yield f"{name} has {len(getattr(limits, name))} numbers, expected one for each of {', '.join(AXES)}"
    rates = [(f"{AXES[i]} {name}", rate) for name in names for i, rate in enumerate(getattr(limits, name))]
    rates += [("dt", dt), ("force", limits.force), ("torque", limits.torque)]
    for name, rate in rates + [(f"{name} velocity", rate) for name, _, _, rate in limits.joints]:
        if not 0.0 < rate < math.inf:
            yield f"{name} is {rate}, expected a positive number"
    bounds = [(AXES[i], limits.lower[i], limits.upper[i]) for i in range(3)]
    for name, lower, upper in bounds + [joint[:3] for joint in limits.joints]:
        if not (max(abs(lower), abs(upper)) < REACH and _inside(lower, upper) < _inside(upper, lower)):
            yield f"{name} is from {lower} to {upper}, expected lower < upper, both nearer to 0 than {REACH:g}"
    if set(limits.lower[3:]) != {-math.inf} or set(limits.upper[3:]) != {math.inf}:
        yield "rotation has bounds, which this guard cannot hold: expected -inf and inf"
    for name, speeds in (("moves", limits.velocity[:3]), ("turns", limits.velocity[3:])):
        if dt * math.hypot(*speeds) > 1.0:
            yield f"{name} of {dt * math.hypot(*speeds):.3g} in a tick, expected at most 1 (m, rad): lower the velocity"
    for i, axis in enumerate(limits.axes):
        rounding = TURN_ROUNDING if i >= 3 else math.ldexp(1.0, math.frexp(max(-axis.lower, axis.upper))[1] - 25)
        finest = dt * min(axis.velocity, dt * axis.acceleration, dt * axis.swing)
        if MARGIN / 2.0 * finest < rounding:
            yield f"{AXES[i]}: velocity, acceleration, jerk allow {finest:.3g} a tick, too little for float32: raise them or dt"
        first = dt * brake(limits.inner[i], axis.velocity, 0.0, dt)
        if math.isnan(stop(FREE, limits.inner[i], 0.0, axis.velocity, 0.0, first, dt)):
            yield f"{AXES[i]}: to stop takes over {TICKS} ticks: raise acceleration, jerk or dt, or lower the velocity"


def to32(x: float) -> float:
    """The float32 nearest to `x`."""
    near: float = FLOAT32.unpack(FLOAT32.pack(x))[0]
    return near


def _inside(bound: float, other: float) -> float:
    """The float32 nearest to `bound` on the side of `other`."""
    near = to32(bound)
    outside = (near - bound) * (other - bound) < 0.0
    return float(np.nextafter(np.float32(near), np.float32(other))) if outside else near
