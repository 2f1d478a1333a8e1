"""Walking as a velocity command says: commands, gait, reward and falls, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.transform import Rotation
from torch import Tensor
from walkers import CALM, DT, HOME, TASK, make, make_engine, put, start_at

from embodied.sim.fresh import FreshStarts
from embodied.spec.errors import BadInput

# -- commands ------------------------------------------------------------------------------------------------------------


def test_commands_are_drawn_as_declared() -> None:
    task = make(command={"ahead": 0.8, "sideways": 0.4, "turn": 1.2, "stand": 0.25})
    env = FreshStarts(make_engine(task, 2000), task, randomise=False)
    obs = env.reset(0)
    asked = env.state_dict()["state"]["request"].double().numpy()
    still = (asked == 0).all(1)
    assert abs(still.mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
    for column, most in enumerate((0.8, 0.4, 1.2)):
        assert np.abs(asked[:, column]).max() <= most
        assert stats.kstest(asked[~still, column], "uniform", (-most, 2 * most)).pvalue > 1e-3
    np.testing.assert_allclose(obs["policy"][:, -3:], asked, atol=1e-6)  # the policy is told


@pytest.mark.parametrize("randomise", [True, False])
def test_commands_change_and_pushes_come_in_training_alone(randomise: bool) -> None:
    task = make({**CALM, "push": 0.01, "push_s": 0.2}, {"change_s": 0.4, "stand": 0.0})
    env = FreshStarts(make_engine(task, 64), task, randomise=randomise)
    before, changes, pushes = env.reset(0)["policy"][:, -3:], 0, 0
    for _ in range(40):
        pushes += int(env.engine.read("xfrc_applied").flatten(1).any(1).sum())
        obs, _, terminated, truncated, _ = env.step(torch.zeros(64, 12))
        assert not bool((terminated | truncated).any())
        now = obs["policy"][:, -3:]
        changes += int((now != before).any(1).sum())
        before = now
    for count, mean_s in ((changes, 0.4), (pushes, 0.2)):
        chance = DT / mean_s if randomise else 0.0
        assert abs(count - chance * 64 * 40) <= 4 * math.sqrt(64 * 40 * chance * (1 - chance))


def test_a_command_is_followed_in_the_trunks_frame() -> None:
    """Turned to the left by 90 degrees, who moves along the world's x goes to its own right."""
    engine = make_engine(TASK, 1)
    put(engine, 0.3, (math.sqrt(0.5), 0.0, 0.0, math.sqrt(0.5)))
    velocity = torch.zeros(1, 18, dtype=torch.float64)
    velocity[0, :6] = torch.tensor([0.5, 0.1, 0.0, 0.0, 0.0, 0.7])
    engine.write("qvel", velocity)
    engine.forward()
    truth = TASK.walker.truth(engine)
    np.testing.assert_allclose(truth["velocity"], [[0.1, -0.5, 0.0]], atol=1e-6)
    for asked, error in (([0.1, -0.5, 0.7], 0.0), ([0.5, 0.1, 0.7], math.hypot(0.4, 0.6)), ([0.1, -0.2, 0.2], 0.3)):
        truth["request"] = torch.tensor([asked])
        state = ideal()[1]
        TASK.judge(truth, state)
        errors = TASK.errors(truth, state)
        np.testing.assert_allclose(errors["velocity_error_m_s"], [error], atol=1e-6)
        np.testing.assert_allclose(errors["turn_error_rad_s"], [0.7 - asked[2]], atol=1e-6)


