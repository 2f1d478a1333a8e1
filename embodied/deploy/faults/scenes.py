"""How the longer rows of the table of faults are played: processes that die or stand still, clocks, operators."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx

from embodied.deploy import journal
from embodied.deploy.artifact import KEY
from embodied.deploy.faults import measure
from embodied.deploy.faults.cell import BRAIN, RECORDER, SETTLE_S, TURN_TICKS, Cell, NotRun, Run
from embodied.deploy.faults.proxy import Line
from embodied.deploy.link import Link
from embodied.deploy.runner import COMMIT_S

LIBRARIES = Path("/usr/lib")
# libfaketime 0.9.10 makes of every absolute monotonic sleep an error, and CPython sleeps so
SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds)\n"
LOST_S = 0.17
STOOD_S, AT_ONCE_NS = 0.3, 10_000_000
WATCHED_S = 0.11  # the watchdog's time, a step of the robot, and a record of its log

Play = Callable[[Cell], None]


def kill_runner(phase: str) -> Play:
    """Kill -9 of the runner."""

    def play(cell: Cell) -> None:
        run = cell.start(phase)
        cell.strike(run.process.kill)
        cell.finish()

    return play


def stop_runner(cell: Cell) -> None:
    """SIGSTOP of the runner, and SIGCONT."""
    run = cell.start("moving")
    cell.strike(lambda: run.process.send_signal(signal.SIGSTOP))
    time.sleep(1.0)
    woken = time.monotonic_ns()
    before = measure.after(measure.load(cell.logs[0]), cell.fault_ns or woken, woken)
    cell.mend(lambda: run.process.send_signal(signal.SIGCONT))
    cell.finish()
    cell.expect(before.stopped is not None and before.stopped < WATCHED_S, f"the robot stopped {before.stopped} s after")
    cell.expect(before.moved is None or before.moved < WATCHED_S, f"the target changed {before.moved} s after")


def child(module: str, number: signal.Signals) -> Play:
    """A signal to a child of the runner."""

    def play(cell: Cell) -> None:
        run = cell.start("moving")
        pid = run.child(module)
        cell.strike(lambda: os.kill(pid, number))
        cell.finish()

    return play


def stop_recorder(cell: Cell) -> None:
    """SIGSTOP of the recorder; what was promised to be on the disk at the episode's end is not."""
    run = cell.start("moving")
    pid = run.child(RECORDER)
    cell.strike(lambda: os.kill(pid, signal.SIGSTOP))
    time.sleep(cell.spec.episode_s + COMMIT_S + 1.0)
    with contextlib.suppress(ProcessLookupError):  # nothing was stopped, and all is over
        os.kill(pid, signal.SIGCONT)
    cell.finish()


def disk_full(cell: Cell) -> None:
    """Every write of the recorder fails from now on: what it meets on a full disk, at a moment of our choice."""
    if not hasattr(resource, "prlimit"):
        raise NotRun("a limit cannot be set for another process here: run it on Linux")
    run = cell.start("moving")
    pid, file = run.child(RECORDER), run.out / "journal.emb"
    cell.strike(lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (file.stat().st_size, resource.RLIM_INFINITY)))
    cell.finish()
    cell.expect(bool(journal.episodes(file, strict=False)[0].ticks), "what was recorded before cannot be read")


def kill_robot(cell: Cell) -> None:
    """Kill -9 of the robot; it comes back."""
    cell.start("moving")
    cell.strike(lambda: cell.signal_robot(signal.SIGKILL))
    cell.finish()
    cell.start_robot()
    time.sleep(0.5)
    restarted = measure.load(cell.logs[-1])
    cell.expect(not restarted.commands and not (restarted.speed > measure.REST_M_S).any(), "the restarted robot moved")


def stop_robot(cell: Cell) -> None:
    """SIGSTOP of the robot, and SIGCONT: what it was sent meanwhile is stale."""
    cell.start("moving")
    cell.strike(lambda: cell.signal_robot(signal.SIGSTOP))
    time.sleep(STOOD_S)
    woken = time.monotonic_ns()
    cell.mend(lambda: cell.signal_robot(signal.SIGCONT))
    cell.finish()
    commands = measure.load(cell.logs[0]).commands
    stale = [one for one in commands if not one.refused and woken <= one.time_ns < woken + AT_ONCE_NS]
    cell.expect(len(stale) < 2, f"{len(stale)} commands that had waited for up to {STOOD_S:g} s were followed at once")


def kill_everything(times: int) -> Play:
    """Kill -9 of runner, policy and recorder at random moments of many episodes."""

    def play(cell: Cell) -> None:
        cell.start_robot()
        for _ in range(times):
            _kill_once(cell)

    return play


