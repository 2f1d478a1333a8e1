"""The checker of robots' logs: hand-made logs, each with one thing wrong, and figures counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from embodied.deploy.faults import measure
from embodied.deploy.journal import Writer
from embodied.sim.robots.franka import SPEC

DT = SPEC.control_dt
TICK, STEP = 40_000_000, 4_000_000  # ns
# jerk limits low enough to be broken alone
ROBOT = replace(SPEC, motion=replace(SPEC.motion, jerk=(60.0, 120.0)))
AT, UP = np.array([0.5, 0.0, 0.2]), np.array([0.0, 1.0, 0.0, 0.0])


class Robot:
    """Writes a log as a robot process does."""

    def __init__(self, path: Path) -> None:
        self.writer = Writer(path, {"robot": "hand-made"})
        self.now, self.target, self.sequence = 1_000_000_000, (AT, UP), 0

    def rest(self, seconds: float = 0.02, speed: float = 0.0) -> None:
        for _ in range(round(seconds * 1e9 / STEP)):
            self.now += STEP
            pos, quat = (np.float32(x) for x in self.target)
            velocity = np.float32([0, speed, 0])
            data = {"target_pos": pos, "target_quat": quat, "tcp_pos": pos, "tcp_linvel": velocity}
            self.writer.append("motion", self.now, {**data, "tcp_angvel": velocity, "force": velocity})

    def status(self, status: str, reason: str = "NONE") -> None:
        self.writer.append("status", self.now, {"status": status, "reason": reason, "detail": ""})

    def follow(
        self, pos, quat=UP, session: int = 1, epoch: int = 1, refused: str = "", skip: int = 0, tick: int = TICK
    ) -> None:
        """The next command, `skip` ones after the last."""
        self.now += tick
        self.sequence += 1 + skip
        pos, quat = np.float32(pos).astype(float), np.float32(quat).astype(float)
        data = {"session": session, "epoch": epoch, "sequence": self.sequence, "pos": pos, "quat": quat, "refused": refused}
        self.writer.append("command", self.now, data)
        if not refused:
            self.target = pos, quat


@pytest.fixture
def robot(tmp_path):
    robot = Robot(tmp_path / "robot.emb")
    robot.rest()
    return robot


def log_of(robot: Robot) -> measure.Log:
    robot.rest()
    robot.writer.close()
    return measure.load(robot.writer.path)


def ramp(robot: Robot, axis: int = 0, ticks: int = 20, most: float = 0.2) -> None:
    """To `most` m/s and back to rest, well inside every limit."""
    speed = most * np.sin(np.pi * np.arange(ticks + 1) / ticks) ** 2
    for x in np.cumsum(DT * speed):
        robot.follow(AT + x * np.eye(3)[axis])


def turned(angle: float, axis=(0, 0, 1)) -> np.ndarray:
    """`UP` turned about an axis of the base frame, wxyz."""
    x, y, z, w = (Rotation.from_rotvec(angle * np.array(axis)) * Rotation.from_quat(np.roll(UP, -1))).as_quat()
    return np.array([w, x, y, z])


def found(robot: Robot, spec=ROBOT) -> list[str]:
    return measure.violations(log_of(robot), spec)


# -- limits --------------------------------------------------------------------------------------------------------------


def test_a_good_run_is_found_good(robot):
    ramp(robot)
    assert found(robot) == []


def test_a_velocity_beyond_the_limit_is_found(robot):
    ramp(robot, ticks=40, most=0.251)
    (line,) = found(robot)
    assert line.startswith("velocity of moves in x: 0.251 m/s^1, limit 0.25")


def test_an_acceleration_beyond_the_limit_is_found(robot):
    spec = replace(ROBOT, motion=replace(ROBOT.motion, jerk=(4500.0, 8500.0)))
    # to 0.36 m/s (0.25 allowed) and back, 18 m/s^2 (9 allowed)
    for x in (0.0, 0.0, 0.016 * 0.9, 0.0):
        robot.follow(AT + np.array([0, x, 0]))
    lines = found(robot, spec)
    assert [line.split(" in y")[0] for line in lines] == ["velocity of moves", "acceleration of moves"]


def test_an_acceleration_alone(robot):
    spec = replace(ROBOT, motion=replace(ROBOT.motion, jerk=(4500.0, 8500.0), acceleration=(4.0, 17.0)))
    for x in (0.0, 0.0064 * 1.01, 0.0128 * 1.01, 0.0128 * 1.01):
        robot.follow(AT + np.array([0, x, 0]))
    lines = found(robot, spec)
    assert lines == ["acceleration of moves in y: 4.04 m/s^2, limit 4"]


def test_a_jerk_alone(robot):
    # velocity 0, v, v with v = 0.1 m/s: jerk v / dt^2 = 62.5 m/s^3, acceleration 2.5 m/s^2 of 9
    for x in (0.0, 0.0, 0.004, 0.008):
        robot.follow(AT + np.array([0, 0, x]))
    lines = found(robot)
    assert len(lines) == 1 and lines[0].startswith("jerk of moves in z: 62.") and lines[0].endswith("m/s^3, limit 60")


@pytest.mark.parametrize("axis", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_rotations_are_measured_about_the_base_frames_axes(robot, axis):
    spec = replace(ROBOT, motion=replace(ROBOT.motion, jerk=(4500.0, 8500.0)))
    angle = 0.0
    for rate in (0.0, 0.3, 0.6, 0.9, 1.05, 0.9, 0.6, 0.3, 0.0):
        angle += DT * rate
        robot.follow(AT, turned(angle, axis))
    (line,) = found(robot, spec)
    assert line.startswith(f"velocity of turns in {'xyz'[axis.index(1)]}: 1.05") and line.endswith("rad/s^1, limit 1")


def test_an_angular_acceleration_and_jerk_are_found(robot):
    angle = 0.0
    for rate in (0.0, 0.0, 0.8, 0.8):  # 20 rad/s^2 of 17, 500 rad/s^3 of 120
        angle += DT * rate
        robot.follow(AT, turned(angle))
    assert [line.split(" in z")[0] for line in found(robot)] == ["acceleration of turns", "jerk of turns"]


def test_a_quaternion_and_its_negative_are_the_same_orientation(robot):
    for sign in (1, -1, 1):
        robot.follow(AT, sign * UP)
    assert found(robot) == []


@pytest.mark.parametrize(("axis", "bound"), [(0, 0.75), (1, -0.35), (2, 0.0)])
def test_the_workspace_is_checked(tmp_path, axis, bound):
    robot = Robot(tmp_path / "a.emb")
    beyond = AT.copy()
    beyond[axis] = bound + 1e-3 * np.sign(bound - 0.1)
    robot.target = (beyond, UP)  # it is there already: nothing else is wrong
    robot.rest()
    robot.follow(beyond)
    (line,) = found(robot)
    assert line.startswith(f"{'xyz'[axis]} {beyond[axis]:.6f} m, workspace")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_found(robot, bad):
    robot.follow(AT)
    robot.follow([0.5, bad, 0.2])
    (line,) = found(robot)
    assert line.startswith("command 2 is not finite")
    robot2 = Robot(robot.writer.path.with_name("second.emb"))
    robot2.rest()
    robot2.follow(AT, [bad, 1, 0, 0])
    assert found(robot2)[0].startswith("command 1 is not finite")


def test_a_jump_from_where_the_robot_was_is_found(robot):
    robot.follow(AT + np.array([0.012, 0, 0]))  # 0.3 m/s from rest in one tick
    assert any(line.startswith("velocity of moves in x: 0.3") for line in found(robot))


def test_a_jump_at_the_end_of_a_stop_is_found_though_the_ticks_would_allow_it(robot):
    ramp(robot)
    end = robot.target[0]
    robot.status("STOPPED", "WATCHDOG")
    robot.rest(0.2)
    robot.follow(end + np.array([0.02, 0, 0]), epoch=2, skip=5)
    assert found(robot)[0].startswith("velocity of moves in x: 0.5")
    assert len(list(measure.runs(measure.load(robot.writer.path)))) == 2


def test_an_old_command_after_a_newer_one_is_found(robot):
    for _ in range(3):
        robot.follow(AT)
    robot.sequence -= 2
    robot.follow(AT)
    assert found(robot) == ["command 2 was followed after command 3"]


def test_refused_commands_and_other_sessions_are_kept_apart(robot):
    ramp(robot)
    robot.follow([np.nan] * 3, refused="not finite")
    robot.rest()
    robot.sequence = 0  # another master counts anew
    robot.follow(robot.target[0], session=2)
    log = log_of(robot)
    assert measure.violations(log, ROBOT) == []
    assert [len(run.commands) for run in measure.runs(log)] == [21, 1]


@given(st.lists(st.booleans(), min_size=60, max_size=60))
def test_lost_commands_never_look_like_a_broken_limit(kept):
    """Of a motion at its limits, whatever was lost."""
    ticks = np.flatnonzero([True, *kept, True]) * DT
    for order, limit, values in (
        (1, 0.25, 0.25 * ticks),
        (2, 9.0, 4.5 * ticks**2),
        (3, 60.0, 10.0 * ticks**3),
    ):
        if len(ticks) > order:
            most = np.abs(measure.derivative(values[:, None], ticks, order)).max()
            assert most <= limit * (1 + 1e-6)
    # and what is bounded on the whole grid is bounded on any part of it
    grid = np.arange(62) * DT
    wave = np.sin(40 * grid) + 0.3 * np.cos(65 * grid)
    for order in (1, 2, 3):
        whole = np.abs(measure.derivative(wave[:, None], grid, order)).max()
        some = np.interp(ticks, grid, wave)
        if len(ticks) > order:
            assert np.abs(measure.derivative(some[:, None], ticks, order)).max() <= whole * (1 + 1e-9)


def test_a_broken_limit_shows_in_spite_of_a_gap(robot):
    ramp(robot, ticks=10, most=0.2)
    start = robot.target[0]
    robot.follow(start, skip=2)
    robot.follow(start + np.array([0.035, 0, 0]), skip=2)  # 0.29 m/s for three ticks
    assert found(robot)[0].startswith("velocity of moves in x: 0.29")


@given(st.integers(0, 2**32 - 1))
def test_turns_against_scipy(seed):
    rotations = Rotation.random(5, rng=np.random.default_rng(seed))
    quats = np.roll(rotations.as_quat(), 1, axis=1)
    want = (rotations[1:] * rotations[:-1].inv()).as_rotvec()
    np.testing.assert_allclose(measure.turns(3.0 * quats), want, atol=1e-6)


# -- what happened after a moment ----------------------------------------------------------------------------------------


def test_the_figures_after_a_fault_are_those_that_were_written(robot):
    robot.status("FOLLOWING")
    for i in range(5):
        robot.follow(AT + np.array([0.001 * i, 0, 0]))
        robot.rest(0.0, 0.1)
    moment = robot.now
    robot.rest(0.1, speed=0.1)
    robot.follow(AT + np.array([0.005, 0, 0]), epoch=2, tick=1)  # 100 ms + 1 ns after: the last change, and a new epoch
    robot.rest(0.06, speed=0.05)
    robot.follow(AT + np.array([0.005, 0, 0]), epoch=2, tick=1)
    robot.follow(AT + np.array([0.009, 0, 0]), epoch=2, tick=1, refused="too far")
    robot.status("STOPPED", "WATCHDOG")
    stopped = robot.now
    robot.rest(0.04, speed=0.011)
    robot.rest(0.04, speed=0.009)
    log = log_of(robot)
    motion = measure.after(log, moment)
    assert motion.moved == motion.held == pytest.approx(0.1, abs=1e-6)
    assert motion.stopped == (stopped - moment) / 1e9
    assert motion.rested == pytest.approx(0.204, abs=1e-6)  # the first record after 10 slow ones of 40 ms
    cut = measure.after(log, moment, moment + 50_000_000)
    assert cut.moved is None and cut.stopped is None and cut.rested is None


def test_a_robot_that_never_moved_is_at_rest_at_once(robot):
    moment = robot.now
    robot.follow(AT)
    robot.follow(AT)
    motion = measure.after(log_of(robot), moment)
    assert motion.moved is None and motion.held is None and motion.stopped is None
    assert motion.rested == 0.0


def test_a_stall_is_the_gap_beyond_the_usual_one(robot):
    moment = robot.now
    robot.rest(0.1)
    robot.now += 30_000_000
    robot.rest(0.1)
    log = log_of(robot)
    assert measure.stall(log, moment, 1.0) == pytest.approx(0.03)
    assert measure.stall(log, moment, 0.05) == 0.0


def test_the_fastest_window_by_the_robots_own_clock(robot):
    robot.rest(0.2)
    for i in range(3):  # 3 commands in a burst, 6 mm each: 18 mm at once, whatever their ticks say
        robot.follow(AT + np.array([0, 0.006 * (i + 1), 0]), tick=1000)
    robot.rest(0.3)
    robot.follow(robot.target[0] + np.array([0, 0.01, 0]))
    log = log_of(robot)
    assert measure.fastest(log, 0.1) == pytest.approx(0.18, rel=1e-5)
    assert measure.fastest(log, 1.0) == pytest.approx(0.028, rel=1e-5)


def test_a_log_that_ends_in_half_a_record_is_read_to_there(robot):
    ramp(robot)
    robot.rest()
    robot.writer.close()
    path = robot.writer.path
    path.write_bytes(path.read_bytes()[:-7])
    assert len(measure.load(path).commands) == 21
