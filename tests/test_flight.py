"""The quadrotor and its tasks, against the published plant, mechanics and closed forms.

Figures: "Learning to Fly in Seconds" (arXiv 2311.13081) and the authors' parameters of the Crazyflie in rl_tools.
"""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.transform import Rotation
from torch import Tensor

from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank
from embodied.sim.robots.crazyflie import CrazyflieOptions, crazyflie
from embodied.sim.robots.rotorcraft import build_rotorcraft, hover_speed
from embodied.sim.samplers.fixed import Fixed
from embodied.sim.tasks.flight import Flight, FlightBankOptions, FlightRewardOptions, HoverOptions, TrackOptions, hover, track
from embodied.spec.errors import BadInput

MASS, INERTIA, GRAVITY = 0.027, np.array([3.85e-6, 3.85e-6, 5.9675e-6]), 9.81
THRUST, TORQUE, TOP, DELAY = 3.16e-10, 0.005964552, 21702.0, 0.15
ROTORS = [(0.028, -0.028, -1), (-0.028, -0.028, 1), (-0.028, 0.028, -1), (0.028, 0.028, 1)]  # x, y [m], sign of the yaw torque
HOVER = 0.334  # action

CRAFT = crazyflie(CrazyflieOptions())
MODEL = build_rotorcraft(CRAFT).compile()
UPRIGHT = [1.0, 0.0, 0.0, 0.0]


def make(kind: str = "hover", delay: float = DELAY, **changes: Any) -> Flight:
    options, build = (HoverOptions(), hover) if kind == "hover" else (TrackOptions(), track)
    for name, value in changes.items():
        setattr(options, name, value)
    return build(options, crazyflie(CrazyflieOptions(motor_delay=delay)))


def make_engine(task: Flight, worlds: int) -> CpuEngine:
    engine = CpuEngine(task.model, worlds, task.parameters, threads=1)
    engine.bind(task.fields)
    return engine


def start_at(task: Flight, qpos: list[list[float]], qvel: list[list[float]]) -> WorldsEnv:
    """Worlds that start there, nominal, with rotors at the speed that carries the weight."""
    engine = make_engine(task, len(qpos))
    engine.write("qpos", torch.tensor(qpos, dtype=torch.float64))
    engine.write("qvel", torch.tensor(qvel, dtype=torch.float64))
    if engine.read("act").shape[1]:
        engine.write("act", torch.full((len(qpos), 4), MASS * GRAVITY / 4, dtype=torch.float64))
    tags = torch.zeros(len(qpos), dtype=torch.int64)
    bank = ResetBank(engine.get_state(), tags, ("there",), engine.signature, "there")
    return WorldsEnv(engine, task, Fixed(len(qpos), engine.device), bank, randomise=False, stagger=False)


def readings(task: Flight, count: int, **values: Any) -> dict[str, Tensor]:
    """Truth: upright and still at the goal, but for `values`."""
    usual = {"body_pos": [0.0] * 3, "body_quat": UPRIGHT, "body_linvel": [0.0] * 3, "gyro": [0.0] * 3, "goal_pos": [0.0] * 3}
    return {name: torch.tensor(values.get(name, x), dtype=torch.float32).expand(count, -1) for name, x in usual.items()}


# -- the plant -----------------------------------------------------------------------------------------------------------


def test_thrust_to_weight_and_the_hovering_action_are_the_published_ones() -> None:
    assert pytest.approx(2.25, abs=0.005) == 4 * THRUST * TOP**2 / (MASS * GRAVITY)
    task = make()
    assert task.rest_action == pytest.approx(HOVER, abs=5e-4)
    assert hover_speed(CRAFT) == pytest.approx(14475.809152959684)  # rl_tools
    assert float(MODEL.actuator_ctrlrange[0, 1]) == pytest.approx(THRUST * TOP**2)
    assert 4 * MODEL.actuator_ctrlrange[0, 1] / (MODEL.body_subtreemass[0] * GRAVITY) == pytest.approx(2.25, abs=0.005)
    assert (task.spec.robot.substeps * task.model.opt.timestep, task.spec.robot.control_dt) == (0.01, 0.01)


