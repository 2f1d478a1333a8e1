"""What happened at the robot, recomputed from its own log: nothing of the guard or the runner is used here.

A robot process logs (clock: its machine's monotonic one) every command that it heard and what it refused of it, every change
of its status, and its measured motion. Limits are checked of what it accepted, as finite differences over the runner's ticks: a
command's sequence number is its tick. Where commands were lost the ticks are not evenly spaced. A divided difference over some
points of an even grid is a mean, with positive weights, of those over neighbouring points (de Boor, A Practical Guide to
Splines, chapter I), so that limits of the whole grid hold for it as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.deploy.journal import read
from embodied.spec.robot import ArmSpec

REST_M_S = 0.01  # the tool is at rest below
TOLERANCE = 1e-5  # of velocity, acceleration, jerk: what rounding to float32 may add
GAP_TURN = 0.01  # of rotations over a gap: turns about different axes do not add up exactly
RATES = ("velocity", "acceleration", "jerk")
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Command:
    """A command that the robot heard: `refused` says why it did not follow it, or ''."""

    time_ns: int
    session: int
    epoch: int
    sequence: int
    pos: Values
    quat: Values
    refused: str


@dataclass(frozen=True)
class Status:
    """A change of the robot's status."""

    time_ns: int
    status: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Log:
    """A robot's log. Motion, row by row: time [ns], the target that it kept ([3] m, quaternion), its tool's speed [m/s]."""

    commands: list[Command]
    statuses: list[Status]
    motion_ns: NDArray[np.int64]
    target_pos: Values
    target_quat: Values
    speed: Values


@dataclass(frozen=True)
class Motion:
    """What the robot did after a moment [s after it]; None: it did not.

    Attributes:
        held: the first accepted command of a newer epoch: the runner has changed its mode.
        moved: the last accepted command that changed its target.
        rested: from when on its tool was slower than `REST_M_S`, to the end.
        stopped: its first change to STOPPED or ESTOP.
    """

    held: float | None
    moved: float | None
    rested: float | None
    stopped: float | None


def load(path: Path) -> Log:
    """A robot's log; one whose process was killed may end in half a record."""
    commands, statuses, times = [], [], []
    rows: dict[str, list[Any]] = {"target_pos": [], "target_quat": [], "tcp_linvel": []}
    for record in read(path, strict=False):
        data = record.data
        if record.kind == "command":
            pose = np.asarray(data["pos"], float), np.asarray(data["quat"], float)
            session, epoch, sequence = data["session"], data["epoch"], data["sequence"]
            commands.append(Command(record.time_ns, session, epoch, sequence, *pose, data["refused"]))
        elif record.kind == "status":
            statuses.append(Status(record.time_ns, data["status"], data["reason"], data["detail"]))
        elif record.kind == "motion":
            times.append(record.time_ns)
            for name, values in rows.items():
                values.append(data[name])
    pos, quat, velocity = (np.array(rows[name], float).reshape(len(times), -1) for name in rows)
    return Log(commands, statuses, np.array(times, np.int64), pos, quat, np.sqrt((velocity**2).sum(1)))


def after(log: Log, moment_ns: int, until_ns: int | None = None) -> Motion:
    """What the robot did from `moment_ns` on (to `until_ns`)."""
    until = until_ns if until_ns is not None else 2**62
    accepted = [command for command in log.commands if not command.refused and command.time_ns < until]
    held = moved = None
    for before, command in itertools.pairwise(accepted):
        if command.time_ns > moment_ns:
            same = np.array_equal(before.pos, command.pos) and np.array_equal(before.quat, command.quat)
            moved = moved if same else _since(moment_ns, command.time_ns)
            if held is None and command.epoch > before.epoch:
                held = _since(moment_ns, command.time_ns)
    stops = [status for status in log.statuses if moment_ns < status.time_ns < until and status.status in ("STOPPED", "ESTOP")]
    inside = (log.motion_ns >= moment_ns) & (log.motion_ns < until)
    fast = np.flatnonzero(inside & ~(log.speed < REST_M_S))
    following = np.flatnonzero(log.motion_ns[inside] > log.motion_ns[fast[-1]]) if len(fast) else [0]
    rested = _since(moment_ns, int(log.motion_ns[inside][following[0]])) if inside.any() and len(following) else None
    return Motion(held, moved, rested, _since(moment_ns, stops[0].time_ns) if stops else None)


def stall(log: Log, moment_ns: int, seconds: float) -> float:
    """How much longer than usual the robot's process itself stood still, within `seconds` after the moment [s].

    It records its motion at every other step. A machine that gives it no time is no fault of the runner's.
    """
    gaps = np.diff(log.motion_ns)
    near = (log.motion_ns[1:] > moment_ns) & (log.motion_ns[:-1] < moment_ns + int(1e9 * seconds))
    return float(gaps[near].max() - np.median(gaps)) / 1e9 if near.any() else 0.0


def violations(log: Log, robot: ArmSpec) -> list[str]:
    """Every way in which accepted commands were not finite or broke the robot's limits, a line each; a run starts from rest."""
    return [line for run in runs(log) for line in _broken(run, robot)]


@dataclass(frozen=True)
class Run:
    """Commands that the robot accepted without a stop in between, and the pose that it kept before."""

    kept_pos: Values
    kept_quat: Values
    commands: list[Command]


