"""Ticks at absolute times, and what they cost."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np


class Pace:
    """Deadlines `period` seconds apart, on the monotonic clock. A tick that was missed is counted, never made up for."""

    def __init__(self, period: float) -> None:
        self.period = period
        self.missed = 0
        self.start()

    def start(self) -> None:
        """The next deadline is one period from now."""
        self.due = time.monotonic() + self.period

    def next(self) -> float:
        """How late the present tick began [s]; the deadline moves to the next tick that can still be met."""
        late = time.monotonic() - self.due
        skipped = max(0, int(late / self.period))
        self.missed += skipped
        self.due += (1 + skipped) * self.period
        return late


class Timing:
    """Durations by name [us], summarised at the end."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, **durations: float) -> None:
        """One value each."""
        for name, value in durations.items():
            self._values.setdefault(name, []).append(value)

    def summary(self) -> dict[str, dict[str, float]]:
        """p50, p99, p99.9 and max of each [us]."""
        out = {}
        for name, values in self._values.items():
            p50, p99, p999 = np.percentile(values, [50, 99, 99.9])
            out[name] = {
                "p50": round(float(p50), 1),
                "p99": round(float(p99), 1),
                "p99.9": round(float(p999), 1),
                "max": round(float(max(values)), 1),
                "count": len(values),
            }
        return out


def realtime(priority: int) -> str:
    """Ask for SCHED_FIFO; returns how this process is scheduled then. Children start as ordinary processes."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except (PermissionError, OSError, AttributeError) as error:  # an ordinary user, a container, macOS
        return f"ordinary ({type(error).__name__}: real-time priority was refused; ulimit -r or CAP_SYS_NICE gives it)"
    return f"SCHED_FIFO {priority}"


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """The garbage collector off: it would stop a tick for milliseconds. What is alive now is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def machine_load() -> dict[str, Any]:
    """Cores and load average, to read timing figures by."""
    return {"cores": os.cpu_count(), "load": [round(x, 2) for x in os.getloadavg()]}
