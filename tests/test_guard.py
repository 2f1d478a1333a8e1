"""The guard's ladder: what passes, what is clamped, what holds, what latches, and what it says."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from embodied.deploy.guard import Level, Verdict, clear, guard, start
from embodied.deploy.limits import AXES, Limits

INF = math.inf
FREE = (INF,) * 3
BEHIND = (True,) * 6
ARM = {
    "dt": 0.04,
    "lower": (0.25, -0.35, 0.0, -INF, -INF, -INF),
    "upper": (0.75, 0.35, 0.5, *FREE),
    "velocity": (0.25,) * 3 + (1.0,) * 3,
    "acceleration": (9.0,) * 3 + (17.0,) * 3,
    "jerk": (4500.0,) * 3 + (8500.0,) * 3,
    "force": 40.0,
    "torque": 8.0,
    "joints": (("shoulder", -1.0, 1.0, 2.0), ("elbow", -2.5, 0.5, 3.0)),
}
CALM = {"joint_pos": [0.5, -1.0], "joint_vel": [0.0, 0.0], "force": [0.0] * 3, "torque": [0.0] * 3}
HERE, DOWN = (0.5, 0.0, 0.25), (0.0, 1.0, 0.0, 0.0)


def arm(**changes):
    return Limits(**{**ARM, **changes})


def turned(quat, rotvec):
    """The quaternion (wxyz) turned by a rotation vector of the base frame, by scipy."""
    w, x, y, z = quat
    x, y, z, w = (Rotation.from_rotvec(rotvec) * Rotation.from_quat([x, y, z, w])).as_quat()
    return np.array([w, x, y, z])


def turn_between(new, old):
    """The rotation vector in the base frame from one quaternion to another, by scipy."""
    return (Rotation.from_quat(np.roll(new, -1)) * Rotation.from_quat(np.roll(old, -1)).inv()).as_rotvec()


def exact(values):
    return tuple(float(x) for x in np.asarray(values, np.float32))


def rest(limits, state, readings=CALM):
    """What holding leads to, at most 32 ticks later, and one that ends the acceleration."""
    for _ in range(33):
        state, _ = guard(limits, state, None, readings)
    return state


# -- pass ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    move=st.tuples(*[st.floats(-0.009, 0.009)] * 3), turn=st.tuples(*[st.floats(-0.027, 0.027)] * 3), off=st.floats(-9e-4, 9e-4)
)
def test_what_is_inside_the_limits_is_sent_as_wanted(move, turn, off):
    limits = arm()
    at = start(limits, HERE, DOWN)
    pos, quat = np.add(HERE, move), turned(DOWN, turn)
    state, verdict = guard(limits, at, (pos, quat * (1.0 + off)), CALM)
    assert verdict == Verdict(Level.PASS, ())
    assert state.command.pos == exact(pos)
    np.testing.assert_allclose(state.command.quat, quat * np.sign(quat[1]), rtol=2.0**-23 + 2.0**-24, atol=1e-12)
    assert state.command.quat == exact(state.command.quat)
    rates = np.concatenate([np.subtract(state.command.pos, HERE), turn_between(state.command.quat, DOWN)]) / 0.04
    np.testing.assert_allclose(state.velocity, rates, atol=1e-13)
    np.testing.assert_allclose(state.acceleration, rates / 0.04, atol=1e-11)


@settings(deadline=None)
@given(rotvec=st.tuples(*[st.floats(-3.0, 3.0)] * 3), sign=st.sampled_from([1.0, -1.0]))
def test_a_quaternion_from_the_wire_is_sent_back_unchanged_and_of_two_signs_the_near_one(rotvec, sign):
    limits = arm()
    at = start(limits, HERE, turned((1.0, 0.0, 0.0, 0.0), rotvec))
    state, verdict = guard(limits, at, (np.float32(HERE), sign * np.float32(at.command.quat)), CALM)
    assert verdict.level == Level.PASS
    assert state == at


@pytest.mark.parametrize("norm", [1.0 + 9.9e-4, 1.0 - 9.9e-4, 1.0 + 2e-7, 1.0 - 2e-7, 1.0 + 1e-7, 1.0 - 1e-7])
def test_quaternions_are_brought_to_unit_length_unless_they_have_it_in_float32(norm):
    limits = arm()
    quat = turned(DOWN, (0.01, -0.02, 0.005))
    state, _ = guard(limits, start(limits, HERE, DOWN), (HERE, quat * norm), CALM)
    assert state.command.quat == exact(quat * norm if abs(norm - 1.0) < 2.0**-23 else quat)
    for longest in ((1.0 + 2.0**-23, 0.0, 0.0, 0.0), (1.0 - 2.0**-23, 0.0, 0.0, 0.0)):
        assert start(limits, HERE, longest).command.quat == longest


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_half_a_turn_goes_the_way_its_quaternion_says(side):
    limits = arm()
    state, verdict = guard(limits, start(limits, HERE, (1.0, 0.0, 0.0, 0.0)), (HERE, (0.0, side, 0.0, 0.0)), CALM)
    assert verdict == Verdict(Level.CLAMP, (f"tcp rx: velocity {side * math.pi / 0.04:.6g} rad/s, limit 1",))
    assert side * state.velocity[3] > 0.6


EDGES = {"velocity": (0.25, 100.0, 1e5), "acceleration": (1.0, 8.0, 1e5), "jerk": (1.0, 100.0, 256.0)}


@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_exactly_at_a_limit_passes_and_the_next_float_does_not(name, axis, side):
    # dt = 2^-5 makes it exact: a move of 2^-7 m is 0.25 m/s, from rest 8 m/s^2 and 256 m/s^3
    v, a, j = EDGES[name]
    limits = arm(dt=2.0**-5, velocity=(v,) * 3 + (1.0,) * 3, acceleration=(a,) * 3 + (17.0,) * 3, jerk=(j,) * 3 + (8500.0,) * 3)
    centre = np.array([0.5, 0.125, 0.25])
    at = start(limits, centre, DOWN)
    edge = centre.copy()
    edge[axis] += side * 2.0**-7
    state, verdict = guard(limits, at, (edge, DOWN), CALM)
    assert verdict.level == Level.PASS
    assert state.command.pos == tuple(edge)
    edge[axis] = np.nextafter(np.float32(edge[axis]), np.float32(side * 9.0))
    state, verdict = guard(limits, at, (edge, DOWN), CALM)
    assert verdict.level == Level.CLAMP
    assert [r.split(" ")[:3] for r in verdict.reasons] == [[*f"{AXES[axis]}: {name}".split(" ")]]
    assert 0.0 < side * (state.command.pos[axis] - centre[axis]) < 2.0**-7
    edge[axis] = centre[axis] + side * 0.1
    state, _ = guard(limits, at, (edge, DOWN), CALM)
    assert 0.9985 * 2.0**-7 < side * (state.command.pos[axis] - centre[axis]) < 2.0**-7


@pytest.mark.parametrize(("name", "limit"), [("velocity", 1.0), ("acceleration", 10.0), ("jerk", 100.0)])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_turns_pass_up_to_a_limit_and_are_clamped_to_it_beyond(name, limit, axis, side):
    wide = {"velocity": 2.0, "acceleration": 100.0, "jerk": 1e5, name: limit}
    limits = arm(**{key: ARM[key][:3] + (value,) * 3 for key, value in wide.items()})
    at = start(limits, HERE, DOWN)
    edge = limit * 0.04 ** (1 + ["velocity", "acceleration", "jerk"].index(name))
    other = (axis + 1) % 3
    for share, least in ((0.9999, 0.9998), (1.0001, 0.63), (2.5, 0.9985)):
        turn = np.zeros(3)
        turn[axis], turn[other] = side * share * edge, 0.2 * edge
        state, verdict = guard(limits, at, (HERE, turned(DOWN, turn)), CALM)
        assert verdict.level == (Level.PASS if share < 1.0 else Level.CLAMP)
        got = turn_between(state.command.quat, DOWN)
        assert [r.split(" ")[1:3] for r in verdict.reasons] == [[f"r{'xyz'[axis]}:", name]] * (share > 1.0)
        assert got[other] == pytest.approx(0.2 * edge, abs=2e-7)
        assert least * edge < side * got[axis] < edge


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.7, 0.35, 0.75])
def test_the_bounds_of_the_workspace_are_inside_it(bound):
    limits = arm(lower=(-bound,) * 3 + ARM["lower"][3:], upper=(bound,) * 3 + FREE)
    for side in (1.0, -1.0):
        at = start(limits, (side * bound,) * 3, DOWN)
        state, verdict = guard(limits, at, ((side * bound,) * 3, DOWN), CALM)
        assert verdict.level == Level.PASS
        assert state == at
        assert bound - 6e-8 < side * state.command.pos[0] <= bound
        beyond = np.nextafter(side * bound, side * 9.0)
        state, verdict = guard(limits, at, ((beyond, 0.999 * side * bound, side * bound), DOWN), CALM)
        assert verdict == Verdict(Level.CLAMP, (f"tcp x: position {beyond:.6g} m, limit {side * bound:g}",))
        assert state.command.pos[::2] == at.command.pos[::2]
        assert state.command.pos[1] == exact([0.999 * side * bound])[0]


# -- clamp -----------------------------------------------------------------------------------------------------------

SLOW = {"acceleration": (0.5,) * 3 + (2.0,) * 3, "jerk": (4.0,) * 3 + (20.0,) * 3}
WORDS = [
    ({}, (0.5, 0.0, 0.266), (0, 0, 0), ("tcp z: velocity 0.4 m/s, limit 0.25",)),
    ({}, (0.4, 0.0, 0.25), (0, 0, 0), ("tcp x: velocity -2.5 m/s, limit 0.25",)),
    ({}, (0.5, 1.0, 0.25), (0, 0, 0), ("tcp y: position 1 m, limit 0.35",)),
    ({}, (0.5, 0.0, -1.0), (0, 0, 0), ("tcp z: position -1 m, limit 0",)),
    (
        {},
        (9.0, 0.1, 0.25),
        (0, 0.06, 0),
        ("tcp x: position 9 m, limit 0.75", "tcp y: velocity 2.5 m/s, limit 0.25", "tcp ry: velocity 1.5 rad/s, limit 1"),
    ),
    (
        {**SLOW, "jerk": ARM["jerk"]},
        (0.504, 0.0, 0.25),
        (0, 0, -0.016),
        ("tcp x: acceleration 2.5 m/s^2, limit 0.5", "tcp rz: acceleration -10 rad/s^2, limit 2"),
    ),
    (
        SLOW,
        (0.5, 0.00064, 0.25),
        (0.0016, 0, 0),
        ("tcp y: jerk 10 m/s^3, limit 4", "tcp rx: jerk 25 rad/s^3, limit 20"),
    ),
]


@pytest.mark.parametrize(("changes", "pos", "turn", "reasons"), WORDS)
def test_reasons_name_the_axis_what_was_wanted_and_the_limit(changes, pos, turn, reasons):
    limits = arm(**changes)
    state, verdict = guard(limits, start(limits, HERE, DOWN), (pos, turned(DOWN, turn)), CALM)
    assert verdict == Verdict(Level.CLAMP, reasons)
    named = {reason.split(":")[0] for reason in reasons}
    for axis, wanted, sent in zip(AXES, exact(pos), state.command.pos, strict=False):
        assert (wanted == sent) == (axis not in named)
    got = turn_between(state.command.quat, DOWN)
    for axis, wanted, sent in zip(AXES[3:], turn, got, strict=True):
        assert (abs(wanted - sent) < 2e-7) == (axis not in named)


def test_where_a_stop_needs_more_room_than_there_is_the_reason_says_so():
    # from rest, 0.0625 m / s is 0.5 m/s^2 and 4 m/s^3: a move of 2^-7 m, and to end the acceleration takes as much again
    limits = arm(dt=0.125, acceleration=(0.5,) * 3 + (2.0,) * 3, jerk=(4.1,) * 3 + (20.0,) * 3)
    at = start(limits, (0.75 - 1.5 * 2.0**-7, 0.0, 0.25), DOWN)
    at, verdict = guard(limits, at, ((0.75 - 2.0**-8, 0.0, 0.25), DOWN), CALM)
    assert verdict == Verdict(Level.CLAMP, ("tcp x: no room to stop after 0.0625 m/s",))
    assert 0.75 - 1.5 * 2.0**-7 < at.command.pos[0] < 0.75 - 2.0**-8


# -- hold ------------------------------------------------------------------------------------------------------------


class Foreign:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("not on this device")


class Endless:
    def __getitem__(self, index):
        raise KeyError(index)


NAN, UNIT_QUAT = math.nan, (1.0, 0.0, 0.0, 0.0)
BAD_COMMANDS = [
    (None, ("no command",)),
    (3.0, ("command: TypeError, expected a pair of position and quaternion",)),
    ((HERE, DOWN, HERE), ("command: ValueError, expected a pair of position and quaternion",)),
    (Endless(), ("command: KeyError, expected a pair of position and quaternion",)),
    ((HERE[:2], DOWN), ("command position: shape (2,) of float64, expected 3 numbers",)),
    (([HERE], DOWN), ("command position: shape (1, 3) of float64, expected 3 numbers",)),
    ((HERE, DOWN[:3]), ("command quaternion: shape (3,) of float64, expected 4 numbers",)),
    ((HERE, ["w", "x", "y", "z"]), ("command quaternion: shape (4,) of <U1, expected 4 numbers",)),
    ((np.array(HERE) + 0j, DOWN), ("command position: shape (3,) of complex128, expected 3 numbers",)),
    (([True, False, True], DOWN), ("command position: shape (3,) of bool, expected 3 numbers",)),
    (([[1.0], [1.0, 2.0], []], DOWN), ("command position: ValueError, expected 3 numbers",)),
    ((HERE, Foreign()), ("command quaternion: RuntimeError, expected 4 numbers",)),
    (((0.5, NAN, 0.25), DOWN), ("command position: tcp y is nan",)),
    (((INF, 0.0, -INF), DOWN), ("command position: tcp x is inf", "command position: tcp z is -inf")),
    ((HERE, (0.0, NAN, 0.0, 0.0)), ("command quaternion: x is nan",)),
    ((HERE, (0.0, 1.0, NAN, INF)), ("command quaternion: y is nan", "command quaternion: z is inf")),
    (((0.5, NAN, 0.25), (INF, 0.0, 0.0, 1.0)), ("command position: tcp y is nan", "command quaternion: w is inf")),
    ((HERE, np.zeros(4)), ("command quaternion: length 0, expected 1",)),
    ((HERE, np.multiply(DOWN, 1.0011)), ("command quaternion: length 1.0011, expected 1",)),
    ((HERE, np.multiply(DOWN, 0.9989)), ("command quaternion: length 0.9989, expected 1",)),
    (((0.5, 0.0, NAN), (1e200,) * 4), ("command position: tcp z is nan", "command quaternion: length 2e+200, expected 1")),
    ((HERE, (1e308,) * 4), ("command quaternion: length inf, expected 1",)),
]


@pytest.mark.parametrize(("wanted", "reasons"), BAD_COMMANDS)
def test_what_is_no_command_holds_and_says_why(wanted, reasons):
    limits = arm()
    at = start(limits, HERE, DOWN)
    assert guard(limits, at, wanted, CALM) == (replace(at, behind=BEHIND), Verdict(Level.HOLD, reasons))


BAD_READINGS = [
    ({"joint_pos": None}, ("joint_pos: shape () of object, expected 2 numbers",)),
    ({"joint_pos": [0.0]}, ("joint_pos: shape (1,) of float64, expected 2 numbers",)),
    ({"joint_pos": [0.0, NAN]}, ("joint_pos: elbow is nan",)),
    ({"joint_vel": [-INF, 0.0]}, ("joint_vel: shoulder is -inf",)),
    ({"joint_pos": [INF, 0.0]}, ("joint_pos: shoulder is inf",)),
    ({"force": [0.0, 0.0, INF]}, ("force: z is inf",)),
    ({"torque": [NAN, 0.0, INF]}, ("torque: x is nan", "torque: z is inf")),
    ({"force": np.zeros((1, 3), np.float32)}, ("force: shape (1, 3) of float32, expected 3 numbers",)),
    ({"torque": Foreign(), "force": [NAN, 0.0, 0.0]}, ("force: x is nan", "torque: RuntimeError, expected 3 numbers")),
]


@pytest.mark.parametrize(("changes", "reasons"), BAD_READINGS)
def test_readings_that_say_nothing_hold_and_name_field_and_joint(changes, reasons):
    limits = arm()
    at = start(limits, HERE, DOWN)
    assert guard(limits, at, (HERE, DOWN), {**CALM, **changes}) == (replace(at, behind=BEHIND), Verdict(Level.HOLD, reasons))


@pytest.mark.parametrize("field", CALM)
def test_missing_readings_hold(field):
    limits = arm()
    at = start(limits, HERE, DOWN)
    readings = {name: value for name, value in CALM.items() if name != field}
    state, verdict = guard(limits, at, (HERE, DOWN), readings)
    assert (state, verdict) == (replace(at, behind=BEHIND), Verdict(Level.HOLD, (f"{field}: missing",)))
    _, verdict = guard(limits, at, None, {})
    assert verdict == Verdict(Level.HOLD, (*(f"{name}: missing" for name in CALM), "no command"))


def test_other_readings_do_not_matter_and_whole_numbers_are_numbers():
    limits = arm()
    at = start(limits, HERE, DOWN)
    whole = {"force": [1, 2, 3], "torque": np.zeros(3, np.uint8), "joint_vel": np.ones(2, np.int16)}
    _, verdict = guard(limits, at, (np.float16(HERE), DOWN), {**CALM, **whole, "tcp_pos": [NAN], "note": "x"})
    assert verdict.level == Level.PASS


# -- latch -----------------------------------------------------------------------------------------------------------

FAULTS = [
    ({"joint_pos": [1.25, 0.0]}, "shoulder: position 1.25 rad, limit 1"),
    ({"joint_pos": [0.0, -3.0]}, "elbow: position -3 rad, limit -2.5"),
    ({"joint_pos": [np.nextafter(1.0, 2.0), 0.0]}, "shoulder: position 1 rad, limit 1"),
    ({"joint_vel": [0.0, 3.5]}, "elbow: velocity 3.5 rad/s, limit 3"),
    ({"joint_vel": [-2.25, 0.0]}, "shoulder: velocity -2.25 rad/s, limit 2"),
    ({"force": [0.0, 30.0, -40.0]}, "force: 50 N, limit 40"),
    ({"force": [1.7e308] * 3}, "force: inf N, limit 40"),
    ({"torque": [8.5, 0.0, 0.0]}, "torque: 8.5 N m, limit 8"),
    ({"force": [0.0, 50.0, 0.0], "torque": [0.0, 0.0, 9.0]}, "force: 50 N, limit 40; torque: 9 N m, limit 8"),
    ({"joint_pos": [1.5, 0.75], "torque": [9.0, 0.0, 0.0]}, "shoulder: position 1.5 rad, limit 1; elbow: position 0.75 rad, "
     "limit 0.5; torque: 9 N m, limit 8"),
    ({"joint_pos": [NAN, 0.75], "force": None}, "elbow: position 0.75 rad, limit 0.5"),
    ({"joint_pos": [], "joint_vel": [9.0, NAN], "torque": [INF, 0.0, 0.0]}, "shoulder: velocity 9 rad/s, limit 2"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "reason"), FAULTS)
@pytest.mark.parametrize("wanted", [(HERE, DOWN), None])
def test_measurements_beyond_their_limits_latch_until_an_operator_clears(changes, reason, wanted):
    limits = arm()
    at = start(limits, HERE, DOWN)
    state, verdict = guard(limits, at, wanted, {**CALM, **changes})
    assert verdict == Verdict(Level.LATCH, (reason,))
    pressed = int("force" in reason or "torque" in reason)
    assert state == replace(at, latch=reason, behind=BEHIND, pressed=pressed)
    for readings in (CALM, {}, {**CALM, "force": [99.0, 0.0, 0.0]}):
        state, verdict = guard(limits, state, ((0.505, 0.0, 0.25), DOWN), readings)
        assert verdict == Verdict(Level.LATCH, (reason,))
        assert state.command == at.command
    assert clear(state) == replace(at, behind=BEHIND, pressed=1)  # the last reading was of 99 N
    state, verdict = guard(limits, clear(state), ((0.505, 0.0, 0.25), DOWN), CALM)
    assert verdict.level == Level.PASS
    assert state.command.pos == exact((0.505, 0.0, 0.25))
    assert guard(limits, clear(state), wanted, {**CALM, **changes})[1].level == Level.LATCH


def test_measurements_at_their_limits_do_not_latch():
    limits = arm()
    at = start(limits, HERE, DOWN)
    for sign in (1.0, -1.0):
        pos = [1.0, 0.5] if sign > 0 else [-1.0, -2.5]
        edge = {
            "joint_pos": pos,
            "joint_vel": [2.0 * sign, 3.0 * sign],
            "force": [0.0, 24.0, 32.0 * sign],
            "torque": [8 * sign, 0, 0],
        }
        assert guard(limits, at, (HERE, DOWN), edge)[1] == Verdict(Level.PASS, ())


def test_a_wrench_latches_only_when_it_lasts():
    """Three ticks of 0.04 s outlast 0.1 s; an impact, or two with a tick between them, does not."""
    limits, hit, twist = arm(press=3), {**CALM, "force": [50.0, 0.0, 0.0]}, {**CALM, "torque": [0.0, 9.0, 0.0]}
    state = start(limits, HERE, DOWN)
    for readings in (hit, twist, CALM, twist, hit, {**CALM, "force": [40.0, 0.0, 0.0]}, hit, hit):
        state, verdict = guard(limits, state, (HERE, DOWN), readings)
        assert verdict == Verdict(Level.PASS, ())
    state, verdict = guard(limits, state, (HERE, DOWN), twist)
    assert verdict == Verdict(Level.LATCH, ("torque: 9 N m, limit 8",))
    assert guard(limits, state, (HERE, DOWN), CALM)[1].level == Level.LATCH
    # a hold does not start the count anew: whoever is pressed is pressed
    state = start(limits, HERE, DOWN)
    for wanted in (None, None, (HERE, DOWN)):
        state, verdict = guard(limits, state, wanted, hit)
    assert verdict.level == Level.LATCH


def test_a_fault_in_motion_brakes_inside_the_limits_and_then_nothing_moves():
    limits = arm(**SLOW)
    state = start(limits, HERE, DOWN)
    for _ in range(20):
        state, _ = guard(limits, state, ((0.7, 0.3, 0.4), UNIT_QUAT), CALM)
    assert min(map(abs, state.velocity[:3])) > 0.01
    state, verdict = guard(limits, state, ((0.7, 0.3, 0.4), UNIT_QUAT), {**CALM, "force": [50.0, 0.0, 0.0]})
    assert verdict.level == Level.LATCH
    state = rest(limits, state)
    assert state.velocity == state.acceleration == (0.0,) * 6
    assert rest(limits, state) == state