def ideal(count: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Truth and state of a robot that stands in its rest pose, at no cost, as it was asked to."""
    engine, generator = make_engine(TASK, count), torch.Generator().manual_seed(0)
    put(engine, TASK.spec.robot.height)
    factors = TASK.randomise(engine, torch.ones(count, dtype=torch.bool), generator, False)
    state = TASK.start(engine, factors, generator) | {"elapsed": torch.zeros(count), "request": torch.zeros(count, 3)}
    truth, _ = TASK.look(engine, state, generator)
    return truth | {"torques": torch.zeros(count, 12), "clearance": torch.zeros(count, 4)}, state


def reward_of(smooth: tuple[float, ...] = (0.0, 0.0, 0.0), **changes: Tensor) -> float:
    truth, state = ideal()
    return float(TASK.judge(truth | changes, state | {"smooth": torch.tensor([smooth])})[0])


def test_reward_is_following_less_the_weighted_efforts() -> None:
    weights, best = TASK.options.reward, reward_of()
    assert best == pytest.approx(2 * weights.velocity + 2 * weights.turn)
    following = math.exp(-1.8) + 0.7, math.exp(-0.4) + 0.9  # errors of 0.3 m/s and of 0.2 rad/s
    going = {"velocity": torch.tensor([[-0.3, 0.0, 0.0]]), "gyro": torch.tensor([[0.0, 0.0, 0.2]])}
    off = reward_of((-0.3, 0.0, 0.2), **going)
    assert off == pytest.approx(weights.velocity * following[0] + weights.turn * following[1])
    # it has just begun: of that, a quarter of a second's smoothing shows 8 %
    swaying = math.exp(-1.8) + 1 - 0.08 * 0.3, math.exp(-0.4) + 1 - 0.08 * 0.1
    assert reward_of(**going) == pytest.approx(weights.velocity * swaying[0] + weights.turn * swaying[1])
    costs = {
        "torque": ({"torques": torch.full((1, 12), 2.0)}, 12 * 4.0),
        "acceleration": ({"joint_vel": torch.full((1, 12), 0.1)}, 12 * (0.1 / DT) ** 2),
        "bounce": ({"velocity": torch.tensor([[0.0, 0.0, 0.3]])}, 0.09),
        "roll": ({"gyro": torch.tensor([[0.5, -1.0, 0.0]])}, 1.25),
        "pose": ({"joint_pos": HOME.float()[None] + 0.1}, 12 * 0.01),
        "tilt": ({"trunk_quat": torch.tensor([[math.cos(0.05), math.sin(0.05), 0.0, 0.0]])}, math.sin(0.1) ** 2),
    }
    for name, (change, effort) in costs.items():
        assert best - reward_of(**change) == pytest.approx(getattr(weights, name) * effort, rel=5e-3, abs=1e-6), name
    truth, state = ideal()
    state["action_rate"] = torch.tensor([0.5])
    assert best - float(TASK.judge(truth, state)[0]) == pytest.approx(0.5 * weights.action_rate, abs=1e-6)
    truth |= {"torques": torch.full((1, 12), -2.0), "joint_vel": torch.full((1, 12), 3.0)}
    assert TASK.walker.power(truth).tolist() == [72.0]


def test_the_error_is_averaged_over_the_episode_for_success() -> None:
    truth, state = ideal(2)
    for step, error in enumerate(([0.3, 0.3], [0.0, 0.02], [0.14, 0.14])):
        truth["velocity"] = torch.nn.functional.pad(torch.tensor(error)[:, None], (0, 2))
        state["elapsed"] = torch.full((2,), (step + 1) / 3)
        _, success, _ = TASK.judge(truth, state)
    assert success.tolist() == [True, False]  # means of 0.1467 and 0.1533 m/s
    np.testing.assert_allclose(TASK.errors(truth, state)["velocity_error_m_s"], [0.44 / 3, 0.46 / 3], rtol=1e-5)
    truth["height"] = torch.tensor([0.1, 0.1])
    assert not bool(TASK.judge(truth, state)[1].any())


# -- gait ----------------------------------------------------------------------------------------------------------------


def landings(trajectory: list[list[int]]) -> list[list[float]]:
    """What `landed` says along the way of four feet: 1 is in the air."""
    truth, state = ideal()
    return [TASK.walker.landed(truth | {"clearance": 0.05 * torch.tensor([up])}, state)[0].tolist() for up in trajectory]


def test_the_time_in_the_air_is_told_when_a_foot_lands() -> None:
    nothing = [0.0] * 4
    assert landings([[0, 0, 0, 0]] * 5) == [nothing] * 5
    assert landings([[1, 1, 1, 1]] * 50) == [nothing] * 50  # who hangs in the air has not landed
    for steps in range(1, 15):
        path = [[0, 0, 0, 0], *[[1, 0, 0, 0]] * steps, [0, 0, 0, 0], [0, 0, 0, 0]]
        *before, landed, after = landings(path)
        assert before == [nothing] * (steps + 1) and after == nothing
        # it left the ground within one control step and came back within another
        np.testing.assert_allclose(landed, [(steps + 1) * DT, 0, 0, 0], atol=1e-6)
    pair = landings([[1, 0, 0, 1]] * 10 + [[0, 0, 0, 1], [0, 0, 0, 0]])
    np.testing.assert_allclose(pair[10:], [[11 * DT, 0, 0, 0], [0, 0, 0, 12 * DT]], atol=1e-6)
    truth, state = ideal()
    TASK.walker.landed(truth | {"clearance": torch.tensor([[0.004, 0.006, -0.01, 0.5]])}, state)
    assert (state["air_s"] > 0).tolist() == [[False, True, False, True]]  # what is below 5 mm touches


def test_an_episodes_mean_swing_is_that_of_the_feet_that_landed() -> None:
    truth, state = ideal()
    for up in ([1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]):
        TASK.judge(truth | {"clearance": 0.05 * torch.tensor([up])}, state)
    np.testing.assert_allclose(TASK.errors(truth, state)["swing_s"], [(3 + 5) / 2 * DT], rtol=1e-5)


def test_a_trot_is_one_diagonal_after_the_other() -> None:
    """FR, FL, RR, RL: the feet of FR and RL are 8 cm high a quarter of half a second after the beginning."""
    truth, state = ideal()
    up, down = torch.tensor([[0.08, 0.0, 0.0, 0.08]]), torch.tensor([[0.0, 0.08, 0.08, 0.0]])
    for time, feet in ((0.0, 0 * up), (0.125, up), (0.25, 0 * up), (0.375, down), (0.625, up), (0.0417, up / 2)):
        state["time"] = torch.full((1, 1), time)
        assert float(TASK.walker.trot(truth | {"clearance": feet}, state)) == pytest.approx(1.0, abs=1e-3)
    state["time"] = torch.full((1, 1), 0.125)
    assert float(TASK.walker.trot(truth | {"clearance": down}, state)) == pytest.approx(1 - 4 / (4 / math.pi), rel=1e-5)
    times = (torch.arange(1000)[:, None] + 0.5) / 2000  # over one period
    standing = TASK.walker.trot({"clearance": torch.zeros(1000, 4)}, {"time": times})
    assert float(standing.mean()) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("axis", ["x", "y"])
def test_fallen_is_tilted_by_60_degrees_or_down_on_the_ground(axis: str) -> None:
    tilts = [0, 59, -59, 61, -61, 120, 180]
    turns = Rotation.from_euler("z" + axis, [(77, tilt) for tilt in tilts], degrees=True)
    quats = torch.tensor(np.roll(turns.as_quat(), 1, axis=1), dtype=torch.float32)
    fallen = TASK.walker.fallen(ideal(len(tilts))[0] | {"trunk_quat": quats})
    assert fallen.tolist() == [abs(tilt) > 60 for tilt in tilts]
    assert TASK.walker.fallen(ideal(2)[0] | {"height": torch.tensor([0.121, 0.119])}).tolist() == [False, True]


def test_a_fall_ends_the_episode_and_is_charged_once() -> None:
    task = make(CALM)
    env = start_at(task, 2, TASK.spec.robot.height)
    env.bank.rows[0, 4:8] = torch.tensor([0.0, 1.0, 0.0, 0.0])  # behind the time comes qpos: on its back
    env.reset(0)
    _, reward, terminated, truncated, info = env.step(torch.zeros(2, 12))
    assert terminated.tolist() == info["failure"].tolist() == [True, False] and not bool(truncated.any())
    assert float(reward[0]) < -task.options.reward.fall + 2.5 and float(reward[1]) > -1.0


def test_doing_nothing_stands_for_an_episode_and_succeeds_where_that_was_asked() -> None:
    task = make(command={"stand": 0.4})
    env = FreshStarts(make_engine(task, 20), task, randomise=False)
    asked = env.reset(0)["policy"][:, -3:-1].norm(dim=1)
    for step in range(500):
        _, _, terminated, truncated, info = env.step(torch.zeros(20, 12))
        assert not bool(terminated.any()) and bool(truncated.all()) == (step == 499)
    clear = (asked - 0.15).abs() > 0.02  # starts move a little, and who stands creeps
    assert torch.equal(info["success"][clear], asked[clear] < 0.15)
    assert 4 < int(info["success"].sum()) < 16 and int(clear.sum()) > 16


@pytest.mark.parametrize(
    ("where", "change", "said"),
    [
        ("task", {"episode_s": 0.5}, "task.episode_s=0.5: expected 1 to 3600 s"),
        ("command", {"stand": 1.5}, r"task.command=.*'stand': 1.5"),
        ("ranges", {"friction": [0.0, 1.0]}, r"task.randomise.friction=\[0.0, 1.0\]: expected \[low, high\] with 0 < low"),
        ("ranges", {"gains": [1.1, 0.9]}, r"task.randomise.gains=\[1.1, 0.9\]"),
        ("ranges", {"delay": 2.0}, "delay=2.0 must be a share"),
        ("ranges", {"push_s": 0.0}, "push_s=0.0 s positive"),
    ],
)
def test_impossible_options_are_refused(where: str, change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(**change) if where == "task" else make(**{where: change})
