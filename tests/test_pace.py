"""Ticks and modes of the runner."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from embodied.deploy.pace import Pace, Timing
from embodied.deploy.states import Machine, Mode


def test_missed_ticks_are_counted_and_never_made_up_for():
    pace = Pace(0.01)
    time.sleep(max(0.0, pace.due + 0.055 - time.monotonic()))  # at least 5.5 ticks late
    late = pace.next()
    assert late >= 0.055
    assert pace.missed == int(late / 0.01) >= 5
    ahead = pace.due - time.monotonic()
    assert ahead <= 0.01, "the next tick is a whole period away at most"
    assert pace.due - (time.monotonic() - late) > 0


def test_deadlines_do_not_drift():
    pace = Pace(0.005)
    first = pace.due
    for k in range(20):
        time.sleep(max(0.0, pace.due - time.monotonic()))
        pace.next()
        assert pace.due == pytest.approx(first + (k + 1 + pace.missed) * 0.005, abs=1e-9)


def test_timing_gives_the_percentiles_of_numpy():
    timing, values = Timing(), np.random.default_rng(0).exponential(100, 2000)
    for value in values:
        timing.add(late_us=value)
    figures = timing.summary()["late_us"]
    for name, share in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100)):
        assert figures[name] == pytest.approx(np.percentile(values, share), abs=0.06)
    assert figures["count"] == 2000


def machine_at(mode: Mode) -> Machine:
    machine = Machine(lambda *_: None)
    machine.mode = mode
    return machine


# drawn from the states of the design, not from the code
DRAWN = {
    ("disconnected", "preflight"),
    ("preflight", "idle"),
    ("idle", "align"),
    ("align", "auto"),
    ("align", "end"),
    ("auto", "hold"),
    ("auto", "end"),
    ("hold", "auto"),
    ("hold", "end"),
    ("end", "idle"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Mode, Mode)))
def test_transitions(before, after):
    stopping = after in (Mode.FAULT, Mode.ESTOP) and before not in (Mode.FAULT, Mode.ESTOP)
    leaving = after == Mode.DISCONNECTED and before != Mode.DISCONNECTED
    machine = machine_at(before)
    if (before, after) in DRAWN or stopping or leaving:
        machine.to(after)
        assert machine.mode == after
    else:
        with pytest.raises(ValueError, match="cannot follow"):
            machine.to(after)
        assert machine.mode == before


def test_every_transition_raises_the_epoch_and_is_noted():
    noted = []
    machine = Machine(lambda *what: noted.append(what))
    for mode in (Mode.PREFLIGHT, Mode.IDLE, Mode.ALIGN, Mode.AUTO, Mode.HOLD, Mode.AUTO, Mode.END, Mode.IDLE):
        machine.to(mode, "why")
    assert [epoch for *_, epoch in noted] == list(range(2, 10))
    assert noted[3] == (Mode.ALIGN, Mode.AUTO, "why", 5)
