"""The motion guard: the last thing before the wire. Whatever is asked, what is sent stays inside limits and can be stopped.

A pure function of limits, state, what is wanted and what was measured: no clock, no files, no randomness. A command is a
pose of the tool in the base frame, once every `dt` seconds, in float32 as the wire carries it.

Why no limit is ever broken. A state is *safe* if the braking manoeuvre from it (`_brake`, tick by tick, each pose rounded to
float32 as it would be sent) comes to exact rest without breaking a limit. At rest in the workspace the manoeuvre is to stay:
safe. From a safe state the guard sends either a pose whose whole braking manoeuvre it has just computed and found good, so
that the next state is safe; or the first pose of the present manoeuvre, whose remainder is the next state's manoeuvre to the
last bit, as both come from the same numbers by the same operations: safe again. So, by induction, every pose that is sent has
been checked against the true limits. The margin inside (`KEEP`) decides how well the tool moves, never whether it is safe.
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
XYZ, WXYZ = ("x", "y", "z"), ("w", "x", "y", "z")

MARGIN = 1e-3  # plans leave this share of velocity, acceleration and jerk to the rounding to float32
KEEP = 1.0 - MARGIN
TURN_ROUNDING = 2.0**-23  # rad: four components, each off by 2^-25 at most, turn a unit quaternion by 2 sqrt(4) 2^-25 at most
REACH = 100.0  # m: workspaces are nearer than this to the base
STOP_TICKS = 32  # stopping from full velocity takes no longer,
TICKS = 2 * STOP_TICKS  # and no longer than this where an acceleration towards full velocity must end first
HALVINGS = 12
UNIT = 1e-3  # the length of a wanted quaternion is not farther from 1;
ROUNDED_UNIT = 2.0**-23  # not farther than this: it is unit but for float32, and sent as it is
STILL = 1e-12  # m/s, rad/s: what float64 may leave of a velocity that is to be 0

FLOAT32 = struct.Struct("f")
Vector = tuple[float, ...]


class Level(IntEnum):
    """What was sent: what was wanted; the nearest allowed; a stop; a stop for good, until an operator clears it."""

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

    Velocity, acceleration and jerk are finite differences of successive commands: for rotation, of the rotation vectors from
    one to the next. Rotation has no bounds (-inf, inf). `joints`: (name, lower, upper [rad], velocity [rad/s]).

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

    def __post_init__(self) -> None:
        for complaint in _complaints(self):
            raise BadInput(f"guard limits: {complaint}")

    @classmethod
    def of(cls, robot: RobotSpec, dt: float | None = None) -> Limits:
        """The limits of `robot`, at a tick of `dt` seconds (default: the robot's control step)."""
        motion = robot.motion
        lower, upper = zip(*robot.workspace, strict=True)
        rates = [(move,) * 3 + (turn,) * 3 for move, turn in (motion.velocity, motion.acceleration, motion.jerk)]
        joints = tuple((joint.name, joint.lower, joint.upper, joint.velocity) for joint in robot.joints)
        turns = (math.inf,) * 3
        dt = robot.control_dt if dt is None else dt
        return cls(dt, lower + tuple(-turn for turn in turns), upper + turns, *rates, *motion.wrench, joints)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """What the move of one axis is judged by. Bounds of position are the outermost float32 values inside.

        Turns are rounded when all three axes of rotation are planned, so that here their velocity keeps the margin.
        """
        rows = zip(self.lower, self.upper, self.velocity, self.acceleration, self.jerk, strict=True)
        return tuple(
            Axis(_inside(lower, upper), _inside(upper, lower), v if i < 3 else KEEP * v, a, j * self.dt)
            for i, (lower, upper, v, a, j) in enumerate(rows)
        )

    @cached_property
    def inner(self) -> tuple[Axis, ...]:
        """What is planned with."""
        rows = zip(self.axes, self.velocity, strict=True)
        return tuple(Axis(axis.lower, axis.upper, KEEP * v, KEEP * axis.acceleration, KEEP * axis.swing) for axis, v in rows)

    @cached_property
    def fields(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Readings that must be there, with the names of their components."""
        joints = tuple(joint[0] for joint in self.joints)
        return (("joint_pos", joints), ("joint_vel", joints), ("force", XYZ), ("torque", XYZ))


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
    outside = [_beyond(limits, i, x) for i, x in enumerate(place) if not limits.lower[i] <= x <= limits.upper[i]]
    if problems or outside:
        raise BadInput(f"the guard cannot start there: {'; '.join([*problems, *outside])}: bring the tool into the workspace")
    inside = tuple(_to32(min(max(x, axis.lower), axis.upper)) for x, axis in zip(place, limits.axes, strict=False))
    return State(Command(inside, tuple(map(_to32, turn))), (0.0,) * 6, (0.0,) * 6)


def clear(state: State) -> State:
    """The operator allows motion again; a fault that is still there latches again."""
    return replace(state, latch="")


def guard(
    limits: Limits, state: State, wanted: tuple[ArrayLike, ArrayLike] | None, readings: Mapping[str, ArrayLike]
) -> tuple[State, Verdict]:
    """One tick: the new state, whose `command` must be sent, and what was done.

    Args:
        limits: the same from tick to tick.
        state: what the last tick returned, or `start`.
        wanted: position [3] m and quaternion [4] wxyz in the base frame, or None: there is no command.
        readings: measured `joint_pos` [J] rad and `joint_vel` [J] rad/s in the order of the limits, `force` [3] N, `torque`
            [3] N m; others are ignored.

    Of q and -q, the same orientation, the one nearer to the last command is sent. An axis that cannot be where it is wanted
    moves as near as it can stop, and the others as wanted. Raises nothing, whatever values are wanted and measured.
    """
    faults, gaps = _measured(limits, readings)
    latch = state.latch or "; ".join(faults)
    if latch:
        return _slowed(limits, replace(state, latch=latch)), Verdict(Level.LATCH, (latch,))
    pos, quat, problems = _pose(wanted)
    if gaps or problems:
        return _slowed(limits, state), Verdict(Level.HOLD, gaps + problems)
    moves = [_axis(limits, i, state, state.command.pos[i], pos[i]) for i in range(3)]
    turn, reasons = _rotation(limits, state, quat)
    reasons = tuple(why for _, why in moves if why) + reasons
    sent = _sent(limits, state, Command(tuple(to for to, _ in moves), turn))
    return sent, Verdict(Level.CLAMP if reasons else Level.PASS, reasons)


def _sent(limits: Limits, state: State, command: Command) -> State:
    """The state after `command` was sent."""
    moved = [new - old for new, old in zip(command.pos, state.command.pos, strict=True)]
    moved += _increment(command.quat, state.command.quat)
    velocity = tuple([move / limits.dt for move in moved])
    acceleration = tuple([(new - old) / limits.dt for new, old in zip(velocity, state.velocity, strict=True)])
    return State(command, velocity, acceleration, state.latch)


def _slowed(limits: Limits, state: State) -> State:
    """The next state of the braking manoeuvre."""
    dt, old = limits.dt, state.command
    rate = [_brake(*row, dt) for row in zip(limits.inner, state.velocity, state.acceleration, strict=True)]
    pos = tuple(_to32(x + dt * v) for x, v in zip(old.pos, rate, strict=False))
    return _sent(limits, state, Command(pos, _turned(old.quat, [dt * w for w in rate[3:]])))


def _brake(axis: Axis, v: float, a: float, dt: float) -> float:
    """The velocity of the next tick on the way from velocity `v` and acceleration `a` to rest.

    Time-optimal feedback for the double integrator a' = a + dt j, v' = v + dt a' with bounded j (Han, IEEE Trans. Ind. Electron.
    56(3), 2009, has fhan for explicit Euler): the deceleration from which full jerk ends with v = 0 and a = 0 together is
    approached as fast as the jerk allows, then kept to, and reached exactly. With S the swing, decelerations b, b - S, ...,
    b - m S > 0 shed ((m + 1) b - S m (m + 1) / 2) dt; that is solved for b.
    """
    shed = abs(v) / dt
    m = int((math.sqrt(1.0 + 8.0 * shed / axis.swing) - 1.0) / 2.0)
    b = shed / (m + 1) + axis.swing * m / 2.0
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
            break
        if v1 == a1 == 0.0:
            return to
        x, v, a = to, v1, a1
        to = _to32(x + dt * _brake(inner, v, a, dt))
    return math.nan


def _axis(limits: Limits, i: int, state: State, x: float, wanted: float) -> tuple[float, str]:
    """Where axis i, now at `x`, is sent: to `wanted` if it may, else as near as it can stop; and why not, or ''."""
    axis, inner, v, a = limits.axes[i], limits.inner[i], state.velocity[i], state.acceleration[i]
    goal = _to32(min(max(wanted, axis.lower), axis.upper))
    stops = not math.isnan(_stop(axis, inner, x, v, a, goal, limits.dt))
    if stops and limits.lower[i] <= wanted <= limits.upper[i]:
        return goal, ""
    to = goal if stops else _aim(axis, inner, x, v, a, goal, limits.dt)
    return to, _why(limits, i, x, v, a, wanted)


def _aim(axis: Axis, inner: Axis, x: float, v: float, a: float, goal: float, dt: float) -> float:
    """Where to send an axis so that braking from then on ends as near to `goal` as it can on this side of it.

    The braking manoeuvre's own next velocity may always be sent; bisection between it and the farthest one towards the goal.
    (Towards the goal as far as one tick allows: that would swing about it for ever where acceleration is small.)
    """
    good = _brake(inner, v, a, dt)
    side = 1.0 if goal > _stop(FREE, inner, x, v, a, _to32(x + dt * good), dt) else -1.0
    farthest = min(side * v + dt * min(side * a + inner.swing, inner.acceleration), inner.velocity)
    trial = bad = side * max(farthest, side * good)
    for _ in range(HALVINGS):
        if side * (goal - _stop(axis, inner, x, v, a, _to32(x + dt * trial), dt)) >= 0.0:
            good = trial
        else:
            bad = trial
        if good == bad:
            break
        trial = (good + bad) / 2.0
    return _to32(x + dt * good)


def _beyond(limits: Limits, i: int, x: float) -> str:
    limit = limits.lower[i] if x < limits.lower[i] else limits.upper[i]
    return f"{AXES[i]}: position {x:.6g} {UNITS[i]}, limit {limit:g}"


def _why(limits: Limits, i: int, x: float, v: float, a: float, wanted: float) -> str:
    """What of `wanted` may not be sent on axis i, with the figures."""
    if not limits.lower[i] <= wanted <= limits.upper[i]:
        return _beyond(limits, i, wanted)
    v1 = (wanted - x) / limits.dt
    a1 = (v1 - v) / limits.dt
    j1 = (a1 - a) / limits.dt
    if abs(v1) > limits.velocity[i]:
        return f"{AXES[i]}: velocity {v1:.6g} {UNITS[i]}/s, limit {limits.velocity[i]:g}"
    if abs(a1) > limits.acceleration[i]:
        return f"{AXES[i]}: acceleration {a1:.6g} {UNITS[i]}/s^2, limit {limits.acceleration[i]:g}"
    if abs(j1) > limits.jerk[i]:
        return f"{AXES[i]}: jerk {j1:.6g} {UNITS[i]}/s^3, limit {limits.jerk[i]:g}"
    return f"{AXES[i]}: no room to stop after {v1:.6g} {UNITS[i]}/s"


def _rotation(limits: Limits, state: State, wanted: Vector) -> tuple[Vector, tuple[str, ...]]:
    """The quaternion to send, and why it is not `wanted`."""
    old = state.command.quat
    if sum(p * q for p, q in zip(wanted, old, strict=True)) < 0.0:
        wanted = tuple(-q for q in wanted)
    rounded = tuple(map(_to32, wanted))
    if _turn_stops(limits, state, rounded):
        return rounded, ()
    moves = [_axis(limits, 3 + i, state, 0.0, r) for i, r in enumerate(_increment(wanted, old))]
    turn = _turned(old, [to for to, _ in moves])
    if not _turn_stops(limits, state, turn):
        turn = _slowed(limits, state).command.quat
    return turn, tuple(why for _, why in moves if why) or ("tcp rx, ry, rz: no stop inside the limits when rounded to float32",)


def _turn_stops(limits: Limits, state: State, to: Vector) -> bool:
    """Whether `to` may be sent: braking from then on, the axes of rotation together, ends at rest without breaking a limit."""
    dt, inner, quat = limits.dt, limits.inner[3:], state.command.quat
    velocity, acceleration = state.velocity[3:], state.acceleration[3:]
    bounds = [(v, axis.acceleration, axis.swing) for v, axis in zip(limits.velocity[3:], limits.axes[3:], strict=True)]
    for _ in range(TICKS):
        new = tuple([r / dt for r in _increment(to, quat)])
        change = tuple([(w1 - w) / dt for w1, w in zip(new, velocity, strict=True)])
        for (most_w, most_a, swing), w1, a1, a in zip(bounds, new, change, acceleration, strict=True):
            if abs(w1) > most_w or abs(a1) > most_a or abs(a1 - a) > swing:
                return False
        if not any(new) and not any(change):
            return True
        quat, velocity, acceleration = to, new, change
        to = _turned(quat, [dt * _brake(*row, dt) for row in zip(inner, velocity, acceleration, strict=True)])
    return False


def _turned(quat: Vector, turn: Sequence[float]) -> Vector:
    """`quat` turned by the rotation vector `turn` of the base frame, normalised, rounded to float32; itself if `turn` is 0."""
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
    """The rotation vector of new old^-1, quaternions of one hemisphere, of any length; exactly 0 if they are equal."""
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
    except Exception as error:  # a foreign object: whatever it raises, there must be an answer
        return (), (), (f"command: {type(error).__name__}, expected a pair of position and quaternion",)
    pos, problems = _numbers("command position", AXES[:3], place)
    quat, more = _numbers("command quaternion", WXYZ, turn)
    length = math.hypot(*quat)
    if more:
        return pos, quat, problems + more
    if abs(length - 1.0) > UNIT:
        return pos, quat, (*problems, f"command quaternion: length {length:.6g}, expected 1")
    return pos, quat if abs(length - 1.0) <= ROUNDED_UNIT else tuple(q / length for q in quat), problems


def _numbers(field: str, names: tuple[str, ...], value: Any) -> tuple[Vector, tuple[str, ...]]:
    """The value as floats, nan where it is not finite, () where its shape is another; and what is wrong with it."""
    try:
        array = np.asarray(value)
    except Exception as error:  # as above
        return (), (f"{field}: {type(error).__name__}, expected {len(names)} numbers",)
    if array.shape != (len(names),) or array.dtype.kind not in "fiu":
        return (), (f"{field}: shape {array.shape} of {array.dtype}, expected {len(names)} numbers",)
    values = tuple(map(float, array.tolist()))
    bad = tuple([f"{field}: {name} is {v}" for name, v in zip(names, values, strict=True) if not math.isfinite(v)])
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
        if len(getattr(limits, name)) != 6:
            yield f"{name} has {len(getattr(limits, name))} numbers, expected one for each of {', '.join(AXES)}"
    for axis, *rates in zip(AXES, limits.velocity, limits.acceleration, limits.jerk, strict=True):
        if not all(0.0 < rate < math.inf for rate in rates):
            yield f"{axis}: velocity, acceleration and jerk are {rates}, expected positive numbers"
    for axis, lower, upper in zip(AXES[:3], limits.lower, limits.upper, strict=False):
        if not (-REACH < lower < upper < REACH and _inside(lower, upper) < _inside(upper, lower)):
            yield f"{axis}: {lower} to {upper} m, expected lower < upper, within {REACH:g} m of the base"
    if set(limits.lower[3:]) != {-math.inf} or set(limits.upper[3:]) != {math.inf}:
        yield "rotation has bounds, which this guard cannot hold: expected -inf and inf"
    for name, rates in (("translation", limits.velocity[:3]), ("rotation", limits.velocity[3:])):
        if dt * math.hypot(*rates) > 1.0:
            yield f"a tick may bring a {name} of {dt * math.hypot(*rates):.3g}, expected at most 1 m, 1 rad: lower the velocity"
    for i, (name, axis, inner) in enumerate(zip(AXES, limits.axes, limits.inner, strict=True)):
        rounding = TURN_ROUNDING if i >= 3 else math.ldexp(1.0, math.frexp(max(-axis.lower, axis.upper))[1] - 25)
        finest = dt * min(axis.velocity, dt * axis.acceleration, dt * axis.swing)
        if MARGIN * finest < rounding:
            yield f"{name}: velocity, acceleration, jerk allow {finest:.3g} a tick, too little for float32: raise them or dt"
        if math.isnan(_stop(FREE, inner, 0.0, axis.velocity, 0.0, dt * _brake(inner, axis.velocity, 0.0, dt), dt, STOP_TICKS)):
            yield f"{name}: to stop takes over {STOP_TICKS} ticks: raise acceleration, jerk or dt, or lower the velocity"


def _to32(x: float) -> float:
    """The float32 nearest to `x`."""
    near: float = FLOAT32.unpack(FLOAT32.pack(x))[0]
    return near


def _inside(bound: float, other: float) -> float:
    """The float32 nearest to `bound` on the side of `other`."""
    near = _to32(bound)
    outside = near > bound if bound > other else near < bound
    return float(np.nextafter(np.float32(near), np.float32(other))) if outside else near