thrusts = st.lists(st.floats(0.0, 0.1), min_size=4, max_size=4).map(np.array)
vectors = st.lists(st.floats(-3.0, 3.0), min_size=3, max_size=3).map(np.array)


@given(thrust=thrusts, turn=vectors, velocity=vectors, spin=vectors)
@settings(max_examples=50, deadline=None)
def test_accelerations_are_newtons_and_eulers(thrust, turn, velocity, spin) -> None:
    data = mujoco.MjData(MODEL)
    attitude = Rotation.from_rotvec(turn)
    data.qpos[:] = [1.0, -2.0, 3.0, *np.roll(attitude.as_quat(), 1)]
    data.qvel[:] = [*velocity, *spin]
    data.act[:] = thrust
    mujoco.mj_forward(MODEL, data)
    linear = attitude.apply([0, 0, thrust.sum()]) / MASS - [0, 0, GRAVITY]
    # r x F of a force along z at (x, y), and the air's torque against the rotor's turning
    moment = sum(f * np.array([y, -x, sign * TORQUE]) for f, (x, y, sign) in zip(thrust, ROTORS, strict=True))
    angular = (moment - np.cross(spin, INERTIA * spin)) / INERTIA
    np.testing.assert_allclose(data.qacc, [*linear, *angular], atol=1e-8, rtol=1e-9)


def test_hovering_rotors_hold_the_robot_in_place() -> None:
    task = make(disturb=False)
    env = start_at(task, [[0.1, -0.2, 0.3, *UPRIGHT]], [[0.0] * 6])
    env.reset(0)
    for _ in range(100):
        _, _, terminated, _, info = env.step(torch.full((1, 4), task.rest_action))
        assert not bool(terminated) and not bool(info["invalid"])
    # in a second a millionth of g would be 5 um
    np.testing.assert_allclose(env.engine.read("qpos")[0], [0.1, -0.2, 0.3, *UPRIGHT], atol=5e-6)
    np.testing.assert_allclose(env.engine.read("qvel")[0], 0, atol=1e-5)


def test_the_rotors_answer_is_exactly_first_order() -> None:
    data = mujoco.MjData(MODEL)
    data.ctrl[:] = target = np.array([0.02, 0.05, 0.1, 0.14])
    for step in range(1, 201):
        mujoco.mj_step(MODEL, data)
        np.testing.assert_allclose(data.act, target * (1 - math.exp(-step * 0.005 / DELAY)), rtol=1e-12)
    data.ctrl[:] = 0.0
    start = data.act.copy()
    mujoco.mj_step(MODEL, data, 30)
    np.testing.assert_allclose(data.act, start * math.exp(-1.0), rtol=1e-12)


