"""The guard in motion: no limit is ever broken, a stop always ends at rest, what can be reached is reached."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.spatial.transform import Rotation
from test_guard import ARM, CALM, DOWN, FREE, HERE, INF, arm, exact, rest, turn_between, turned

from embodied.deploy.guard import Level, Verdict, clear, guard, start
from embodied.deploy.limits import AXES, Limits

STILL = (0.0,) * 6


def finite_differences(dt, commands):
    """Velocity, acceleration, jerk [T, 6] of commands that began at rest, in float64 from what was sent."""
    pos = np.array([c.pos for c in commands])
    quat = np.array([c.quat for c in commands])
    assert (pos == pos.astype(np.float32)).all() and (quat == quat.astype(np.float32)).all()
    turns = Rotation.from_quat(quat[:, [1, 2, 3, 0]])
    moves = np.hstack([np.diff(pos, axis=0), (turns[1:] * turns[:-1].inv()).as_rotvec()])
    velocity = np.vstack([np.zeros((2, 6)), moves / dt])
    acceleration = np.diff(velocity, axis=0) / dt
    return velocity[2:], acceleration[1:], np.diff(acceleration, axis=0) / dt


def check(limits, commands):
    """Recompute from the commands alone that they stay inside the limits.

    The commands are the float32 numbers themselves, so that rounding to float32 needs no tolerance. Float64 does: 1e-9 of the
    limit, and what is left of numbers near 1 in differences of first, second and third order (2, 4, 8 times 2^-52).
    """
    pos = np.array([c.pos for c in commands])
    assert (pos >= limits.lower[:3]).all() and (pos <= limits.upper[:3]).all()
    assert np.abs(np.linalg.norm([c.quat for c in commands], axis=1) - 1.0).max() < 2.0**-22
    for order, rates in enumerate(finite_differences(limits.dt, commands), start=1):
        limit = np.array((limits.velocity, limits.acceleration, limits.jerk)[order - 1])
        assert (np.abs(rates) <= limit * (1.0 + 1e-9) + 2.0 ** (order - 52) / limits.dt**order).all()


def run(limits, state, wanted, ticks, readings=CALM):
    """The states of so many ticks, wanted the same all the time, and the verdicts."""
    states, verdicts = [state], []
    for _ in range(ticks):
        state, verdict = guard(limits, state, wanted, readings)
        states.append(state)
        verdicts.append(verdict)
    return states, verdicts


@pytest.mark.parametrize("change", [("pos", 0, 5e-6), ("pos", 2, 0.3), ("quat", 0, 5e-6), ("quat", 1, 1e-5), ("pos", 1, 1e-12)])
def test_the_check_notices_what_breaks_a_limit(change):
    limits = arm(jerk=(10.0,) * 3 + (40.0,) * 3)
    states, _ = run(limits, start(limits, HERE, DOWN), ((0.7, 0.3, 0.4), turned(DOWN, (1.0, 1.0, 1.0))), 30)
    commands = [s.command for s in states]
    check(limits, commands)
    name, i, by = change
    row = list(getattr(commands[3], name))
    row[i] = row[i] + by if by < 1e-9 else exact([row[i] + by])[0]
    commands[3] = replace(commands[3], **{name: tuple(row)})
    with pytest.raises(AssertionError):
        check(limits, commands)


# -- adversaries -----------------------------------------------------------------------------------------------------

KINDS = ("near", "edge", "edge", "far", "corner", "flip", "stay", "none", "nan", "inf", "shape", "length", "gap", "fault")
RIDES = (0.0, 0.5, 0.9985, 0.9995, 1.0 - 1e-9, 1.0, 1.0 + 1e-9, 2.0)


def attack(rng, limits, state, kind):
    """What a policy that means harm wants in this state, and what is measured."""
    pos, quat, dt, readings = np.array(state.command.pos), state.command.quat, limits.dt, CALM
    reach, swing = np.array(limits.velocity) * dt, np.array(limits.jerk) * dt
    sign = rng.choice([-1.0, 1.0], 6)
    if kind == "near":
        move = rng.normal(size=6) * reach * rng.choice([0.01, 0.3, 1.0])
        pos, quat = pos + move[:3], turned(quat, move[3:])
    elif kind == "edge":  # of velocity, acceleration or jerk, whichever comes first, on each axis
        a = np.clip(state.acceleration + sign * swing * rng.choice(RIDES, 6), *np.outer([-1, 1], limits.acceleration))
        v = np.clip(state.velocity + dt * a, *np.outer([-1, 1], limits.velocity))
        pos, quat = pos + dt * v[:3], turned(quat, dt * v[3:])
    elif kind == "far":
        pos, quat = rng.uniform(-2.0, 2.0, 3), rng.normal(size=4)
        quat = quat / np.linalg.norm(quat)
    elif kind == "corner":
        pos = np.where(sign[:3] > 0, limits.upper[:3], limits.lower[:3]) * rng.choice([1.0, 1.0 + 1e-9, 1.1])
    elif kind == "flip":
        pos, quat = -1e300 * np.sign(state.velocity[:3]), np.roll(quat, 1)
    elif kind in ("none", "nan", "inf", "shape", "length"):
        bad = {"none": None, "nan": (pos * math.nan, quat), "inf": (pos, np.array(quat) * INF), "shape": (quat, pos)}
        return bad.get(kind, (pos, np.array(quat) * 1.1)), readings
    elif kind == "gap":
        readings = {**CALM, "joint_vel": [math.nan, 0.0]}
    elif kind == "fault":
        readings = {**CALM, "joint_pos": [9.0, 0.0]}
    return (pos, quat), readings


@st.composite
def any_limits(draw):
    """Limits where any of velocity, acceleration and jerk binds: a stop takes 1 to 32 ticks."""
    dt = draw(st.sampled_from([0.01, 0.02, 0.04, 0.1]))
    rates = []
    for least in (1.01 * 2.0**-25 / 5e-4, 1.01 * 2.0**-23 / 5e-4):  # what float32 needs of a tick
        jerk = least / dt**3 * draw(st.floats(1.0, 1e4))
        acceleration = max(jerk * dt * draw(st.floats(0.05, 5.0)), least / dt**2)
        velocity = max(acceleration * dt * draw(st.floats(0.2, 12.0)), least / dt)
        rates.append((min(velocity, 0.5 / dt), acceleration, jerk))
    size = draw(st.sampled_from([1e-3, 0.1, 0.9]))
    rows = [(move,) * 3 + (turn,) * 3 for move, turn in zip(*rates, strict=True)]
    lower, upper = (-size, 0.1 - size, 0.0), (size, 0.1, 0.7 * size)
    return Limits(dt, (*lower, -INF, -INF, -INF), (*upper, *FREE), *rows, 40.0, 8.0, ARM["joints"])


@settings(max_examples=80, deadline=None)
@given(any_limits(), st.lists(st.sampled_from(KINDS), min_size=5, max_size=60), st.integers(0, 2**32))
def test_no_sequence_breaks_a_limit(limits, kinds, seed):
    rng = np.random.default_rng(seed)
    state = start(limits, np.add(limits.lower[:3], limits.upper[:3]) / 2.0, turned(DOWN, (0.1, 0.2, 0.3)))
    commands = [state.command]
    for kind in kinds:
        wanted, readings = attack(rng, limits, state, kind)
        old, (state, verdict) = state, guard(limits, state, wanted, readings)
        commands.append(state.command)
        judge(limits, old, state, verdict, wanted, kind)
        if verdict.level == Level.LATCH and rng.random() < 0.5:
            state = clear(state)
    check(limits, commands)
    velocity, acceleration, _ = finite_differences(limits.dt, commands)
    np.testing.assert_allclose(state.velocity, velocity[-1], rtol=1e-9, atol=1e-15 / limits.dt)
    np.testing.assert_allclose(state.acceleration, acceleration[-1], rtol=1e-9, atol=2e-15 / limits.dt**2)
    state = rest(limits, state)
    assert state.velocity == state.acceleration == STILL
    assert rest(limits, state).command == state.command


def judge(limits, old, state, verdict, wanted, kind):
    """What a verdict means for what was sent."""
    assert (verdict.level == Level.PASS) == (not verdict.reasons)
    assert state.latch == (verdict.reasons[0] if verdict.level == Level.LATCH else "")
    if kind == "fault" or old.latch:
        assert verdict.level == Level.LATCH
    elif kind in ("none", "nan", "inf", "shape", "length", "gap"):
        assert verdict.level == Level.HOLD
    else:
        assert verdict.level <= Level.CLAMP
        clamped = {reason.split(":")[0] for reason in verdict.reasons}
        for i, axis in enumerate(AXES[:3]):
            if axis not in clamped:
                low, high = sorted([limits.lower[i], limits.upper[i]])
                assert low <= wanted[0][i] <= high
                assert state.command.pos[i] == pytest.approx(wanted[0][i], rel=2.0**-23)
                assert low <= state.command.pos[i] <= high
        if not clamped & set(AXES[3:]):
            assert np.linalg.norm(turn_between(state.command.quat, wanted[1])) < 2.0**-22


@pytest.mark.parametrize("dt", [0.02, 0.04])
def test_ten_thousand_adversarial_ticks(dt):
    limits = arm(dt=dt) if dt == 0.04 else arm(dt=dt, acceleration=(2.0,) * 3 + (9.0,) * 3, jerk=(30.0,) * 3 + (150.0,) * 3)
    rng = np.random.default_rng(5)
    state = start(limits, HERE, DOWN)
    commands, levels = [state.command], []
    for _ in range(10_000):
        wanted, readings = attack(rng, limits, state, KINDS[rng.integers(len(KINDS) - (rng.random() < 0.9))])
        state, verdict = guard(limits, state, wanted, readings)
        commands.append(state.command)
        levels.append(verdict.level)
        if verdict.level == Level.LATCH and rng.random() < 0.3:
            state = clear(state)
    check(limits, commands)
    assert min(levels.count(level) for level in Level) > 100


# -- reaching --------------------------------------------------------------------------------------------------------

PACES = {
    "arm": {},
    "slow": {"acceleration": (1.0,) * 3 + (4.0,) * 3},
    "soft": {"jerk": (10.0,) * 3 + (40.0,) * 3},
    "both": {"acceleration": (0.5,) * 3 + (2.0,) * 3, "jerk": (2.0,) * 3 + (8.0,) * 3, "velocity": (0.2,) * 3 + (0.8,) * 3},
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("seed", range(8))
def test_a_target_that_can_be_reached_is_reached_exactly_and_passes(pace, seed):
    limits, rng = arm(**PACES[pace]), np.random.default_rng(seed)
    state = start(limits, HERE, DOWN)
    commands = [state.command]
    for scale in (1.0, 0.1, 0.01):
        for _ in range(15):  # from any motion
            wanted, _ = attack(rng, limits, state, "far")
            state, _ = guard(limits, state, wanted, CALM)
            commands.append(state.command)
        pos = np.clip(state.command.pos + scale * rng.uniform(-1, 1, 3), limits.lower[:3], limits.upper[:3])
        quat = turned(state.command.quat, scale * rng.uniform(-1.7, 1.7, 3))
        states, verdicts = run(limits, state, (pos, quat), 150)
        state = states[-1]
        commands += [s.command for s in states[1:]]
        assert verdicts[-1].level == Level.PASS
        for passed in (s for s, verdict in zip(states[1:], verdicts, strict=True) if verdict.level == Level.PASS):
            assert np.abs(passed.command.quat) == pytest.approx(np.abs(exact(quat)), abs=1e-12)
        assert (state.velocity, state.acceleration) == (STILL, STILL)
        assert state.command.pos == pytest.approx(exact(pos), rel=6e-8)
        assert np.abs(state.command.quat) == pytest.approx(np.abs(exact(quat)), abs=1e-12)
        for axis in range(3):  # no swinging to and fro: what is passed at the beginning is passed once
            sides = np.sign([x for s in states if abs(x := s.command.pos[axis] - pos[axis]) > 1e-6])
            assert (np.diff(sides) != 0).sum() <= 1
    check(limits, commands)


def test_what_catches_up_is_sent_exactly():
    limits, rng = arm(), np.random.default_rng(0)
    for _ in range(300):
        state, _ = guard(limits, start(limits, HERE, turned(DOWN, rng.normal(size=3))), None, CALM)
        assert state.behind == (True,) * 6
        quat = turned(state.command.quat, rng.uniform(-0.02, 0.02, 3))
        state, verdict = guard(limits, state, (HERE, quat), CALM)
        assert verdict.level == Level.PASS
        assert state.behind == (False,) * 6
        assert np.abs(state.command.quat) == pytest.approx(np.abs(exact(quat)), abs=1e-12)


@pytest.mark.parametrize("pace", PACES)
def test_a_path_that_keeps_the_limits_is_followed_exactly(pace):
    limits = arm(**PACES[pace])
    # x = size (wt - sin wt): from rest to rest, its greatest velocity 2 size w, acceleration size w^2, jerk size w^3
    w = 2.0 * math.pi / 1.2
    sizes = 0.98 * np.minimum.reduce(
        [np.divide(limits.velocity, 2 * w), np.divide(limits.acceleration, w**2), np.divide(limits.jerk, w**3)]
    )
    state = start(limits, HERE, DOWN)
    for tick in range(1, 31):
        phase = w * 0.04 * tick
        way = sizes * (phase - math.sin(phase))
        pos, quat = np.add(HERE, way[:3]), turned(DOWN, (0.0, 0.0, way[5]))
        state, verdict = guard(limits, state, (pos, quat), CALM)
        assert verdict == Verdict(Level.PASS, ())
        assert state.command.pos == exact(pos)
    state, verdict = guard(limits, state, None, CALM)
    for step in (5e-5, 1e-4):  # and is taken up again after a hold
        state, verdict = guard(limits, state, (np.add(pos, step), quat), CALM)
        assert verdict.level == Level.PASS
        assert state.command.pos == exact(np.add(pos, step))


def best_time(limits, axis, distance):
    """The ticks that linear programming needs from rest to rest over a distance."""
    dt, v, a, j = limits.dt, limits.velocity[axis], limits.acceleration[axis], limits.jerk[axis]
    for n in itertools.count(2 + int(distance / (v * dt))):  # with fewer the velocity would be too high
        sums = np.tril(np.ones((n, n)))
        changes = (sums * dt, sums @ sums * dt**2, sums @ sums @ sums * dt**3)  # of acceleration, velocity, position, by jerk
        rows = np.vstack([changes[0], -changes[0], changes[1], -changes[1]])
        bounds = np.repeat([a, v], 2 * n)
        ends = linprog(np.zeros(n), rows, bounds, [c[-1] for c in changes], [0.0, 0.0, distance], [(-j, j)] * n)
        if ends.status == 0:
            return n
    raise AssertionError


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize(("axis", "side"), [(0, 1.0), (1, -1.0), (2, -1.0), (3, 1.0), (4, 1.0), (5, -1.0)])
def test_a_far_target_is_approached_at_full_speed_without_passing_it(pace, axis, side):
    limits = arm(**PACES[pace])
    at = start(limits, (0.5, 0.0, 0.25), DOWN)
    distance = side * 0.2371
    step = np.zeros(6)
    step[axis] = distance
    states, verdicts = run(limits, at, (np.add(HERE, step[:3]), turned(DOWN, step[3:])), 80)
    check(limits, [s.command for s in states])
    moved = [(s.command.pos[axis] - HERE[axis]) if axis < 3 else turn_between(s.command.quat, DOWN)[axis - 3] for s in states]
    assert (side * np.diff(moved)).min() > -1e-6
    assert max(side * np.array(moved)) <= abs(distance) + 2e-7
    arrived = next(i for i, s in enumerate(states) if abs(moved[i] - distance) < 2e-7 and s.velocity == s.acceleration == STILL)
    assert arrived <= 1.1 * best_time(limits, axis, abs(distance)) + 2
    assert {reason.split(":")[0] for verdict in verdicts for reason in verdict.reasons} == {AXES[axis]}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("beyond", [1e-7, 0.01, 1e9])
def test_behind_a_wall_the_wall_is_reached_and_kept(pace, axis, beyond):
    limits = arm(**PACES[pace])
    at = start(limits, HERE, DOWN)
    commands = [at.command]
    for bound, side in ((limits.upper[axis], 1.0), (limits.lower[axis], -1.0)):
        wanted = np.array(HERE)
        wanted[axis] = bound + side * beyond
        states, verdicts = run(limits, at, (wanted, DOWN), 150)
        at = states[-1]
        commands += [s.command for s in states[1:]]
        assert {verdict.level for verdict in verdicts} == {Level.CLAMP}
        assert verdicts[-1].reasons == (f"{AXES[axis]}: position {wanted[axis]:.6g} m, limit {bound:g}",)
        assert (at.velocity, at.acceleration) == (STILL, STILL)
        assert abs(at.command.pos[axis] - bound) < 6e-8
        assert (side * np.diff([s.command.pos[axis] for s in states]) > -1e-6).all()
    check(limits, commands)
    _, verdict = guard(limits, at, (np.add(at.command.pos, 1e-5), DOWN), CALM)
    assert verdict.level == Level.PASS
