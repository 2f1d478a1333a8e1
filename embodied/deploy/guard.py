"""The motion guard: the last thing before the wire. Whatever is asked, what is sent stays inside limits and can be stopped.

A pure function of limits, state, what is wanted and what was measured: no clock, no files, no randomness. A command is a
pose of the tool in the base frame, once every `dt` seconds, in float32 as the wire carries it.

Why no limit is ever broken. A state is *safe* if the braking manoeuvre from it (`_brake`, tick by tick, each pose rounded to
float32 as it would be sent) comes to exact rest without breaking a limit. At rest inside the workspace the manoeuvre is to
stay: safe. From a safe state guard() sends either a pose whose whole braking manoeuvre has just been computed and found good,
so that the next state is safe; or the first pose of the present manoeuvre, whose rest is then the next state's manoeuvre, to
the last bit, for both are computed by the same lines from the same numbers: safe again. By induction all states are safe,
and a safe state is reached only by a pose that was checked. Margins inside (`MARGIN`) decide how well it moves, never whether
it is safe.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from embodied.spec.errors import BadInput
from embodied.spec.robot import RobotSpec

AXES = ("tcp x", "tcp y", "tcp z", "tcp rx", "tcp ry", "tcp rz")
UNITS = ("m", "m", "m", "rad", "rad", "rad")
QUAT = ("w", "x", "y", "z")

MARGIN = 1e-3  # what is planned keeps this share of velocity, acceleration and jerk free for the rounding to float32
REACH = 100.0  # m: a workspace ends here
TURN_ROUNDING = 2.0**-23  # rad: four components, each off by 2^-25 at most, turn a unit quaternion by at most 2 * 2 * 2^-25
STOP_TICKS = 32  # a stop from full velocity takes no longer
TICKS = 2 * STOP_TICKS  # nor one that must first end an acceleration towards full velocity
HALVINGS = 16
UNIT = 1e-3  # how far the length of a wanted quaternion may be from 1
ROUNDED_UNIT = 2.0**-23  # and how far that of one which was rounded to float32, and is sent as it is
STILL = 1e-12  # m/s, rad/s: what float64 leaves of a velocity that is to be 0

Vector = tuple[float, ...]


class Level(IntEnum):
    """What the guard did: sent what was wanted, the nearest allowed, came to rest, came to rest until an operator clears."""

    PASS = 0
    CLAMP = 1
    HOLD = 2
    LATCH = 3


class Axis(NamedTuple):
    """Limits of one axis: position, velocity, acceleration, and `swing`, the change of acceleration in a tick (jerk * dt)."""

    lower: float
    upper: float
    velocity: float
    acceleration: float
    swing: float


FREE = Axis(-math.inf, math.inf, math.inf, math.inf, math.inf)


@dataclass(frozen=True)
class Limits:
    """Limits by axis (x, y, z, rx, ry, rz of the base frame; m, rad), of the measured wrench [N, N m] and the measured joints.

    Velocity, acceleration and jerk are finite differences of successive commands; those of rotation are of rotation vectors
    of the increments. `joints`: (name, lower, upper [rad], velocity [rad/s]).

    Raises:
        BadInput: values that are not positive and finite, too fine for float32 commands, or that allow no timely stop.
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

    def __post_init__(self) -> None:
        for complaint in _complaints(self):
            raise BadInput(f"guard limits: {complaint}")

    @classmethod
    def of(cls, robot: RobotSpec, dt: float | None = None) -> Limits:
        """The limits of `robot`, at a tick of `dt` seconds (default: the robot's control step)."""
        motion = robot.motion
        lower, upper = zip(*robot.workspace, strict=True)
        return cls(
            dt=robot.control_dt if dt is None else dt,
            lower=(*lower, -math.inf, -math.inf, -math.inf),
            upper=(*upper, math.inf, math.inf, math.inf),
            velocity=_each(motion.velocity),
            acceleration=_each(motion.acceleration),
            jerk=_each(motion.jerk),
            force=motion.wrench[0],
            torque=motion.wrench[1],
            joints=tuple((joint.name, joint.lower, joint.upper, joint.velocity) for joint in robot.joints),
        )

    @cached_property
    def true(self) -> tuple[Axis, ...]:
        """The limits of what is sent; bounds of position are the outermost float32 values inside."""
        return tuple(
            Axis(_inside(self.lower[i], self.upper[i]), _inside(self.upper[i], self.lower[i]), *row)
            for i, row in enumerate(zip(self.velocity, self.acceleration, (jerk * self.dt for jerk in self.jerk), strict=True))
        )

    @cached_property
    def inner(self) -> tuple[Axis, ...]:
        """What manoeuvres are planned with."""
        keep = 1.0 - MARGIN
        return tuple(Axis(a.lower, a.upper, keep * a.velocity, keep * a.acceleration, keep * a.swing) for a in self.true)

    @cached_property
    def turning(self) -> tuple[Axis, ...]:
        """What a plan of one axis is judged by where the rounding is known only when all axes of rotation are planned."""
        return tuple(axis._replace(velocity=inner.velocity) for axis, inner in zip(self.true, self.inner, strict=True))

    @cached_property
    def fields(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Readings that must be there, with the names of their components."""
        joints = tuple(joint[0] for joint in self.joints)
        return (("joint_pos", joints), ("joint_vel", joints), ("force", ("x", "y", "z")), ("torque", ("x", "y", "z")))


@dataclass(frozen=True)
class Command:
    """A pose of the tool in the base frame: position [m], unit quaternion wxyz; every number is exact in float32."""

    pos: Vector
    quat: Vector


@dataclass(frozen=True)
class State:
    """The command sent last; velocity and acceleration [6] of the commands; why it is latched, or ''."""

    command: Command
    velocity: Vector
    acceleration: Vector
    latch: str = ""


@dataclass(frozen=True)
class Verdict:
    """What was done, and why: one reason for each axis, joint or quantity."""

    level: Level
    reasons: tuple[str, ...]


def start(limits: Limits, pos: ArrayLike, quat: ArrayLike) -> State:
    """At rest at `pos` [3] m, `quat` [4] wxyz.

    Raises:
        BadInput: not a finite pose with a unit quaternion inside the workspace.
    """
    place, turn, problems = _pose((pos, quat))
    problems += tuple(
        f"{AXES[i]}: position {x:.6g} m, limit {limits.lower[i] if x < limits.lower[i] else limits.upper[i]:g}"
        for i, x in enumerate(place)
        if not limits.lower[i] <= x <= limits.upper[i]
    )
    if problems:
        raise BadInput(f"the guard cannot start there: {'; '.join(problems)}: move the tool into the workspace, check its pose")
    inside = tuple(_to32(min(max(x, axis.lower), axis.upper)) for x, axis in zip(place, limits.true, strict=False))
    return State(Command(inside, tuple(map(_to32, turn))), (0.0,) * 6, (0.0,) * 6)


def clear(state: State) -> State:
    """The operator allows motion again; a fault that is still there latches again."""
    return replace(state, latch="")


def guard(
    limits: Limits, state: State, wanted: tuple[ArrayLike, ArrayLike] | None, readings: Mapping[str, ArrayLike]
) -> tuple[State, Verdict]:
    """One tick: the new state, whose `command` is what must be sent, and what was done about `wanted`.

    Args:
        limits: the limits; the same from tick to tick.
        state: what the last tick returned, or `start`.
        wanted: position [3] m and quaternion [4] wxyz in the base frame, or None: there is no command.
        readings: measured `joint_pos` [J] rad, `joint_vel` [J] rad/s in the order of the limits, `force` [3] N, `torque` [3]
            N m; others are ignored.

    Of q and -q, the same orientation, the one nearer to the last command is sent. What cannot be sent is approached so that
    the tool can stop at it; an axis that can be sent is. Raises nothing, whatever `wanted` and `readings` hold.
    """
    faults, gaps = _measured(limits, readings)
    latch = state.latch or "; ".join(faults)
    if latch:
        return _slowed(limits, replace(state, latch=latch)), Verdict(Level.LATCH, (latch,))
    pos, quat, problems = _pose(wanted)
    if gaps or problems:
        return _slowed(limits, state), Verdict(Level.HOLD, gaps + problems)
    moves = [_axis(limits, limits.true, i, state.command.pos[i], state, pos[i]) for i in range(3)]
    turn, reasons = _rotation(limits, state, quat)
    reasons = tuple(move[1] for move in moves if move[1]) + reasons
    sent = _sent(limits, state, Command(tuple(move[0] for move in moves), turn))
    return sent, Verdict(Level.CLAMP if reasons else Level.PASS, reasons)


def _sent(limits: Limits, state: State, command: Command) -> State:
    """The state after `command` was sent."""
    moved = [new - old for new, old in zip(command.pos, state.command.pos, strict=True)]
    moved += _increment(command.quat, state.command.quat)
    velocity = tuple(move / limits.dt for move in moved)
    acceleration = tuple((new - old) / limits.dt for new, old in zip(velocity, state.velocity, strict=True))
    return State(command, velocity, acceleration, state.latch)


def _slowed(limits: Limits, state: State) -> State:
    """The next state of the braking manoeuvre."""
    dt, old = limits.dt, state.command
    rate = [_brake(*row, dt) for row in zip(limits.inner, state.velocity, state.acceleration, strict=True)]
    pos = tuple(_to32(x + dt * v) for x, v in zip(old.pos, rate, strict=False))
    return _sent(limits, state, Command(pos, _turned(old.quat, [dt * w for w in rate[3:]])))


def _brake(axis: Axis, v: float, a: float, dt: float) -> float:
    """The velocity of the next tick that brings velocity `v` and acceleration `a` to 0, and to 0 again on all later ticks.

    Time-optimal control of the discrete double integrator v' = v + dt a', a' = a + dt j with bounded j (as Han's fhan,
    IEEE Trans. Ind. Electron. 56(3), 2009; here exact for this order of integration): the deceleration from which ticks of
    full jerk end with v = 0 and a = 0 together is approached as fast as the jerk allows, then kept to. With `swing` S a tick,
    decelerations b, b - S, ..., b - m S > 0 shed (m + 1) b - S m (m + 1) / 2, in units of dt; that is solved for b.
    """
    shed = abs(v) / dt
    m = int((math.sqrt(1.0 + 8.0 * shed / axis.swing) - 1.0) / 2.0)
    b = (shed + axis.swing * m * (m + 1) / 2.0) / (m + 1)
    a1 = min(max(-math.copysign(b, v), a - axis.swing, -axis.acceleration), a + axis.swing, axis.acceleration)
    v1 = v + dt * a1
    return v1 if abs(v1) > STILL else 0.0


def _stop(axis: Axis, inner: Axis, x: float, v: float, a: float, to: float, dt: float, ticks: int = TICKS) -> float:
    """Where an axis comes to rest if `to` is sent now and it brakes from then on; nan if that breaks a limit of `axis`."""
    lower, upper, velocity, acceleration, swing = axis
    for _ in range(ticks):
        v1 = (to - x) / dt
        a1 = (v1 - v) / dt
        fits = abs(v1) <= velocity and abs(a1) <= acceleration and abs(a1 - a) <= swing
        if not (fits and lower <= to <= upper):
            return math.nan
        if v1 == a1 == 0.0:
            return to
        x, v, a = to, v1, a1
        to = _to32(x + dt * _brake(inner, v, a, dt))
    return math.nan


def _axis(limits: Limits, axes: tuple[Axis, ...], i: int, x: float, state: State, wanted: float) -> tuple[float, str]:
    """The position to send on axis i: `wanted` if it can be, else the best that can; and why not, or ''."""
    axis, inner, dt, v, a = axes[i], limits.inner[i], limits.dt, state.velocity[i], state.acceleration[i]
    goal = _to32(min(max(wanted, axis.lower), axis.upper))
    stops = not math.isnan(_stop(axis, inner, x, v, a, goal, dt))
    if stops and limits.lower[i] <= wanted <= limits.upper[i]:
        return goal, ""
    return goal if stops else _aim(axis, inner, x, v, a, goal, dt), _why(limits, i, x, v, a, wanted)


def _aim(axis: Axis, inner: Axis, x: float, v: float, a: float, goal: float, dt: float) -> float:
    """The position to send so that braking from then on ends as near to `goal` as it can, without passing it.

    The braking manoeuvre's own next velocity can always be sent; the farthest one towards the goal that jerk, acceleration and
    velocity allow perhaps cannot. Between them, bisection. (Going to the goal as fast as each tick allows would swing about
    it for ever where the acceleration is small.)
    """
    good = _brake(inner, v, a, dt)
    end = _stop(FREE, inner, x, v, a, _to32(x + dt * good), dt)
    side = 1.0 if goal > end else -1.0
    most = min(side * v + dt * min(side * a + inner.swing, inner.acceleration), inner.velocity)
    trial = bad = side * max(most, side * good)
    for _ in range(HALVINGS):
        if side * (goal - _stop(axis, inner, x, v, a, _to32(x + dt * trial), dt)) >= 0.0:
            good = trial
        else:
            bad = trial
        if good == bad:
            break
        trial = (good + bad) / 2.0
    return _to32(x + dt * good)


def _why(limits: Limits, i: int, x: float, v: float, a: float, wanted: float) -> str:
    """What of `wanted` could not be sent on axis i, with the figures."""
    lower, upper, dt = limits.lower[i], limits.upper[i], limits.dt
    if not lower <= wanted <= upper:
        return f"{AXES[i]}: position {wanted:.6g} {UNITS[i]}, limit {lower if wanted < lower else upper:g}"
    v1 = (wanted - x) / dt
    a1 = (v1 - v) / dt
    rates = (
        ("velocity", v1, limits.velocity[i], "/s"),
        ("acceleration", a1, limits.acceleration[i], "/s^2"),
        ("jerk", (a1 - a) / dt, limits.jerk[i], "/s^3"),
    )
    for name, value, limit, per in rates:
        if abs(value) > limit:
            return f"{AXES[i]}: {name} {value:.6g} {UNITS[i]}{per}, limit {limit:g}"
    return f"{AXES[i]}: no room to stop after {v1:.6g} {UNITS[i]}/s"


def _rotation(limits: Limits, state: State, wanted: Vector) -> tuple[Vector, tuple[str, ...]]:
    """The quaternion to send, and why `wanted` is not."""
    old, dt = state.command.quat, limits.dt
    if sum(p * q for p, q in zip(wanted, old, strict=True)) < 0.0:
        wanted = tuple(-q for q in wanted)
    rounded = tuple(map(_to32, wanted))
    if _turn_stops(limits, state, rounded):
        return rounded, ()
    increments = _increment(wanted, old)
    moves = [_axis(limits, limits.turning, 3 + i, 0.0, state, increments[i]) for i in range(3)]
    turn = _turned(old, [move[0] for move in moves])
    if not _turn_stops(limits, state, turn):
        turn = _slowed(limits, state).command.quat
    return turn, tuple(move[1] for move in moves if move[1]) or ("tcp rx, ry, rz: rounded to float32 it would break a limit",)


def _turn_stops(limits: Limits, state: State, to: Vector) -> bool:
    """Whether `to` can be sent: braking from then on, all axes of rotation together, ends at rest without breaking a limit."""
    dt, axes, inner = limits.dt, limits.true[3:], limits.inner[3:]
    quat, velocity, acceleration = state.command.quat, list(state.velocity[3:]), list(state.acceleration[3:])
    for _ in range(TICKS):
        new = [r / dt for r in _increment(to, quat)]
        change = [(w1 - w) / dt for w1, w in zip(new, velocity, strict=True)]
        for axis, w1, a1, a in zip(axes, new, change, acceleration, strict=True):
            if not (abs(w1) <= axis.velocity and abs(a1) <= axis.acceleration and abs(a1 - a) <= axis.swing):
                return False
        if not any(new) and not any(change):
            return True
        quat, velocity, acceleration = to, new, change
        to = _turned(quat, [dt * _brake(*row, dt) for row in zip(inner, velocity, acceleration, strict=True)])
    return False


def _turned(quat: Vector, turn: Sequence[float]) -> Vector:
    """`quat` turned by the rotation vector `turn` of the base frame: normalised, rounded to float32; itself if `turn` is 0."""
    angle = math.hypot(*turn)
    if angle == 0.0:
        return quat
    pw, s = math.cos(0.5 * angle), math.sin(0.5 * angle) / angle
    px, py, pz = turn[0] * s, turn[1] * s, turn[2] * s
    qw, qx, qy, qz = quat
    w = pw * qw - px * qx - py * qy - pz * qz
    x = pw * qx + px * qw + py * qz - pz * qy
    y = pw * qy + py * qw + pz * qx - px * qz
    z = pw * qz + pz * qw + px * qy - py * qx
    length = math.hypot(w, x, y, z)
    return _to32(w / length), _to32(x / length), _to32(y / length), _to32(z / length)


def _increment(new: Vector, old: Vector) -> Vector:
    """The rotation vector of new old^-1, of two quaternions of one hemisphere and of any length; exactly 0 if they are equal."""
    pw, px, py, pz = new
    qw, qx, qy, qz = old
    x = px * qw - pw * qx - py * qz + pz * qy
    y = py * qw - pw * qy - pz * qx + px * qz
    z = pz * qw - pw * qz - px * qy + py * qx
    sine = math.hypot(x, y, z)
    if sine == 0.0:
        return 0.0, 0.0, 0.0
    factor = 2.0 * math.atan2(sine, pw * qw + px * qx + py * qy + pz * qz) / sine
    return x * factor, y * factor, z * factor


def _measured(limits: Limits, readings: Mapping[str, ArrayLike]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was measured beyond its limits; and what is missing or not finite."""
    values: dict[str, Vector] = {}
    faults: list[str] = []
    gaps: tuple[str, ...] = ()
    for field, names in limits.fields:
        values[field], problems = _numbers(field, names, readings[field]) if field in readings else ((), (f"{field}: missing",))
        gaps += problems
    for (name, lower, upper, _), q in zip(limits.joints, values["joint_pos"], strict=False):
        if q < lower or q > upper:
            faults.append(f"{name}: position {q:.6g} rad, limit {lower if q < lower else upper:g}")
    for (name, _, _, limit), v in zip(limits.joints, values["joint_vel"], strict=False):
        if abs(v) > limit:
            faults.append(f"{name}: velocity {v:.6g} rad/s, limit {limit:g}")
    for field, limit, unit in (("force", limits.force, "N"), ("torque", limits.torque, "N m")):
        size = math.hypot(*values[field])
        if size > limit:
            faults.append(f"{field}: {size:.6g} {unit}, limit {limit:g}")
    return tuple(faults), gaps


