"""`embodied deploy run` with a policy that goes wrong: `python -m <this module> <fault> <tick> key=value ...`.

The policy's own process is the real one, and so is everything else; what it answers is altered on its way to the runner, from
the question of that number on. The moment of the first is printed (`injected <monotonic ns>`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.arguments import read
from embodied.commands.deploy.run import RunOptions, drive
from embodied.deploy.brain import Brain
from embodied.deploy.faults.cell import TURN_TICKS
from embodied.spec.errors import BadInput, Fault, nearest

LATE_S = 0.03  # beyond a policy's half of a tick of 40 ms, not beyond the tick: its answer is there when the next is asked for
EXTREME = 10.0
FAULTS = ("none", "nan", "inf", "shape", "silent", "slow", "slow_once", "extremes", "turn")


class FaultyBrain(Brain):
    """A policy whose answers go wrong in the way `fault` from question `tick` on."""

    def __init__(self, policy: Path, priority: int, fault: str, tick: int) -> None:
        super().__init__(policy, priority)
        self._fault, self._tick, self._rng = fault, tick, np.random.default_rng(0)
        self._count = 0

    @property
    def _wrong(self) -> bool:
        return self._count == self._tick if self._fault == "slow_once" else self._count >= self._tick

    def ask(self, obs: NDArray[np.float32]) -> None:
        """Ask, unless the policy is to be silent; a slow one cannot begin before `LATE_S`."""
        self._count += 1
        if self._count == self._tick:
            print(f"injected {time.monotonic_ns()}", flush=True)
        if self._wrong and self._fault == "silent":
            return
        if self._wrong and self._fault.startswith("slow"):
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(LATE_S, self._go_on).start()
        super().ask(obs)

    def _go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # the run is over
            os.kill(self.pid, signal.SIGCONT)

    def answer(self, deadline: float) -> tuple[Any, int] | None:
        """The policy's answer, altered."""
        answer = super().answer(deadline)
        if answer is None or not self._wrong:
            return answer
        return self._altered(answer[0]), answer[1]

    def _altered(self, action: Any) -> Any:
        if self._fault in ("nan", "inf"):
            action = action.copy()
            action[0, self._count % action.shape[1]] = float(self._fault)
        elif self._fault == "shape":
            action = action[:, :-1]
        elif self._fault == "turn":
            # to and fro, as fast as it may
            action = np.zeros(action.shape, np.float32)
            action[0, 3] = 1.0 if (self._count - self._tick) // TURN_TICKS % 2 == 0 else -1.0
        elif self._fault == "extremes":
            # half a second of one side and the other in turn, half a second of any
            alternating = (self._count // 12) % 2 == 0
            signs = np.full(action.shape, 1 - 2 * (self._count % 2)) if alternating else self._rng.choice([-1, 1], action.shape)
            action = np.float32(EXTREME * signs)
        return action


def main(argv: list[str]) -> int:
    """Run, and say what went wrong as the command line does."""
    try:
        fault, tick, *words = argv
        if fault not in FAULTS:
            raise BadInput(f"unknown fault '{fault}': {nearest(fault, FAULTS)}")
        options = read("deploy run", RunOptions, words)
        return drive(options, lambda policy, priority: FaultyBrain(policy, priority, fault, int(tick)))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Fault as error:
        print(f"fault: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
