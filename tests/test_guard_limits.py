"""Where the guard may start, and which limits it accepts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from test_guard import ARM, CALM, DOWN, FREE, HERE, INF, NAN, arm, exact, turned

from embodied.deploy.guard import Level, guard, start
from embodied.deploy.limits import AXES, Limits
from embodied.spec.errors import BadInput
from embodied.spec.robot import ArmSpec, ImpedanceSpec, JointSpec, MotionSpec

BAD_STARTS = [
    ((0.2, 0.0, 0.25), DOWN, "tcp x: position 0.2 m, limit 0.25"),
    ((0.8, 0.0, -0.1), DOWN, "tcp x: position 0.8 m, limit 0.75; tcp z: position -0.1 m, limit 0"),
    ((NAN, 0.0, 0.25), DOWN, "command position: tcp x is nan"),
    (HERE, (1.0, 1.0, 0.0, 0.0), "command quaternion: length 1.41421, expected 1"),
    (HERE[:2], DOWN, "command position: shape (2,) of float64, expected 3 numbers"),
]


@pytest.mark.parametrize(("pos", "quat", "reason"), BAD_STARTS)
def test_a_start_must_be_a_pose_in_the_workspace(pos, quat, reason):
    with pytest.raises(BadInput) as error:
        start(arm(), pos, quat)
    assert str(error.value) == f"the guard cannot start there: {reason}: bring the tool into the workspace"


def test_a_start_is_at_rest_where_it_was_put():
    state = start(arm(), (0.3, 0.1, 0.2), np.multiply(turned(DOWN, (0.1, 0.2, 0.3)), 1.0005))
    assert state.command.pos == exact((0.3, 0.1, 0.2))
    assert state.command.quat == exact(turned(DOWN, (0.1, 0.2, 0.3)))
    assert (state.velocity, state.acceleration, state.latch) == ((0.0,) * 6, (0.0,) * 6, "")


def test_a_guard_is_a_pure_function():
    limits = arm()
    state = start(limits, HERE, DOWN)
    pos, quat = np.array([0.7, 0.1, 0.2]), np.array([0.0, -1.0, 0.0, 0.0])
    first = guard(limits, state, (pos, quat), CALM)
    assert first == guard(limits, state, (pos, quat), CALM) == guard(arm(), start(arm(), HERE, DOWN), (pos, quat), CALM)
    assert (pos.tolist(), quat.tolist()) == ([0.7, 0.1, 0.2], [0.0, -1.0, 0.0, 0.0])
    assert state == start(limits, HERE, DOWN)


def test_the_guard_does_without_torch():
    code = "import sys, embodied.deploy.guard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_limits_of_a_robot():
    joints = tuple(JointSpec(name, low, high, fast, 10.0, 5000.0, 87.0, 0.0) for name, low, high, fast in ARM["joints"])
    impedance = ImpedanceSpec((1500.0, 20.0), (120.0, 2.0), (40.0, 4.0), (1.0, 1.0), (0.008, 0.05))
    motion = MotionSpec((0.25, 1.0), (9.0, 17.0), (4500.0, 8500.0), (40.0, 8.0), press_s=0.1)
    robot = ArmSpec("arm", joints, 0.002, 0.04, "hold", "tcp", impedance, motion, ((0.25, 0.75), (-0.35, 0.35), (0.0, 0.5)))
    assert Limits.of(robot) == arm(press=3)  # the first tick at which 0.1 s are over
    assert Limits.of(robot, 0.02) == arm(dt=0.02, press=5)
    for seconds, press in ((0.0, 1), (0.04, 1), (0.0401, 2), (0.12, 3), (3 * 0.04, 3), (0.1201, 4)):
        assert Limits.of(replace(robot, motion=replace(motion, press_s=seconds))).press == press


def six(name, i, value):
    row = list(ARM[name])
    row[i] = value
    return {name: tuple(row)}


BAD_LIMITS = [
    ({"dt": 0.0}, "dt is 0.0, expected a positive number"),
    ({"dt": NAN}, "dt is nan, expected a positive number"),
    ({"dt": INF}, "dt is inf, expected a positive number"),
    ({"force": -1.0}, "force is -1.0, expected a positive number"),
    ({"torque": NAN}, "torque is nan, expected a positive number"),
    (six("velocity", 0, -0.1), "tcp x velocity is -0.1, expected a positive number"),
    (six("acceleration", 4, INF), "tcp ry acceleration is inf, expected a positive number"),
    (six("jerk", 5, 0.0), "tcp rz jerk is 0.0, expected a positive number"),
    ({"jerk": (1.0,) * 5}, "jerk has 5 numbers, expected one for each of tcp x, tcp y, tcp z, tcp rx, tcp ry, tcp rz"),
    ({"upper": (1.0,) * 7}, "upper has 7 numbers, expected one for each of"),
    ({"lower": (0.0,) * 3}, "lower has 3 numbers, expected one for each of"),
    ({"velocity": ()}, "velocity has 0 numbers, expected one for each of"),
    ({"acceleration": (1.0,)}, "acceleration has 1 numbers, expected one for each of"),
    (six("upper", 1, -0.35), "tcp y is from -0.35 to -0.35, expected lower < upper, both nearer to 0 than 100"),
    (six("upper", 1, -0.35 + 1e-9), "tcp y is from -0.35 to -0.34999999"),
    (six("upper", 2, 100.0), "tcp z is from 0.0 to 100.0, expected lower < upper, both nearer to 0 than 100"),
    (six("lower", 0, -100.0), "tcp x is from -100.0 to 0.75, expected lower < upper, both nearer to 0 than 100"),
    (six("lower", 0, NAN), "tcp x is from nan to 0.75, expected lower < upper"),
    (six("upper", 0, NAN), "tcp x is from 0.25 to nan, expected lower < upper"),
    (six("lower", 0, 1e39), "tcp x is from 1e+39 to 0.75, expected lower < upper"),
    (six("upper", 3, 3.0), "rotation has bounds, which this guard cannot hold: expected -inf and inf"),
    (six("upper", 5, 3.0), "rotation has bounds, which this guard cannot hold: expected -inf and inf"),
    (six("lower", 3, -3.0), "rotation has bounds, which this guard cannot hold: expected -inf and inf"),
    (six("lower", 5, -3.0), "rotation has bounds, which this guard cannot hold: expected -inf and inf"),
    ({"joints": (("elbow", 1.0, 1.0, 1.0),)}, "elbow is from 1.0 to 1.0, expected lower < upper, both nearer to 0 than 100"),
    ({"joints": (("elbow", 0.0, INF, 1.0),)}, "elbow is from 0.0 to inf, expected lower < upper"),
    ({"joints": (("elbow", 0.0, 1.0, 0.0),)}, "elbow velocity is 0.0, expected a positive number"),
    ({"velocity": (20.0,) * 3 + (1.0,) * 3}, "moves of 1.39 in a tick, expected at most 1 (m, rad): lower the velocity"),
    ({"velocity": (0.25,) * 3 + (20.0,) * 3}, "turns of 1.39 in a tick, expected at most 1 (m, rad): lower the velocity"),
    ({**six("velocity", 2, 1.0), **six("jerk", 2, 2.0)}, "tcp z: to stop takes over 32 ticks: raise acceleration, jerk or dt, "
     "or lower the velocity"),
    (six("acceleration", 3, 0.5), "tcp rx: to stop takes over 32 ticks: raise acceleration, jerk or dt, or lower the velocity"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "complaint"), BAD_LIMITS)
def test_limits_that_cannot_be_held_are_refused(changes, complaint):
    with pytest.raises(BadInput) as error:
        arm(**changes)
    assert str(error.value).startswith(f"guard limits: {complaint}")


# the float32 values near a bound of 0.5 m (not above) are off by 2^-26 at most, near 0.75 m by 2^-25; half a margin is 5e-4
FINEST = [(0, 2.0**-25), (1, 2.0**-26), (2, 2.0**-26), (3, 2.0**-23), (5, 2.0**-23)]


@pytest.mark.parametrize(("axis", "rounding"), FINEST)
@pytest.mark.parametrize(("name", "power"), [("velocity", 1), ("acceleration", 2), ("jerk", 3)])
def test_limits_must_leave_more_than_float32_takes(axis, rounding, name, power):
    least = rounding / 5e-4 / 0.04**power
    slow = {} if name == "velocity" else six("velocity", axis, least * 0.04 ** (power - 1))
    upper = {"upper": (0.75, 0.35, 0.4999, *FREE)}
    mirrored = {"lower": (-0.75, -0.35, -0.4999, *ARM["lower"][3:]), "upper": (-0.25, 0.1, 0.0, *FREE)}
    for bounds in (upper, mirrored):
        arm(**{**bounds, **slow, **six(name, axis, 1.001 * least)})
        with pytest.raises(BadInput) as error:
            arm(**{**bounds, **slow, **six(name, axis, 0.999 * least)})
        allowed = f"{0.999 * rounding / 5e-4:.3g}"
        reason = f"velocity, acceleration, jerk allow {allowed} a tick, too little for float32: raise them or dt"
        assert str(error.value) == f"guard limits: {AXES[axis]}: {reason}"


@pytest.mark.parametrize("rates", [slice(0, 3), slice(3, 6)])
def test_a_tick_may_bring_a_metre_or_a_radian(rates):
    speeds = list(ARM["velocity"])
    speeds[rates] = (3.0, 6.0, 6.0)  # of length 9
    fast = {"velocity": tuple(speeds), "acceleration": (900.0,) * 6, "jerk": (1e5,) * 6}
    arm(dt=1.0 / 9.0, **fast)
    with pytest.raises(BadInput):
        arm(dt=1.0 / 8.99, **fast)


@pytest.mark.parametrize("axis", [1, 4])
def test_a_stop_takes_32_ticks(axis):
    least = ARM["velocity"][axis] / (32 * 0.04 * 0.999)
    arm(**six("acceleration", axis, 1.0001 * least))
    with pytest.raises(BadInput, match=f"{AXES[axis]}: to stop takes over 32 ticks"):
        arm(**six("acceleration", axis, 0.9999 * least))


@pytest.mark.parametrize("axis", range(3, 6))
def test_a_turn_exactly_at_the_limits_passes(axis):
    # limits are made of what a turn gives, in a tick of 2^-5 s so that they come out exactly; its first tick is the fastest
    turn = np.zeros(3)
    turn[axis - 3] = 0.01
    wanted, calm = (HERE, turned(DOWN, turn)), {"dt": 2.0**-5}
    sent, _ = guard(arm(**calm), start(arm(**calm), HERE, DOWN), wanted, CALM)
    w, a = sent.velocity[axis], sent.acceleration[axis]
    tight = {"velocity": (w, 1.0), "acceleration": (a, 17.0), "jerk": (a * 32.0, 8500.0)}
    for name, (limit, wide) in tight.items():
        for change, level in ((1.0, Level.PASS), (1.0 - 1e-15, Level.CLAMP)):
            row = ARM[name][:3] + tuple(limit * change if i == axis else wide for i in range(3, 6))
            limits = arm(**calm, **{name: row})
            state, verdict = guard(limits, start(limits, HERE, DOWN), wanted, CALM)
            assert verdict.level == level
            assert (state.command == sent.command) == (level == Level.PASS)