def test_an_action_is_a_speed_whose_thrust_comes_with_the_delay() -> None:
    """-1 is rest, 1 the top speed, and thrust goes by the square of what is between."""
    shares = np.array([0.0, 0.25, 0.5, 1.0])
    task = make(disturb=False)
    env = start_at(task, [[0.0, 0.0, 0.0, *UPRIGHT]], [[0.0] * 6])
    env.reset(0)
    env.step(torch.tensor(2 * shares[None] - 1, dtype=torch.float32))
    wanted = THRUST * (shares * TOP) ** 2
    before = MASS * GRAVITY / 4
    thrust = wanted + (before - wanted) * math.exp(-0.01 / DELAY)
    np.testing.assert_allclose(env.engine.read("ctrl")[0], wanted, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(env.engine.read("act")[0], thrust, rtol=1e-6)


def test_without_delay_thrust_is_there_at_once() -> None:
    task = make(delay=0.0, disturb=False)
    assert task.model.na == 0
    env = start_at(task, [[0.0, 0.0, 0.0, *UPRIGHT]] * 2, [[0.0] * 6] * 2)
    env.reset(0)
    obs, *_ = env.step(torch.tensor([[1.0] * 4, [-1.0] * 4]))
    up = 4 * THRUST * TOP**2 / MASS - GRAVITY  # 1.25 g
    np.testing.assert_allclose(env.engine.read("qvel")[:, 2], [0.01 * up, -0.01 * GRAVITY], rtol=1e-5)
    np.testing.assert_allclose(obs["critic"][:, 18:22], [[1.0] * 4, [0.0] * 4], atol=1e-6)  # what the critic sees of it


def test_the_disturbance_is_a_constant_force_in_the_world_and_a_torque() -> None:
    """Against steps of v += a dt, x += v dt; the robot is turned by 90 degrees, so that its axes are not the world's."""
    task = make(box=100.0)
    half = math.sqrt(0.5)
    env = start_at(task, [[0.0, 0.0, 0.0, half, 0.0, 0.0, half]], [[0.0] * 6])
    env.reset(0)
    force, torque = np.array([0.02, -0.01, 0.005]), 1e-6
    saved = env.state_dict()
    saved["state"]["disturbance"] = torch.tensor([[*force, 0.0, 0.0, torque]])
    env.load_state_dict(saved)
    for _ in range(50):
        env.step(torch.full((1, 4), task.rest_action))
    n, dt = 100, 0.005
    np.testing.assert_allclose(env.engine.read("qvel")[0, :3], force / MASS * n * dt, rtol=1e-3)
    np.testing.assert_allclose(env.engine.read("qpos")[0, :3], force / MASS * dt**2 * n * (n + 1) / 2, rtol=1e-3)
    np.testing.assert_allclose(env.engine.read("qvel")[0, 3:], [0, 0, torque / INERTIA[2] * n * dt], rtol=1e-3, atol=1e-4)


def test_disturbances_are_spread_as_published_and_can_be_left_out() -> None:
    task = make()
    env = FreshStarts(make_engine(task, 4096), task, randomise=False)
    env.reset(0)
    drawn = env.state_dict()["state"]["disturbance"].numpy()
    for column in range(6):
        sigma = MASS * GRAVITY / (20 if column < 3 else 10000)
        assert stats.kstest(drawn[:, column] / sigma, "norm").pvalue > 1e-3
    # part of what the critic sees, in units of its spread
    np.testing.assert_allclose(env.observation["critic"][:, 26:32].std(0), np.ones(6), atol=0.06)
    calm = make(disturb=False)
    env = start_at(calm, [[0.0, 0.0, 0.0, *UPRIGHT]], [[0.0] * 6])
    env.reset(0)
    assert not env.state_dict()["state"]["disturbance"].any()


# -- where episodes start ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [90.0, 180.0])
def test_starts_are_spread_as_declared(most: float) -> None:
    task = make(bank=FlightBankOptions(size=4000, max_angle=most))
    engine = make_engine(task, 1024)
    bank = task.make_bank(engine)
    assert len(bank.rows) == 4000
    whole = make_engine(task, 4000)
    whole.set_state(bank.rows)
    qpos, qvel, act = (whole.read(name).double().numpy() for name in ("qpos", "qvel", "act"))
    turns = Rotation.from_quat(np.roll(qpos[:, 3:], -1, axis=1))
    angle = np.degrees(turns.magnitude())
    still = (np.abs(qpos[:, :3]).max(1) == 0) & (np.abs(qvel).max(1) == 0) & (angle == 0)
    assert abs(still.mean() - 0.1) < 4 * math.sqrt(0.1 * 0.9 / 4000)
    for column in range(3):
        assert stats.kstest(qpos[~still, column], "uniform", (-0.2, 0.4)).pvalue > 1e-3
        axis = turns.as_rotvec()[~still, column] / np.radians(angle[~still])
        assert stats.kstest(axis, "uniform", (-1, 2)).pvalue > 1e-3  # a coordinate of a uniform direction is uniform
    for column in range(6):
        assert stats.kstest(qvel[~still, column], "uniform", (-1, 2)).pvalue > 1e-3
    assert stats.kstest(angle[~still], "uniform", (0, most)).pvalue > 1e-3
    assert angle.max() <= most + 1e-3 and angle.max() > 0.99 * most
    np.testing.assert_allclose(act, MASS * GRAVITY / 4, rtol=1e-6)
    np.testing.assert_allclose(np.degrees(bank.difficulty.numpy()), angle, atol=2e-3)


def test_fresh_starts_are_new_and_follow_their_seed() -> None:
    task = make(bank=FlightBankOptions(size=64))
    engine = make_engine(task, 64)
    bank = task.make_bank(engine).rows
    one, again, other = (task.fresh_starts(engine, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other) and not torch.equal(one, bank)
    assert task.bank_hash("x") != make(bank=FlightBankOptions(size=64, at_rest=0.2)).bank_hash("x")


# -- what an episode is --------------------------------------------------------------------------------------------------


def test_leaving_the_box_by_any_side_is_a_crash_worth_nothing() -> None:
    task = make(disturb=False)
    places = [[0.59, 0, 0], [-0.59, 0, 0], [0, 0.59, 0], [0, -0.59, 0], [0, 0, 0.59], [0, 0, -0.59], [0.59, 0.59, 0.59]]
    outward = [[math.copysign(1.5, x) if x else 0.0 for x in place] for place in places[:-1]] + [[0.0] * 3]
    env = start_at(task, [[*place, *UPRIGHT] for place in places], [[*v, 0.0, 0.0, 0.0] for v in outward])
    env.reset(0)
    _, reward, terminated, truncated, info = env.step(torch.full((7, 4), task.rest_action))
    assert terminated.tolist() == info["failure"].tolist() == [True] * 6 + [False]  # a corner is inside
    assert not bool(truncated.any()) and not bool(info["success"].any())
    assert reward[:6].tolist() == [0.0] * 6 and float(reward[6]) < 2 - 3 * 2.5 * 0.58**2


def test_the_box_moves_with_the_goal() -> None:
    task = make("track")
    state = {"elapsed": torch.tensor([0.5, 0.5])} | {k: torch.zeros(2) for k in ("error_sum", "error_count")}
    state["last_action"] = torch.zeros(2, 4)
    truth = readings(task, 2, goal_pos=[0.4, 0.0, 0.0])
    truth["body_pos"] = torch.tensor([[0.99, 0.0, 0.0], [-0.21, 0.0, 0.0]])
    assert task.judge(truth, state)[2].tolist() == [False, True]


def test_success_is_the_mean_error_over_the_last_half_alone() -> None:
    task = make(episode_s=1.0)
    paths = {"late": (0.5, 0.09), "early": (0.0, 0.11), "both": (0.3, 0.3), "never off": (0.0, 0.0)}
    first, last = torch.tensor(list(paths.values())).T
    state = {name: torch.zeros(4) for name in ("error_sum", "error_count")} | {"last_action": torch.zeros(4, 4)}
    for step in range(1, 101):
        state["elapsed"] = torch.full((4,), step / 100)
        truth = readings(task, 4)
        truth["body_pos"] = torch.nn.functional.pad((first if step <= 50 else last)[:, None], (0, 2))
        _, success, failure = task.judge(truth, state)
        assert not bool(failure.any())
        assert success.tolist() == ([True, False, False, True] if step == 100 else [False] * 4)
    assert state["error_count"].tolist() == [50.0] * 4
    np.testing.assert_allclose(task.errors(truth, state)["position_m"], last, rtol=1e-5)
    # who crashes in the last step has not succeeded
    truth["body_pos"] = torch.full((4, 3), 0.7)
    assert not bool(task.judge(truth, state)[1].any())


@given(place=vectors, turn=vectors, velocity=vectors, action=st.lists(st.floats(-1, 1), min_size=4, max_size=4))
@settings(max_examples=50, deadline=None)
def test_reward_is_the_published_formula(place, turn, velocity, action) -> None:
    task, nearer = (make(box=100.0, reward=FlightRewardOptions(near=near)) for near in (0.0, 1.5))
    quat = np.roll(Rotation.from_rotvec(turn).as_quat(), 1)
    state = {name: torch.zeros(1) for name in ("elapsed", "error_sum", "error_count")}
    state["last_action"] = torch.tensor([action])
    truth = readings(task, 1, body_pos=place, body_quat=quat, body_linvel=velocity, gyro=[9.0, 9.0, 9.0])
    hovering = 2 * hover_speed(CRAFT) / TOP - 1
    away = np.sum((np.array(action) - hovering) ** 2)
    cost = 5 * place @ place + 5 * (1 - quat[0] ** 2) + 0.01 * velocity @ velocity + 0.01 * away
    assert float(task.judge(truth, state)[0]) == pytest.approx(2 - 0.5 * cost, abs=1e-4)
    # and, of ours, something for being near
    near = 1.5 * math.exp(-np.linalg.norm(place) / 0.1)
    assert float(nearer.judge(truth, state)[0]) == pytest.approx(2 - 0.5 * cost + near, abs=1e-4)


# -- what the policy sees ------------------------------------------------------------------------------------------------


def test_the_policy_sees_its_last_32_actions_the_newest_first() -> None:
    task = make(disturb=False, box=100.0, episode_s=1.0, history=32)
    env = start_at(task, [[0.0, 0.0, 0.0, *UPRIGHT]], [[0.0] * 6])
    seen = env.reset(0)["policy"]
    assert seen.shape == (1, 146)  # 3 + 9 + 3 + 3 + 32 * 4, as published
    past = [[task.rest_action] * 4] * 32
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 101):
        np.testing.assert_allclose(seen[0, 18:].view(32, 4), past, rtol=1e-6)
        action = 2.4 * torch.rand(1, 4, generator=generator) - 1.2
        past = [action[0].clamp(-1, 1).tolist(), *past[:-1]]
        obs, *_, info = env.step(action)
        seen = info["final_obs"]["policy"] if step < 100 else obs["policy"]
    np.testing.assert_allclose(seen[0, 18:], task.rest_action, rtol=1e-6)  # of a new episode
    assert make(history=0).spec.obs_size == 18


def test_noise_has_the_stated_sigma() -> None:
    task = make()
    engine = make_engine(task, 8192)
    truth, seen = task.look(engine, {}, torch.Generator().manual_seed(0))
    sigmas = {"body_pos": 0.001, "body_linvel": 0.002, "gyro": 0.002}  # published; its matrix entries have 0.001
    for name, sigma in sigmas.items():
        noise = (seen[name] - truth[name]).numpy()
        for column in range(3):
            assert stats.kstest(noise[:, column] / sigma, "norm").pvalue > 1e-3
        assert noise.std() == pytest.approx(sigma, rel=0.02), name
    turn = Rotation.from_quat(np.roll(seen["body_quat"].double().numpy(), -1, axis=1))
    off_diagonal = turn.as_matrix()[:, [0, 0, 1], [1, 2, 2]]
    np.testing.assert_allclose(off_diagonal.std(0), 0.001, rtol=0.04)
    np.testing.assert_allclose(off_diagonal.mean(0), 0, atol=5e-5)
    assert torch.equal(seen["thrust"], truth["thrust"])


def lissajous(task: Flight, state: dict[str, Tensor], time: float) -> dict[str, np.ndarray]:
    state["time"] = torch.full((len(state["rate"]), 1), time, dtype=torch.float64)
    truth, _ = task.look(make_engine(task, len(state["rate"])), state, torch.Generator().manual_seed(0))
    return {name: truth[name].numpy() for name in ("goal_pos", "goal_linvel", "ahead_pos")}


def test_the_goal_goes_by_a_lissajous_curve_with_its_true_velocity() -> None:
    task = make("track")
    amplitude, frequency = np.array([[0.3, -0.4, 0.2], [0.5, 0.2, -0.25]]), np.array([[0.1, 0.2, 0.3], [0.25, 0.15, 0.1]])
    state = {"amplitude": torch.tensor(amplitude), "rate": torch.tensor(2 * math.pi * frequency)}
    for time in (0.0, 0.7, 3.1, 9.99):
        goal = lissajous(task, state, time)
        np.testing.assert_allclose(goal["goal_pos"], amplitude * np.sin(2 * math.pi * frequency * time), atol=1e-9)
        before, after = lissajous(task, state, time - 1e-4), lissajous(task, state, time + 1e-4)
        np.testing.assert_allclose(goal["goal_linvel"], (after["goal_pos"] - before["goal_pos"]) / 2e-4, atol=1e-7)
        np.testing.assert_allclose(goal["ahead_pos"], lissajous(task, state, time + 0.2)["goal_pos"], atol=1e-9)


def test_paths_are_drawn_as_declared_and_followed_from_the_origin() -> None:
    task = make("track", bank=FlightBankOptions(size=64, at_rest=1.0), disturb=False)
    env = FreshStarts(make_engine(task, 2048), task, randomise=False)
    obs = env.reset(0)
    state = env.state_dict()["state"]
    size, rate = state["amplitude"].double().numpy(), state["rate"].double().numpy()
    for column in range(3):
        assert stats.kstest(np.abs(size[:, column]), "uniform", (0.2, 0.3)).pvalue > 1e-3
        assert stats.kstest(rate[:, column] / (2 * math.pi), "uniform", (0.1, 0.2)).pvalue > 1e-3
        assert abs((size[:, column] > 0).mean() - 0.5) < 4 * math.sqrt(0.25 / 2048)
    for step in range(6):
        time = 0.01 * step
        # everyone hovers at the origin while its goal leaves: seen from the goal, in units of 0.3 m, with 1 mm of noise
        goal, to_come = (size * np.sin(rate * t) for t in (time, time + 0.2))
        seen = obs["policy"].double().numpy()
        np.testing.assert_allclose(0.3 * seen[:, :3], -goal, atol=0.006)
        np.testing.assert_allclose(seen[:, 18:21], size * rate * np.cos(rate * time), atol=1e-5)
        np.testing.assert_allclose(0.3 * seen[:, 21:24], to_come - goal, atol=1e-5)
        np.testing.assert_allclose(0.3 * obs["critic"][:, :3], -goal, atol=1e-5)
        obs, *_ = env.step(torch.full((2048, 4), task.rest_action))


# -- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("hover", {"episode_s": 0.5}, "task.episode_s=0.5: expected 1 to 3600 s"),
        ("hover", {"episode_s": math.nan}, "task.episode_s=nan"),
        ("hover", {"box": 0.0}, r"task.box=0.0: expected 0.1 to 100 m"),
        ("hover", {"history": -1}, "task.history=-1"),
        ("hover", {"near": 0.0}, "task.near=0.0"),
        ("hover", {"bank": FlightBankOptions(size=0)}, "task.bank.size=0"),
        ("hover", {"bank": FlightBankOptions(max_angle=181)}, "task.bank.max_angle=181: expected 0 to 180 degrees"),
        ("track", {"bank": FlightBankOptions(at_rest=1.5)}, "task.bank.at_rest=1.5"),
        ("track", {"amplitude": [0.5, 0.2]}, r"task.amplitude=\[0.5, 0.2\]: expected \[low, high\] with 0 < low <= high"),
        ("track", {"frequency": [0.1]}, r"task.frequency=\[0.1\]"),
    ],
)
def test_impossible_options_are_refused(kind: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(kind, **change)


@pytest.mark.parametrize("delay", [-0.1, 1.5, math.nan])
def test_impossible_motors_are_refused(delay: float) -> None:
    with pytest.raises(BadInput, match=r"robot\.motor_delay=.*: expected 0 to 1 s"):
        make(delay=delay)


@pytest.mark.parametrize("name", ["thrust", "mass", "inertia"])
def test_impossible_ranges_are_refused(name: str) -> None:
    options = HoverOptions()
    setattr(options.randomise, name, [0.0, 1.0])
    with pytest.raises(BadInput, match=rf"task\.randomise\.{name}=\[0\.0, 1\.0\]"):
        hover(options, CRAFT)