def _pose(wanted: Any) -> tuple[Vector, Vector, tuple[str, ...]]:
    """Position, unit quaternion and what is wrong with them."""
    if wanted is None:
        return (), (), ("no command",)
    try:
        place, turn = wanted
    except (TypeError, ValueError):
        return (), (), ("command: expected a pair of position and quaternion",)
    pos, problems = _numbers("command position", AXES[:3], place)
    quat, more = _numbers("command quaternion", QUAT, turn)
    length = math.hypot(*quat)
    if abs(length - 1.0) > UNIT and not more:
        more = (f"command quaternion: length {length:.6g}, expected 1",)
    if abs(length - 1.0) > ROUNDED_UNIT and not more:
        quat = tuple(q / length for q in quat)
    return pos, quat, problems + more


def _numbers(field: str, names: tuple[str, ...], value: Any) -> tuple[Vector, tuple[str, ...]]:
    """The value as floats, nan where it is not finite, () where its shape is another; and what is wrong with it."""
    try:
        array = np.asarray(value)
    except Exception as error:  # a foreign object: whatever it raises, there must be an answer
        return (), (f"{field}: {type(error).__name__}, expected {len(names)} numbers",)
    if array.shape != (len(names),) or array.dtype.kind not in "fiu":
        return (), (f"{field}: shape {array.shape} of {array.dtype}, expected {len(names)} numbers",)
    values = tuple(map(float, array.tolist()))
    bad = tuple(f"{field}: {name} is {v}" for name, v in zip(names, values, strict=True) if not math.isfinite(v))
    return tuple(v if math.isfinite(v) else math.nan for v in values) if bad else values, bad