def _kill_once(cell: Cell) -> None:
    """Start a run of many episodes, kill all of it at a random moment, and look at what it left."""
    run = cell.start_runner(episodes=50)
    cell.reach("moving")
    time.sleep(float(cell.rng.uniform(0.0, 2.5)))
    pids = [run.child(BRAIN), run.child(RECORDER), run.process.pid]
    cell.rng.shuffle(pids)

    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    cell.strike(kill)
    run.process.wait()
    time.sleep(SETTLE_S)
    motion = measure.after(measure.load(cell.logs[0]), cell.fault_ns or 0)
    cell.expect(motion.moved is None or motion.moved < WATCHED_S, f"the target changed {motion.moved} s after the kill")
    file = run.out / "journal.emb"
    said = [line for line in run.lines if line.startswith("episode ")]
    repaired = journal.repair(file)
    whole = [one for one in journal.episodes(file) if one.end is not None and one.end.data["steps"] == len(one.ticks)]
    cell.expect(len(whole) >= len(said), f"{len(said)} episodes were committed, {len(whole)} can be read")
    kept = cell.figures.setdefault("journals", [])
    kept.append({"committed": len(said), "readable": len(whole), "torn_bytes": repaired.torn_bytes})
    _clear(cell)


def _clear(cell: Cell) -> None:
    """The operator's word that the robot may be held by another."""
    link = Link(("127.0.0.1", cell.port))
    link.request("clear")
    link.close()


def clock(seconds: int) -> Play:
    """Set the wall clock that runner and robot read, while they run."""

    def play(cell: Cell) -> None:
        library = next(LIBRARIES.glob("*/faketime/libfaketimeMT.so.1"), None)
        if library is None:
            raise NotRun("libfaketime is missing: apt-get install libfaketime")
        offset = cell.folder / "offset"
        offset.write_text("+0")
        (cell.folder / "sitecustomize.py").write_text(SLEEP)
        cell.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(cell.folder), os.environ.get("PYTHONPATH")])),
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(offset),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        run = cell.start("moving")
        cell.strike(lambda: offset.write_text(f"{seconds:+d}"))
        cell.finish()
        cell.figures["clock moved by"] = moved = _wall_clock(cell) - time.time()
        cell.expect(abs(moved - seconds) < 10, f"the wall clock has moved by {moved:.0f} s, not by {seconds} s")
        cell.expect(run.summary.get("holds") == 0, f"{run.summary.get('holds')} holds")

    return play


def lost_commands(cell: Cell) -> None:
    """The tool turns as fast as a policy may, and back: what is lost then leads far away from the last command that was not."""
    run = cell.start("moving", brain="turn")
    while run.process.poll() is None and run.injected_ns is None:
        time.sleep(0.005)
    turning_back = (run.injected_ns or 0) + int(1e9 * TURN_TICKS * cell.spec.robot.control_dt)
    time.sleep(max(0.0, (turning_back - time.monotonic_ns()) / 1e9 - 0.01))
    cell.line(down=Line(drop=1.0))
    time.sleep(LOST_S)
    cell.mend(cell.proxy.clear)
    cell.finish()


def second_runner(cell: Cell) -> None:
    """Another runner asks for the robot while the first moves it."""
    first = cell.start("moving", episodes=2)
    cell.strike(lambda: cell.start_runner(direct=True))
    if cell.armed:
        cell.expect(cell.finish(cell.runs[1]) == 1, f"the second runner was not refused: {cell.runs[1].last}")
        cell.expect("held by" in cell.runs[1].last, f"the second runner was not told why: {cell.runs[1].last}")
    cell.finish(first)
    sessions = {command.session for command in measure.load(cell.logs[0]).commands}
    cell.expect(len(sessions) == 1, f"{len(sessions)} sessions were obeyed")


def wrong_spec(joint: str) -> Play:
    """A policy that was made for a robot whose joint turns farther."""

    def play(cell: Cell) -> None:
        cell.start_robot()
        other = _for_another_robot(cell, joint)
        cell.strike(lambda: cell.start_runner(policy=other))
        if not cell.armed:
            cell.start_runner()
        cell.finish()

    return play


def _wall_clock(cell: Cell) -> float:
    """What a process with the cell's environment reads from the wall clock."""
    code = "import time; print(time.time())"
    environment = {**os.environ, **cell.environment}
    return float(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)


def _for_another_robot(cell: Cell, joint: str) -> Path:
    """The policy, as if it had been made for a robot whose joint turns farther."""
    model = onnx.load(cell.policy)
    (entry,) = (entry for entry in model.metadata_props if entry.key == KEY)
    metadata = json.loads(entry.value)
    (one,) = (one for one in metadata["spec"]["robot"]["joints"] if one["name"] == joint)
    one["upper"] += 0.1
    entry.value = json.dumps(metadata)
    path = cell.folder / "other.onnx"
    onnx.save(model, path)
    return path


def emergency_stop(cell: Cell) -> None:
    """Stop while it moves; release, reconnect, restart the robot, ask for an episode: nothing moves before it is cleared."""
    cell.start("moving")
    operator = Link(("127.0.0.1", cell.port))
    cell.strike(lambda: operator.request("estop", reason="test"))
    cell.finish()
    _refused(cell.start_runner(), cell, "reconnecting")
    assert cell.robot is not None
    cell.robot.kill()
    cell.robot.join()
    cell.start_robot()
    _refused(cell.start_runner(), cell, "a new episode after a restart")
    restarted = measure.load(cell.logs[-1])
    cell.expect(not restarted.commands, "the restarted robot took a command")
    operator.request("clear")
    operator.close()
    cell.expect(cell.finish(cell.start_runner()) == 0, f"cleared, it was not obeyed: {cell.runs[-1].last}")


def _refused(run: Run, cell: Cell, what: str) -> None:
    cell.expect(cell.finish(run) == 1 and "latched" in run.last, f"{what} was not refused: {run.last}")
