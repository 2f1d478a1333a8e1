"""The processes of one experiment with faults: a robot, a line that can be made bad, runners."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil

from embodied.deploy.faults.proxy import CLEAN, Line, Proxy
from embodied.deploy.link import Link
from embodied.deploy.wire import State, Status
from embodied.spec.errors import Fault
from embodied.spec.policy import PolicySpec

START_S = 60.0  # an interpreter with torch starts in seconds, on a cold disk in many
PHASE_S = 20.0
END_S = 40.0
SETTLE_S = 0.3  # the impedance's: from the target's last move until the tool is at rest
TURN_TICKS = 10  # of a policy that only turns, to and fro
TICK = 12  # the policy's question from which on a fault of the policy answers
MOVING_M_S, CONTACT_N = 0.02, 2.0
BRAIN, RECORDER = "embodied.deploy.brain", "embodied.deploy.recorder"
CHILD = "embodied.commands.deploy.faults_child"

PHASES: dict[str, Callable[[State], bool]] = {
    "idle": lambda state: state.status == Status.HOLDING,
    "moving": lambda state: _following(state) and float(np.linalg.norm(state.readings["tcp_linvel"])) > MOVING_M_S,
    "in contact": lambda state: _following(state) and float(np.linalg.norm(state.readings["force"])) > CONTACT_N,
}


# robots are forked off a process that has torch already, which takes seconds; in all else they are `embodied deploy sim`
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["embodied.commands.deploy.sim"])


class NotRun(Exception):
    """A row that could not be tried here; the message says what is missing. It does not count as passed."""


@dataclass
class Run:
    """A runner's process."""

    process: subprocess.Popen[bytes]
    out: Path
    text: Path
    episodes: int

    @property
    def lines(self) -> list[str]:
        """What it has printed, its errors among it."""
        return self.text.read_text(encoding="utf-8", errors="replace").splitlines()

    @property
    def last(self) -> str:
        """The line that says why it ended, empty if it just ended."""
        return next((line for line in reversed(self.lines) if line.startswith(("fault: ", "error: "))), "")

    @property
    def summary(self) -> dict[str, Any]:
        """Its summary.json, empty if it came to none."""
        file = self.out / "summary.json"
        return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}

    @property
    def injected_ns(self) -> int | None:
        """When its policy began to go wrong, as it has printed; None if it has not."""
        return next((int(line.split()[1]) for line in self.lines if line.startswith("injected ")), None)

    def child(self, module: str) -> int:
        """The process id of its policy or recorder."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            for child in psutil.Process(self.process.pid).children(recursive=True):
                if module in child.cmdline():
                    return child.pid
        raise Fault(f"the runner has no child process {module}: {self.last or 'it is still starting'}")


@dataclass
class Cell:
    """The processes of a row, in a folder of their own; a context manager that ends them all.

    Attributes:
        folder: for logs.
        policy: an exported file.
        spec: what it was made for.
        seed: of scenes, of the line, and of the moment.
        armed: False: everything as ever, but nothing is injected: a promise to stop must then not be found kept.
        fault_ns: when something broke.
        checks: findings of the row's own, as they fail.
    """

    folder: Path
    policy: Path
    spec: PolicySpec
    seed: int = 0
    armed: bool = True
    fault_ns: int | None = None
    struck_s: float = 0.0
    checks: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    robot: BaseProcess | None = None
    runs: list[Run] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def __enter__(self) -> Cell:
        self.folder.mkdir(parents=True)
        self.rng = np.random.default_rng(self.seed)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.proxy = Proxy(("127.0.0.1", self.port), self.seed)
        self.proxy.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for run in self.runs:
            _end(run.process)
        if self.robot is not None and self.robot.pid is not None and self.robot.is_alive():
            os.kill(self.robot.pid, signal.SIGCONT)
            os.kill(self.robot.pid, signal.SIGINT)
            self.robot.join(10.0)
            self.robot.kill()
            self.robot.join()
        self.proxy.__exit__()

    # -- processes ---------------------------------------------------------------------------------------------------

    def start_robot(self) -> None:
        """A simulated robot on the cell's port; its log is the next of `logs`."""
        said = self.folder / f"robot{len(self.logs)}.txt"
        self.logs.append(said.with_suffix(".emb"))
        words = ["deploy", "sim", f"task={self.spec.task}", f"port={self.port}", f"log={self.logs[-1]}"]
        said.touch()
        self.robot = _FORKS.Process(target=_command_line, args=(words, self._environment(), said))
        self.robot.start()
        deadline = time.monotonic() + START_S
        while "listening" not in said.read_text(encoding="utf-8"):
            if not self.robot.is_alive() or time.monotonic() > deadline:
                raise Fault(f"the simulated robot did not start: {said.read_text(encoding='utf-8').strip()[-300:]}")
            time.sleep(0.02)

    def signal_robot(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        assert self.robot is not None and self.robot.pid is not None
        os.kill(self.robot.pid, number)

    def start_runner(self, brain: str = "", episodes: int = 1, policy: Path | None = None, direct: bool = False) -> Run:
        """`embodied deploy run` through the line (or past it); with a fault of the policy if `brain` names one."""
        number = len(self.runs)
        out, port = self.folder / f"run{number}", self.port if direct else self.proxy.port
        words = [f"policy={policy or self.policy}", f"robot=127.0.0.1:{port}", f"episodes={episodes}", f"seed={self.seed}"]
        module = [CHILD, brain if self.armed else "none", str(TICK)] if brain else ["embodied.cli", "deploy", "run"]
        text = self.folder / f"run{number}.txt"
        with text.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *module, *words, f"out={out}"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment()},
            )
        self.runs.append(Run(process, out, text, episodes))
        return self.runs[-1]

    def _environment(self) -> dict[str, str]:
        return {**self.environment, "EMBODIED_CACHE": str(self.folder / "cache")}

    def start(self, phase: str = "moving", **options: Any) -> Run:
        """Robot and runner, up to the phase."""
        self.start_robot()
        run = self.start_runner(**options)
        self.reach(phase)
        return run

    def reach(self, phase: str) -> None:
        """Wait for the phase, and a little longer, so that the moment is another for another seed."""
        run, deadline = self.runs[-1], time.monotonic() + PHASE_S
        while not self.proxy.await_state(PHASES[phase], 0.2):
            code = run.process.poll()
            if code is None and time.monotonic() < deadline:
                continue
            if code == 0:
                raise NotRun(f"the robot was never {phase}: this policy does not bring it there")
            raise Fault(f"the robot was never {phase}: {run.last or f'the runner has said nothing in {PHASE_S:g} s'}")
        if phase == "moving":
            time.sleep(float(self.rng.uniform(0.0, 0.3)))

    # -- what breaks -------------------------------------------------------------------------------------------------

    def strike(self, act: Callable[[], object]) -> None:
        """Break something, now."""
        self.fault_ns = time.monotonic_ns()
        if self.armed:
            act()
        self.struck_s = (time.monotonic_ns() - self.fault_ns) / 1e9

    def mend(self, act: Callable[[], object]) -> None:
        """Undo it."""
        if self.armed:
            act()

    def line(self, up: Line = CLEAN, down: Line = CLEAN) -> None:
        """Make the line bad, now."""
        self.strike(lambda: self.proxy.inject(up, down))

    def expect(self, met: bool, what: str) -> None:
        """A finding of the row's own."""
        if not met:
            self.checks.append(what)

    def finish(self, run: Run | None = None) -> int:
        """Wait until a runner (the latest) has ended by itself; its exit code."""
        run = run or self.runs[-1]
        try:
            code = run.process.wait(END_S)
            time.sleep(SETTLE_S)  # the robot's log must show the end of its motion
            return code
        except subprocess.TimeoutExpired:
            self.checks.append(f"the runner has not ended in {END_S:g} s")
            return -1

    def refused(self) -> dict[str, int]:
        """What the robot has refused so far, by reason; nothing if it does not answer."""
        link = Link(("127.0.0.1", self.port))
        try:
            return dict(link.request("status", timeout_s=0.5)["refused"])
        except Fault:
            return {}
        finally:
            link.close()


def _following(state: State) -> bool:
    return state.status == Status.FOLLOWING


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a runner, with its children, whatever state it is in."""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def _command_line(words: list[str], environment: dict[str, str], said: Path) -> None:
    """The forked process: `embodied <words>`, what it says in a file."""
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if "LD_PRELOAD" in environment:  # takes a program from its very beginning
        os.execve(sys.executable, [sys.executable, "-m", "embodied.cli", *words], {**os.environ, **environment})
    os.environ.update(environment)
    sys.argv = ["embodied", *words]
    runpy.run_module("embodied.cli", run_name="__main__")
