"""The motion guard: the last thing before the wire. Whatever is asked, what is sent stays inside limits and can be stopped.

A pure function: no clock, no files, no randomness. A command is a pose of the tool in the base frame, once every `dt` seconds,
in float32 as the wire carries it.

Why no limit is ever broken. Call an axis of position, and the three of rotation together, safe if the braking manoeuvre
(`brake`, tick by tick, each pose rounded as it would be sent) brings it to exact rest without breaking a limit. At rest in the
workspace that is to stay: safe. From a safe state the guard sends either a pose whose whole manoeuvre it has just computed and
found good: the next state is safe; or the first pose of the present manoeuvre, whose remainder is the next state's manoeuvre to
the last bit, as both come from the same numbers by the same operations: safe again. So, by induction, all that is sent was
checked against the true limits. The margin inside (`MARGIN`) decides how well the tool moves, never whether it is safe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import mul
from operator import sub as minus
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from embodied.deploy.limits import AXES, FREE, TICKS, Axis, Limits, Vector, brake, stop, to32
from embodied.spec.errors import BadInput

UNITS = ("m", "m", "m", "rad", "rad", "rad")
HALVINGS = 6
UNIT = 1e-3  # the length of a wanted quaternion is not farther from 1;
ROUNDED_UNIT = 2.0**-23  # not farther than this: it is unit but for float32, and sent as it is


class Level(IntEnum):
    """What was sent: what was wanted; the nearest allowed; a stop; a stop for good, until an operator clears it."""

    PASS = 0
    CLAMP = 1
    HOLD = 2
    LATCH = 3


@dataclass(frozen=True)
class Command:
    """A pose of the tool in the base frame: position [m], unit quaternion wxyz; every number is exact in float32."""

    pos: Vector
    quat: Vector


@dataclass(frozen=True)
class State:
    """The command sent last; velocity and acceleration [6] of the commands; why it is latched, or ''; which axes are behind:
    were not sent as wanted; and for how many ticks in a row the measured wrench has been beyond its limits.
    """

    command: Command
    velocity: Vector
    acceleration: Vector
    latch: str = ""
    behind: tuple[bool, ...] = (False,) * 6
    pressed: int = 0


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
    problems = problems or tuple(filter(None, (_beyond(limits, i, x) for i, x in enumerate(place))))
    if problems:
        raise BadInput(f"the guard cannot start there: {'; '.join(problems)}: bring the tool into the workspace")
    inside = tuple(to32(min(max(x, limits.axes[i].lower), limits.axes[i].upper)) for i, x in enumerate(place))
    return State(Command(inside, tuple(map(to32, turn))), (0.0,) * 6, (0.0,) * 6)


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

    An axis that cannot be where it is wanted approaches it so that it can stop there, and passes again once it has caught up;
    the others are sent as wanted. Of q and -q, the same orientation, the one nearer to the last command is sent. Raises
    nothing, whatever values are wanted and measured.
    """
    faults, gaps, pressing = _measured(limits, readings)
    state = replace(state, pressed=state.pressed + 1 if pressing else 0)
    if state.pressed >= limits.press:
        faults += pressing
    latch = state.latch or "; ".join(faults)
    if latch:
        return _slowed(limits, replace(state, latch=latch)), Verdict(Level.LATCH, (latch,))
    pos, quat, problems = _pose(wanted)
    if gaps or problems:
        return _slowed(limits, state), Verdict(Level.HOLD, gaps + problems)
    moves = [_axis(limits, i, state, state.command.pos[i], pos[i]) for i in range(3)]
    turn, whys = _rotation(limits, state, quat)
    whys = tuple(why for _, why in moves) + whys
    sent = _sent(limits, state, Command(tuple(to for to, _ in moves), turn), tuple(map(bool, whys)))
    return sent, Verdict(Level.CLAMP if any(whys) else Level.PASS, tuple(filter(None, whys)))


def _sent(limits: Limits, state: State, command: Command, behind: tuple[bool, ...]) -> State:
    """The state after `command` was sent."""
    moved = [*map(minus, command.pos, state.command.pos), *_increment(command.quat, state.command.quat)]
    velocity = tuple([move / limits.dt for move in moved])
    acceleration = tuple([change / limits.dt for change in map(minus, velocity, state.velocity)])
    return State(command, velocity, acceleration, state.latch, behind, state.pressed)


def _slowed(limits: Limits, state: State) -> State:
    """The next state of the braking manoeuvre."""
    old = state.command
    move = [limits.dt * brake(limits.inner[i], state.velocity[i], state.acceleration[i], limits.dt) for i in range(6)]
    pos = tuple([to32(old.pos[i] + move[i]) for i in range(3)])
    return _sent(limits, state, Command(pos, _turned(old.quat, move[3:])), (True,) * 6)


