"""Faults injected into the real bridge, and what is measured of them at the robot.

A row is one experiment: a robot process, a line that can be made bad (`embodied.deploy.faults.proxy`), a runner; a moment at
which something breaks; a promise. Whether it was kept is decided from the robot's own log, the runner's exit code and its one
line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from embodied.deploy.faults import measure
from embodied.deploy.faults.cell import SETTLE_S, Cell, NotRun
from embodied.deploy.journal import read
from embodied.spec.errors import BadInput, Fault
from embodied.spec.policy import PolicySpec, of_arm

WINDOW_S = 0.1  # over which speed is taken by the robot's clock, as commands may come in bursts
PERIODS, BRAKING = 2, 4  # control periods until a fault is acted on, and that braking may take


@dataclass(frozen=True)
class Promise:
    """What must come of a fault; every row also promises that no accepted command breaks a limit.

    Attributes:
        text: in words.
        codes: exit codes that the runner may have.
        words: what its one line must contain, if it ends with a fault.
        stop_s: the robot's target must not change later than this after the fault, and its tool be at rest soon after.
        watchdog: the robot must have stopped by itself within its watchdog's time and a step.
        still: the target must not change at all after the fault.
        goes_on: the robot must move on after the fault, and every episode be played.
        counted: counters of line, runner and robot that must not be 0: the fault has taken place.
    """

    text: str
    codes: tuple[int, ...]
    words: tuple[str, ...] = ()
    stop_s: float | None = None
    watchdog: bool = False
    still: bool = False
    goes_on: bool = False
    counted: tuple[str, ...] = ()

    @property
    def stops(self) -> bool:
        """Whether motion must end."""
        return self.stop_s is not None or self.watchdog or self.still


@dataclass(frozen=True)
class Row:
    """One experiment. `play` starts what it needs in the cell, strikes, and waits for the end."""

    name: str
    what: str
    phase: str
    promise: Promise
    play: Callable[[Cell], None]


@dataclass(frozen=True)
class Result:
    """What came of a row: `passed`, `failed` or `not run`, why, and what was measured [s, m/s]."""

    name: str
    injected: str
    phase: str
    promised: str
    outcome: str
    why: list[str]
    measured: dict[str, Any]
    wall_s: float = 0.0


# -- one row -------------------------------------------------------------------------------------------------------------


def run_row(row: Row, policy: Path, spec: PolicySpec, folder: Path, seed: int = 0, armed: bool = True) -> Result:
    """Play a row in a new folder and judge it."""
    began = time.monotonic()
    cell = Cell(folder, policy, spec, seed, armed)
    why: list[str] = []
    try:
        with cell:
            row.play(cell)
            counts = {**cell.proxy.counts, **{f"robot {name}": n for name, n in cell.refused().items()}}
        outcome, measured = "", observe(cell, counts)
        why = judge(row.promise, measured, cell.spec.robot.control_dt) + cell.checks
    except NotRun as error:
        outcome, measured, why = "not run", {}, [str(error)]
    except (BadInput, Fault) as error:
        outcome, measured, why = "failed", {}, [str(error)]
    outcome = outcome or ("failed" if why else "passed")
    wall = time.monotonic() - began
    return Result(row.name, row.what, row.phase, row.promise.text, outcome, why, measured, round(wall, 2))


def observe(cell: Cell, counts: dict[str, int]) -> dict[str, Any]:
    """Everything that a promise is judged by."""
    robot, _ = of_arm(cell.spec)
    run = cell.runs[0]
    moment = _moment(cell)
    logs = [measure.load(path) for path in cell.logs]
    violations = [line for one in logs for line in measure.violations(one, robot)]
    fastest = max(measure.fastest(one, WINDOW_S) for one in logs)
    if fastest > robot.motion.velocity[0]:
        violations.append(f"{fastest:.3f} m/s over {WINDOW_S:g} s of the robot's clock, limit {robot.motion.velocity[0]}")
    log, summary = logs[0], run.summary
    if moment is None:
        cell.checks.append("nothing was injected: the runner ended before")
        moment = int(log.motion_ns[-1])
    return {
        **asdict(measure.after(log, moment)),
        "stall": measure.stall(log, moment, 1.0) + cell.struck_s,
        "late": _late_ticks(run.out / "journal.emb", moment),
        "watchdog": cell.proxy.description.get("watchdog_s", 0.1),
        "step": robot.physics_dt,
        "followed": any(status.status == "FOLLOWING" for status in log.statuses),
        "statuses": [f"{s.status} {s.reason}" for s in log.statuses if s.time_ns > moment],
        "violations": violations,
        "fastest_m_s": fastest,
        "code": run.process.returncode,
        "said": run.last,
        "episodes": [summary.get("episodes"), run.episodes],
        "holds": summary.get("holds"),
        "counts": counts | {f"runner {name}": n for name, n in summary.get("dropped", {}).items()},
        **cell.figures,
    }


def judge(promise: Promise, measured: dict[str, Any], dt: float) -> list[str]:
    """What of the promise was not kept, a line each."""
    robot_late = measured["stall"]
    late = robot_late + measured["late"]
    why = [f"limit broken: {line}" for line in measured["violations"]]
    moved, rested, stopped = measured["moved"], measured["rested"], measured["stopped"]
    if measured["code"] not in promise.codes:
        why.append(f"the runner's exit code is {measured['code']}, expected {promise.codes}")
    if measured["code"] in (1, 2):
        why += [
            f"its line does not name '{word}': {measured['said']}" for word in promise.words if word not in measured["said"]
        ]
    if promise.still and moved is not None:
        why.append(f"the target changed {moved:.3f} s after the fault")
    if promise.stop_s is not None:
        why += _late("the target last changed", moved, promise.stop_s + late)
    if promise.watchdog:
        allowed = measured["watchdog"] + measured["step"] + robot_late
        why += ["the robot did not stop by itself"] if stopped is None else _late("the robot stopped", stopped, allowed)
        why += _late("the target last changed", moved, allowed)
    if promise.stops:
        at = max(moved or 0.0, 0.0)
        why += (
            ["the tool did not come to rest"] if rested is None else _late("the tool was at rest", rested, at + SETTLE_S + late)
        )
    if promise.goes_on and (moved is None or moved < PERIODS * dt):
        why.append("the robot did not move on")
    if promise.goes_on and measured["episodes"][0] != measured["episodes"][1]:
        why.append("{} of {} episodes were played".format(*measured["episodes"]))
    counts = measured["counts"]
    return why + [f"nothing was counted as '{name}': {counts}" for name in promise.counted if not counts.get(name)]


def _late(what: str, at: float | None, allowed: float) -> list[str]:
    return (
        [f"{what} {1e3 * at:.0f} ms after the fault, allowed {1e3 * allowed:.0f} ms"] if at is not None and at > allowed else []
    )


def _late_ticks(file: Path, moment_ns: int) -> float:
    """How late the latest of the runner's ticks in the second after the moment began, by its journal [s]."""
    if not file.is_file():
        return 0.0
    near = [r for r in read(file, strict=False) if r.kind == "tick" and 0 <= r.time_ns - moment_ns < 1_000_000_000]
    return max((tick.data["late_us"] / 1e6 for tick in near), default=0.0)


def _moment(cell: Cell) -> int | None:
    """When something broke: what a row did not break itself, a faulty policy has, and has printed it."""
    return cell.runs[0].injected_ns if cell.fault_ns is None else cell.fault_ns