def _complaints(limits: Limits) -> Iterator[str]:
    """What is wrong with limits, one line each."""
    dt = limits.dt
    for name, value in (("dt", dt), ("force", limits.force), ("torque", limits.torque)):
        if not 0.0 < value < math.inf:
            yield f"{name} is {value}, expected a positive number"
    for name, lower, upper, velocity in limits.joints:
        if not (-math.inf < lower < upper < math.inf and 0.0 < velocity < math.inf):
            yield f"{name}: {lower} to {upper} rad, {velocity} rad/s, expected lower < upper and a positive velocity"
    for name in ("lower", "upper", "velocity", "acceleration", "jerk"):
        row = getattr(limits, name)
        if len(row) != len(AXES):
            yield f"{name} has {len(row)} numbers, expected one for each of {', '.join(AXES)}"
    for axis, *row in zip(AXES, limits.velocity, limits.acceleration, limits.jerk, strict=True):
        if not all(0.0 < value < math.inf for value in row):
            yield f"{axis}: velocity, acceleration and jerk are {row}, expected positive numbers"
    for axis, lower, upper in zip(AXES[:3], limits.lower, limits.upper, strict=False):
        if not (-REACH < lower < upper < REACH and _inside(lower, upper) < _inside(upper, lower)):
            yield f"{axis}: {lower} to {upper} m, expected lower < upper, within {REACH:g} m of the base"
    if set(limits.lower[3:]) != {-math.inf} or set(limits.upper[3:]) != {math.inf}:
        yield "rotation has bounds: the guard knows none, they must be -inf and inf"
    for name, rates in (("translation", limits.velocity[:3]), ("rotation", limits.velocity[3:])):
        if dt * math.hypot(*rates) > 1.0:
            yield f"{name} of {dt * math.hypot(*rates):.3g} in a tick, expected at most 1 (m, rad): lower the velocity"
    for i, (axis, true, inner) in enumerate(zip(AXES, limits.true, limits.inner, strict=True)):
        rounding = _rounding(true.lower, true.upper) if i < 3 else TURN_ROUNDING
        for name, value, power in (
            ("velocity", true.velocity, 1),
            ("acceleration", true.acceleration, 2),
            ("jerk", true.swing / dt, 3),
        ):
            if rounding > MARGIN * value * dt**power:
                yield f"{axis}: {name} {value:.3g} is too fine for commands in float32 every {dt:g} s: at least {rounding / (MARGIN * dt**power):.3g}"
        if math.isnan(_stop(FREE, inner, 0.0, true.velocity, 0.0, dt * _brake(inner, true.velocity, 0.0, dt), dt, STOP_TICKS)):
            yield f"{axis}: a stop from {true.velocity:g} takes more than {STOP_TICKS} ticks: raise acceleration and jerk, or lower velocity"


def _rounding(lower: float, upper: float) -> float:
    """How far a position between the bounds is moved by rounding to float32, at most (half a unit in the last place)."""
    return math.ldexp(1.0, math.frexp(max(abs(lower), abs(upper)))[1] - 25)


def _each(pair: tuple[float, float]) -> Vector:
    """One value for each axis, of a pair (translation, rotation)."""
    return (pair[0],) * 3 + (pair[1],) * 3


_FLOAT32 = struct.Struct("f")


def _to32(x: float) -> float:
    """The float32 nearest to `x`."""
    return float(_FLOAT32.unpack(_FLOAT32.pack(x))[0])


def _inside(bound: float, other: float) -> float:
    """The float32 nearest to `bound` that is not on its far side from `other`."""
    near = _to32(bound)
    outside = near > bound if bound > other else near < bound
    return float(np.nextafter(np.float32(near), np.float32(other))) if outside else near