def _axis(limits: Limits, i: int, state: State, x: float, wanted: float) -> tuple[float, str]:
    """Where axis i, now at `x`, is sent: to `wanted` if it may, else on the way to a stop there; and why not, or ''.

    An axis that is behind stops at what is wanted before it passes again: it might cross it at speed, for ever to and fro.
    """
    axis, inner, v, a = limits.alone[i], limits.inner[i], state.velocity[i], state.acceleration[i]
    goal = to32(min(max(wanted, axis.lower), axis.upper))
    end = stop(axis, inner, x, v, a, goal, limits.dt)
    if (end == goal or not (state.behind[i] or math.isnan(end))) and not _beyond(limits, i, wanted):
        return goal, ""
    to = goal if end == goal else _aim(axis, inner, x, v, a, goal, limits.dt)
    return to, _why(limits, i, x, v, a, wanted)


def _aim(axis: Axis, inner: Axis, x: float, v: float, a: float, goal: float, dt: float) -> float:
    """Where to send an axis so that braking from then on ends as near to `goal` as it can on this side of it.

    The braking manoeuvre's own next velocity may always be sent; bisection between it and the farthest one towards the goal.
    (Towards the goal as far as one tick allows: that would swing about it for ever where acceleration is small.)
    """
    good = brake(inner, v, a, dt)
    side = math.copysign(1.0, goal - stop(FREE, inner, x, v, a, to32(x + dt * good), dt))
    farthest = min(side * v + dt * min(side * a + inner.swing, inner.acceleration), inner.velocity)
    trial = bad = side * max(farthest, side * good)
    for _ in range(HALVINGS):
        if side * (goal - stop(axis, inner, x, v, a, to32(x + dt * trial), dt)) >= 0.0:
            good = trial
        else:
            bad = trial
        if good == bad:
            break
        trial = (good + bad) / 2.0
    return to32(x + dt * good)


def _beyond(limits: Limits, i: int, x: float) -> str:
    """Which bound of axis i `x` is beyond, or ''."""
    limit = min(max(x, limits.lower[i]), limits.upper[i])
    return "" if x == limit else f"{AXES[i]}: position {x:.6g} {UNITS[i]}, limit {limit:g}"


def _why(limits: Limits, i: int, x: float, v: float, a: float, wanted: float) -> str:
    """What of `wanted` may not be sent on axis i, with the figures."""
    v1 = (wanted - x) / limits.dt
    a1 = (v1 - v) / limits.dt
    rates = (
        ("velocity", v1, limits.velocity[i], "/s"),
        ("acceleration", a1, limits.acceleration[i], "/s^2"),
        ("jerk", (a1 - a) / limits.dt, limits.jerk[i], "/s^3"),
    )
    reasons = [f"{name} {rate:.6g} {UNITS[i]}{per}, limit {limit:g}" for name, rate, limit, per in rates if abs(rate) > limit]
    return _beyond(limits, i, wanted) or f"{AXES[i]}: {[*reasons, f'no room to stop after {v1:.6g} {UNITS[i]}/s'][0]}"


def _rotation(limits: Limits, state: State, wanted: Vector) -> tuple[Vector, tuple[str, ...]]:
    """The quaternion to send, and for each axis why it is not sent as wanted, or ''."""
    old = state.command.quat
    if sum(map(mul, wanted, old)) < 0.0:
        wanted = tuple(-q for q in wanted)
    rounded, behind = tuple(map(to32, wanted)), any(state.behind[3:])
    if not behind and _turn_stops(limits, state, rounded):
        return rounded, ("", "", "")
    moves = [_axis(limits, 3 + i, state, 0.0, r) for i, r in enumerate(_increment(wanted, old))]
    whys = tuple(why for _, why in moves)
    turn = rounded if behind and not any(whys) else _turned(old, [to for to, _ in moves])
    if _turn_stops(limits, state, turn):
        return turn, whys
    # each axis alone could stop with half a margin left; rounded together, they cannot
    turn = _slowed(limits, state).command.quat
    return turn, tuple(why or f"{AXES[3 + i]}: no room to stop as rounded to float32" for i, why in enumerate(whys))


