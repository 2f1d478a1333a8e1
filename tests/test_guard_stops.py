"""How the guard stops: as fast as the limits allow, and nothing is sent that could not be stopped in time."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.optimize import linprog
from test_guard import CALM, DOWN, HERE, INF, arm, rest, turned
from test_guard_motion import STILL, check, run

from embodied.deploy.guard import Level, guard, start
from embodied.deploy.limits import AXES, Axis, brake
from embodied.spec.errors import BadInput


def fewest_ticks(most, swing, v, a, dt):
    """In how many ticks linear programming can end velocity and acceleration: |a| <= most, changing by at most swing."""
    for n in itertools.count(max(1, int(abs(v) / (most * dt)))):  # with fewer the acceleration would be too high
        sums = np.tril(np.ones((n, n)))  # the accelerations, of their changes
        bounds = np.concatenate([np.full(n, most - a), np.full(n, most + a)])
        ends = linprog(
            np.zeros(n),
            np.vstack([sums, -sums]),
            bounds,
            [np.ones(n), sums.sum(0)],
            [-a, -v / dt - n * a],
            [(-swing, swing)] * n,
        )
        if ends.status == 0:
            return n
    raise AssertionError


@pytest.mark.parametrize("seed", range(40))
def test_braking_takes_the_fewest_ticks_there_can_be_and_keeps_to_its_limits(seed):
    rng = np.random.default_rng(seed)
    dt, most, swing = 0.02, 1.0, 10 ** rng.uniform(-1.0, 0.5)
    v, a = rng.uniform(-1, 1) * rng.uniform(0.0, 10.0) * dt, rng.uniform(-1, 1)
    least = fewest_ticks(most, swing, v, a, dt)
    for _ in range(least):
        v1 = brake(Axis(-INF, INF, INF, most, swing), v, a, dt)
        a1 = (v1 - v) / dt
        assert abs(a1) <= most + 1e-9 and abs(a1 - a) <= swing + 1e-9
        v, a = v1, a1
    assert v == 0.0
    assert abs(a) < 1e-9


def test_what_is_left_of_a_velocity_by_float64_is_no_motion():
    axis = Axis(-INF, INF, INF, 0.005, 0.05)  # takes 1e-4 m/s away in a tick
    assert brake(axis, 0.0, 0.0, 0.02) == brake(axis, 1e-4 + 0.9e-12, 0.0, 0.02) == brake(axis, 1e-12, 0.05, 0.02) == 0.0
    assert brake(axis, 1e-4 + 1.1e-12, 0.0, 0.02) == pytest.approx(1.1e-12, rel=1e-3)


@pytest.mark.parametrize("axis", range(6))
def test_a_hold_in_full_motion_stops_as_fast_as_the_limits_allow(axis):
    limits = arm(acceleration=(1.0,) * 3 + (4.0,) * 3, jerk=(10.0,) * 3 + (40.0,) * 3)
    sign = np.zeros(6)
    sign[axis] = 1.0
    states, _ = run(
        limits, start(limits, (0.45, -0.05, 0.2), DOWN), ((0.45, -0.05, 0.2) + 0.24 * sign[:3], turned(DOWN, 2 * sign[3:])), 22
    )
    at = states[-1]
    assert at.velocity[axis] == pytest.approx(limits.velocity[axis], rel=2e-3)
    least = fewest_ticks(limits.acceleration[axis], 0.04 * limits.jerk[axis], at.velocity[axis], at.acceleration[axis], 0.04)
    stopped, _ = run(limits, at, None, least + 2)
    check(limits, [s.command for s in states + stopped[1:]])
    assert any(stopped[least - 1].velocity) or any(stopped[least - 1].acceleration)
    assert stopped[-1].velocity == stopped[-1].acceleration == STILL


@pytest.mark.parametrize("axes", [slice(0, 3), slice(3, 6)])
def test_what_would_take_longer_than_32_ticks_to_stop_is_not_sent(axes):
    # from full velocity a stop takes 31 ticks; while it still accelerates, it would take more
    acceleration = tuple(v / (26 * 0.04) for v in arm().velocity)
    limits = arm(acceleration=acceleration, jerk=tuple(a / (4 * 0.04) for a in acceleration))
    state = start(limits, (0.3, -0.3, 0.05), DOWN)
    commands, verdict = [state.command], None
    while verdict is None or verdict.level == Level.PASS:
        a = np.minimum(np.add(state.acceleration, 0.04 * np.array(limits.jerk)), limits.acceleration) * 0.998
        v = np.zeros(6)
        v[axes] = np.add(state.velocity, 0.04 * a)[axes]
        state, verdict = guard(
            limits, state, (state.command.pos + 0.04 * v[:3], turned(state.command.quat, 0.04 * v[3:])), CALM
        )
        commands.append(state.command)
    assert {reason.split(" after")[0] for reason in verdict.reasons} <= {f"{axis}: no room to stop" for axis in AXES[axes]}
    assert (np.divide(state.velocity, limits.velocity)[axes] > 0.8).all() and (v < limits.velocity).all()
    stopped, _ = run(limits, state, None, 33)
    assert stopped[-1].velocity == stopped[-1].acceleration == STILL
    check(limits, commands + [s.command for s in stopped[1:]])


@pytest.mark.parametrize("axis", [2, 3])
def test_limits_are_accepted_where_velocity_can_end_in_32_ticks(axis):
    v = 3.0
    speed = tuple(np.where(np.arange(6) == axis, v, arm().velocity))
    few, many = 1.0, 100.0
    for _ in range(40):
        jerk = (few + many) / 2.0
        try:
            arm(velocity=speed, jerk=tuple(np.where(np.arange(6) == axis, jerk, arm().jerk)))
            many = jerk
        except BadInput:
            few = jerk
    acceleration = 0.999 * arm().acceleration[axis]
    # one more tick ends the acceleration; just at that limit, rounding to float32 may cost a tick or two
    assert 32 <= fewest_ticks(acceleration, 0.04 * 0.999 * many, v, 0.0, 0.04) <= 33


def test_a_target_at_which_full_acceleration_can_just_stop_is_approached_with_it():
    limits = arm(acceleration=(1.0,) * 3 + (4.0,) * 3)
    at = start(limits, HERE, DOWN)
    first, _ = guard(limits, at, ((0.7, 0.0, 0.25), DOWN), CALM)
    second, _ = guard(limits, first, ((0.7, 0.0, 0.25), DOWN), CALM)
    end = rest(limits, second).command.pos
    again, _ = guard(limits, first, (end, DOWN), CALM)
    assert again.command == second.command


@pytest.mark.parametrize("axis", range(6))
def test_reasons_in_motion_give_the_differences_of_what_was_sent(axis):
    limits = arm(acceleration=(2.0,) * 6, jerk=(20.0,) * 6)
    unit = np.eye(6)[axis]
    at = start(limits, HERE, DOWN)
    for move in (3e-4, 1.2e-3):
        at, verdict = guard(limits, at, (at.command.pos + move * unit[:3], turned(at.command.quat, move * unit[3:])), CALM)
        assert verdict.level == Level.PASS
    for speed, name in ((0.125, "acceleration"), (-0.06, "acceleration"), (0.1, "jerk"), (0.0, "jerk")):
        move = 0.04 * speed * unit
        _, verdict = guard(limits, at, (at.command.pos + move[:3], turned(at.command.quat, move[3:])), CALM)
        acceleration = (speed - 0.03) / 0.04
        figure = acceleration if name == "acceleration" else (acceleration - 0.0225 / 0.04) / 0.04
        assert len(verdict.reasons) == 1
        what, value = verdict.reasons[0].split(" ")[2:4]
        assert verdict.reasons[0].startswith(f"{AXES[axis]}: ")
        assert what == name
        assert float(value) == pytest.approx(figure, rel=1e-3)


def test_turns_that_could_stop_alone_but_not_as_rounded_together_are_not_sent():
    # four ticks of the fastest turn about x that passes (found by bisection) lead to where braking only just keeps the
    # limit of velocity; turns about y, which change nothing about x but its rounding, decide then whether it does
    limits = arm(jerk=(4500.0,) * 3 + (40.0,) * 3)
    at = start(limits, HERE, turned(DOWN, (0.3, 0.2, 0.1)))
    commands = [at.command]
    for _ in range(4):
        passes, fails = 0.0, 0.05
        for _ in range(40):
            share = (passes + fails) / 2.0
            _, verdict = guard(limits, at, (HERE, turned(at.command.quat, (share, 0.0, 0.0))), CALM)
            passes, fails = (share, fails) if verdict.level == Level.PASS else (passes, share)
        at, _ = guard(limits, at, (HERE, turned(at.command.quat, (passes, 0.0, 0.0))), CALM)
        commands.append(at.command)
    peak = max(state.velocity[3] for state in run(limits, at, None, 20)[0])
    assert 1.0 - 1e-5 < peak <= 1.0
    braked, _ = guard(limits, at, None, CALM)
    reason = "tcp ry: no room to stop as rounded to float32"
    stuck = 0
    for turn in np.linspace(1e-4, 2e-3, 30):
        states, verdicts = run(limits, at, (HERE, turned(at.command.quat, (0.2, turn, 0.0))), 1)
        check(limits, commands + [s.command for s in states[1:] + run(limits, states[1], None, 20)[0][1:]])
        if reason in verdicts[0].reasons:
            stuck += 1
            assert states[1].command.quat == braked.command.quat
            assert states[1].behind == (False, False, False, True, True, True)
            assert [r.split(":")[0] for r in verdicts[0].reasons] == ["tcp rx", "tcp ry", "tcp rz"]
            assert verdicts[0].reasons[2] == "tcp rz: no room to stop as rounded to float32"
        assert verdicts[0].reasons[0] == "tcp rx: velocity 5 rad/s, limit 1"
    assert 0 < stuck < 30