def runs(log: Log) -> Iterator[Run]:
    """The accepted commands of each session, cut where the robot's status became anything but FOLLOWING."""
    events: list[Command | Status] = [status for status in log.statuses if status.status != "FOLLOWING"]
    events += [command for command in log.commands if not command.refused]
    events.sort(key=lambda event: (event.time_ns, isinstance(event, Status)))
    current: list[Command] = []
    for event in events:
        if current and (isinstance(event, Status) or event.session != current[0].session):
            yield _run(log, current)
            current = []
        if isinstance(event, Command):
            current.append(event)
    if current:
        yield _run(log, current)


def _run(log: Log, commands: list[Command]) -> Run:
    """The target in the last record of motion before the first command is what the robot kept."""
    at = int(np.searchsorted(log.motion_ns, commands[0].time_ns)) - 1
    if at < 0:
        return Run(commands[0].pos, commands[0].quat, commands)
    return Run(log.target_pos[at], log.target_quat[at], commands)


def _broken(run: Run, robot: ArmSpec) -> Iterator[str]:
    first = run.commands[0].sequence
    ticks = np.array([first - 3, first - 2, first - 1, *(command.sequence for command in run.commands)], float)
    pos = np.array([run.kept_pos] * 3 + [command.pos for command in run.commands])
    quats = np.array([run.kept_quat] * 3 + [command.quat for command in run.commands])
    if not (np.isfinite(pos).all() and np.isfinite(quats).all()):
        bad = next(c for c in run.commands if not (np.isfinite(c.pos).all() and np.isfinite(c.quat).all()))
        yield f"command {bad.sequence} is not finite: {bad.pos}, {bad.quat}"
        return
    if not (np.diff(ticks) > 0).all():
        at = int(np.flatnonzero(np.diff(ticks) <= 0)[0])
        yield f"command {ticks[at + 1]:.0f} was followed after command {ticks[at]:.0f}"
        return
    for name, values, (low, high) in zip("xyz", pos[3:].T, robot.workspace, strict=True):
        for value in sorted({float(values.min()), float(values.max())}):
            if not low - 1e-6 <= value <= high + 1e-6:
                yield f"{name} {value:.6f} m, workspace {low} to {high}"
    turned = np.concatenate([np.zeros((1, 3)), np.cumsum(turns(quats), 0)])
    gaps = bool((np.diff(ticks) > 1).any())
    for kind, values, unit, rounding in (("moves", pos, "m", 0.0), ("turns", turned, "rad", GAP_TURN if gaps else 0.0)):
        limits = [getattr(robot.motion, rate)[kind == "turns"] for rate in RATES]
        for order, (rate, limit) in enumerate(zip(RATES, limits, strict=True), 1):
            for axis, most in zip("xyz", np.abs(derivative(values, ticks * robot.control_dt, order)).max(0), strict=True):
                if not most <= limit * (1.0 + TOLERANCE + rounding):
                    yield f"{rate} of {kind} in {axis}: {most:.6g} {unit}/s^{order}, limit {limit:g}"


def derivative(values: Values, times: Values, order: int) -> Values:
    """`order` times differentiated: order! times the divided differences of values [n, k] at times [n]; [n - order, k]."""
    factor, table = 1.0, values
    for step in range(1, order + 1):
        factor *= step
        table = np.diff(table, axis=0) / (times[step:] - times[:-step])[:, None]
    return factor * table


def turns(quats: Values) -> Values:
    """The rotation vector in the base frame from each orientation [n, 4] (wxyz) to the next, [n - 1, 3], at most pi long."""
    w, x, y, z = (quats / np.sqrt((quats**2).sum(1))[:, None]).T
    # the matrix of a quaternion; from one to the next: R1 R0^T, whose antisymmetric part holds the axis
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    matrices = np.moveaxis(np.array(rows), -1, 0)
    step = matrices[1:] @ np.swapaxes(matrices[:-1], 1, 2)
    axis = np.stack([step[:, 2, 1] - step[:, 1, 2], step[:, 0, 2] - step[:, 2, 0], step[:, 1, 0] - step[:, 0, 1]], -1) / 2
    sine = np.sqrt((axis**2).sum(1))
    angle = np.arctan2(sine, (np.trace(step, axis1=1, axis2=2) - 1) / 2)
    return axis * np.where(sine > 1e-12, angle / np.maximum(sine, 1e-12), 1.0)[:, None]


def fastest(log: Log, window_s: float) -> float:
    """The largest mean speed of the kept target, along any axis, over any `window_s` by the robot's own clock [m/s]."""
    changes = [0.0]
    for run in runs(log):
        times = [command.time_ns for command in run.commands]
        pos = np.array([run.kept_pos, *(command.pos for command in run.commands)])
        for last, at in enumerate(times):
            first = _first_within(times, at - int(1e9 * window_s), last)
            changes.append(float(np.abs(pos[last + 1] - pos[first]).max()))
    return max(changes) / window_s


def _first_within(times: Sequence[int], since: int, last: int) -> int:
    """Index into the poses [kept, command 0, ...] of what was kept at `since`."""
    first = last
    while first >= 0 and times[first] > since:
        first -= 1
    return first + 1


def _since(moment_ns: int, time_ns: int) -> float:
    return (time_ns - moment_ns) / 1e9