def _turn_stops(limits: Limits, state: State, to: Vector) -> bool:
    """Whether `to` may be sent: braking from then on, the axes of rotation together, ends in time and breaks no limit."""
    dt, axes, inner, quat = limits.dt, limits.axes[3:], limits.inner[3:], state.command.quat
    velocity, acceleration = state.velocity[3:], state.acceleration[3:]
    for _ in range(TICKS):
        new = tuple([r / dt for r in _increment(to, quat)])
        change = tuple([difference / dt for difference in map(minus, new, velocity)])
        for i, (_, _, most_w, most_a, swing) in enumerate(axes):
            if abs(new[i]) > most_w or abs(change[i]) > most_a or abs(change[i] - acceleration[i]) > swing:
                return False
        if not any(new) and all(abs(change[i]) <= inner[i].swing for i in range(3)):  # as in `stop`
            return True
        quat, velocity, acceleration = to, new, change
        to = _turned(quat, [dt * brake(inner[i], new[i], change[i], dt) for i in range(3)])
    return False


def _turned(quat: Vector, turn: Sequence[float]) -> Vector:
    """`quat` turned by the rotation vector `turn` of the base frame, normalised, rounded to float32; itself if `turn` is 0."""
    angle = math.hypot(*turn)
    if angle == 0.0:
        return quat
    s = math.sin(0.5 * angle) / angle
    new = _product((math.cos(0.5 * angle), s * turn[0], s * turn[1], s * turn[2]), quat)
    length = math.hypot(*new)
    return tuple([to32(q / length) for q in new])


def _increment(new: Vector, old: Vector) -> Vector:
    """The rotation vector of new old^-1, quaternions of one hemisphere, of any length; exactly 0 if they are equal."""
    cosine, x, y, z = _product(new, (old[0], -old[1], -old[2], -old[3]))
    sine = math.hypot(x, y, z)
    if sine == 0.0:
        return 0.0, 0.0, 0.0
    factor = 2.0 * math.atan2(sine, cosine) / sine
    return x * factor, y * factor, z * factor


def _product(p: Vector, q: Vector) -> Vector:
    """The quaternion p q."""
    pw, px, py, pz = p
    qw, qx, qy, qz = q
    return (
        pw * qw - px * qx - py * qy - pz * qz,
        pw * qx + px * qw + (py * qz - pz * qy),
        pw * qy + py * qw + (pz * qx - px * qz),
        pw * qz + pz * qw + (px * qy - py * qx),
    )


def _measured(limits: Limits, readings: Mapping[str, ArrayLike]) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Which joints were measured beyond their limits; what is missing or not finite; how the wrench is beyond its limits."""
    values: dict[str, Vector] = {}
    faults: list[str] = []
    gaps: tuple[str, ...] = ()
    pressing: tuple[str, ...] = ()
    for field, names in limits.fields:
        values[field], problems = _numbers(field, names, readings[field]) if field in readings else ((), (f"{field}: missing",))
        gaps += problems
    for i, q in enumerate(values["joint_pos"]):
        name, lower, upper, _ = limits.joints[i]
        if q < lower or q > upper:
            faults.append(f"{name}: position {q:.6g} rad, limit {min(max(q, lower), upper):g}")
    for i, v in enumerate(values["joint_vel"]):
        name, _, _, limit = limits.joints[i]
        if abs(v) > limit:
            faults.append(f"{name}: velocity {v:.6g} rad/s, limit {limit:g}")
    for field, limit, unit in (("force", limits.force, "N"), ("torque", limits.torque, "N m")):
        size = math.hypot(*values[field])
        if size > limit:
            pressing += (f"{field}: {size:.6g} {unit}, limit {limit:g}",)
    return tuple(faults), gaps, pressing


def _pose(wanted: Any) -> tuple[Vector, Vector, tuple[str, ...]]:
    """Position, unit quaternion and what is wrong with them."""
    if wanted is None:
        return (), (), ("no command",)
    try:
        place, turn = wanted
    except Exception as error:  # a foreign object: whatever it raises, there must be an answer
        return (), (), (f"command: {type(error).__name__}, expected a pair of position and quaternion",)
    pos, problems = _numbers("command position", AXES[:3], place)
    quat, more = _numbers("command quaternion", ("w", "x", "y", "z"), turn)
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
    if array.shape != (len(names),) or array.dtype.kind not in ("f", "i", "u"):
        return (), (f"{field}: shape {array.shape} of {array.dtype}, expected {len(names)} numbers",)
    values = tuple(map(float, array.tolist()))
    if all(map(math.isfinite, values)):
        return values, ()
    bad = tuple(f"{field}: {names[i]} is {v}" for i, v in enumerate(values) if not math.isfinite(v))
    return tuple(v if math.isfinite(v) else math.nan for v in values), bad
