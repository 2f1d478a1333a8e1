"""Walking as a velocity command says: commands, gait, pushes and randomised physics, by hand and against mechanics."""

from __future__ import annotations

import math
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.transform import Rotation
from torch import Tensor

from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.resets import ResetBank
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.samplers.fixed import Fixed
from embodied.sim.tasks.locomotion import CommandOptions, Locomotion, LocomotionOptions
from embodied.sim.tasks.walker import WalkerRandomiseOptions
from embodied.spec.errors import BadInput

DT, GRAVITY, FRICTION = 0.02, 9.81, 0.8
CALM: dict[str, Any] = {"friction": [1.0, 1.0], "gains": [1.0, 1.0], "mass": [0.0, 0.0], "centre": [0.0, 0.0]}
CALM |= {"delay": 0.0, "push_s": 1e9}
"""Randomised in name only: nominal physics, nobody pushed."""
NOMINAL = {"friction": 1.0, "mass": 0.0, "centre_x": 0.0, "centre_y": 0.0, "gains": 1.0, "delay": 0.0, "restless": 0.0}


def make(ranges: dict[str, Any] | None = None, command: dict[str, Any] | None = None, **changes: Any) -> Locomotion:
    randomise = WalkerRandomiseOptions(**(ranges or {}))
    options = LocomotionOptions(bank_size=64, command=CommandOptions(**(command or {})), randomise=randomise, **changes)
    return Locomotion(options, go1(Go1Options()))


TASK = make()
HOME = torch.tensor(TASK.spec.robot.home, dtype=torch.float64)


def make_engine(task: Locomotion, worlds: int) -> CpuEngine:
    engine = CpuEngine(task.model, worlds, task.parameters, threads=1)
    engine.bind((*task.fields, "subtree_com"))
    return engine


def start_at(task: Locomotion, worlds: int, height: float) -> WorldsEnv:
    """Worlds that start at rest, in the rest pose, at a height of the trunk [m]; randomised."""
    engine = make_engine(task, worlds)
    put(engine, height)
    tags = torch.zeros(worlds, dtype=torch.int64)
    bank = ResetBank(engine.get_state(), tags, ("there",), engine.signature, "there")
    return WorldsEnv(engine, task, Fixed(worlds, engine.device), bank, stagger=False)


def put(engine: CpuEngine, height: float, quat: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0)) -> None:
    base = torch.tensor([0.0, 0.0, height, *quat], dtype=torch.float64)
    engine.set_state(engine.default_row.expand(engine.num_worlds, -1))
    engine.write("qpos", torch.cat([base, HOME]).expand(engine.num_worlds, -1))
    engine.write("ctrl", HOME.expand(engine.num_worlds, -1))


def give(engine: CpuEngine, **changes: list[float]) -> None:
    """Nominal physics but for `changes`, which have a value for each world."""
    count = engine.num_worlds
    factors = {name: torch.tensor(changes.get(name, [usual] * count)) for name, usual in NOMINAL.items()}
    TASK.walker.set_physics(engine, torch.ones(count, dtype=torch.bool), factors)


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


# -- physics -------------------------------------------------------------------------------------------------------------


def com_velocity(engine: CpuEngine) -> np.ndarray:
    """Of the centre of mass of the whole robot in each world [N, 3], by MuJoCo in a model of its own."""
    data, out = mujoco.MjData(TASK.model), []
    for qpos, qvel in zip(engine.read("qpos"), engine.read("qvel"), strict=True):
        data.qpos[:], data.qvel[:] = qpos, qvel
        mujoco.mj_forward(TASK.model, data)
        mujoco.mj_subtreeVel(TASK.model, data)
        out.append(data.subtree_linvel[0].copy())
    return np.array(out)


def test_a_push_changes_the_velocity_as_stated() -> None:
    """In free fall nothing else does: for one control step a force of m dv / dt, at most `push` in any direction."""
    task = make({**CALM, "push": 0.5, "push_s": DT})
    env = start_at(task, 256, 5.0)
    env.reset(0)
    env.step(torch.zeros(256, 12))
    before, mass = com_velocity(env.engine), float(TASK.model.body_mass.sum())
    env.step(torch.zeros(256, 12))
    force = env.engine.read("xfrc_applied").double().numpy()
    trunk = TASK.model.body("trunk").id
    assert not np.delete(force, trunk, 1).any() and not force[:, trunk, 2:].any()
    gained = com_velocity(env.engine) - before
    np.testing.assert_allclose(gained[:, :2], force[:, trunk, :2] * DT / mass, atol=2e-3)
    np.testing.assert_allclose(gained[:, 2], -GRAVITY * DT, atol=2e-3)
    assert np.abs(gained[:, :2]).max() > 0.45
    assert np.hypot(*gained[:, :2].T).max() < 0.5 + 2e-3


def test_delay_shifts_commands_by_one_step() -> None:
    late, prompt = (start_at(make({**CALM, "delay": share}), 2, 1.0) for share in (1.0, 0.0))
    sent: dict[str, list[Tensor]] = {"late": [], "prompt": []}
    late.reset(0), prompt.reset(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        action = 2 * torch.rand(2, 12, generator=generator) - 1
        for name, env in (("late", late), ("prompt", prompt)):
            env.step(action)
            sent[name].append(env.engine.read("ctrl"))
    assert torch.equal(torch.stack(sent["late"][1:]), torch.stack(sent["prompt"][:-1]))
    np.testing.assert_allclose(sent["late"][0], HOME.expand(2, -1), atol=1e-6)
    scale = np.tile([0.3, 0.6, 0.6], 4)
    np.testing.assert_allclose(sent["prompt"][-1], HOME.numpy() + action.numpy() * scale, atol=1e-6)


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


def test_gains_scale_stiffness_and_damping() -> None:
    engine = make_engine(TASK, 3)
    put(engine, 1.0)
    spin = torch.zeros(3, 18, dtype=torch.float64)
    spin[:, 6:] = 0.5
    engine.write("qvel", spin)
    engine.write("ctrl", (HOME + 0.2).expand(3, -1))
    give(engine, gains=[1.0, 0.9, 1.1])
    force = engine.read("actuator_force").numpy()
    robot = TASK.spec.robot
    nominal = np.array(robot.stiffness) * 0.2 - np.array(robot.damping) * 0.5
    np.testing.assert_allclose(force, np.outer([1.0, 0.9, 1.1], nominal), rtol=1e-5)
    bend = engine.read("qacc")[:, 6:]
    assert bool((bend[1] < bend[0]).all()) and bool((bend[0] < bend[2]).all())


def test_mass_is_added_to_the_trunk() -> None:
    """A force on the trunk in free fall moves the whole by F / m, whatever the legs do."""
    engine, extra = make_engine(TASK, 3), np.array([0.0, 1.5, -0.5])
    put(engine, 1.0)
    give(engine, mass=extra.tolist())
    push = torch.zeros(3, TASK.model.nbody, 6)
    push[:, TASK.model.body("trunk").id, 1] = 20.0
    engine.write("xfrc_applied", push)
    before = engine.read("subtree_com")[:, 0].double().numpy()
    engine.step(4)
    moved = engine.read("subtree_com")[:, 0].double().numpy() - before
    mass = float(TASK.model.body_mass.sum()) + extra
    np.testing.assert_allclose(moved[:, 1], 20.0 / mass * 0.005**2 * 10, rtol=5e-3)
    np.testing.assert_allclose(moved[:, 2], -GRAVITY * 0.005**2 * 10, rtol=5e-3)


def standing(worlds: int) -> CpuEngine:
    """Robots that have come to rest on their feet."""
    engine = make_engine(TASK, worlds)
    put(engine, TASK.spec.robot.height)
    engine.step(400)
    return engine


def test_the_centre_of_mass_moves_and_tips_the_robot() -> None:
    engine = standing(5)
    x, y = [0.0, 0.03, -0.03, 0.0, 0.0], [0.0, 0.0, 0.0, 0.03, -0.03]
    give(engine, centre_x=x, centre_y=y)
    com = engine.read("subtree_com")[:, 0].double().numpy()
    share = float(TASK.model.body_mass[TASK.model.body("trunk").id] / TASK.model.body_mass.sum())
    np.testing.assert_allclose(com[:, :2] - com[0, :2], share * np.array([x, y]).T, atol=5e-5)
    roll, pitch = engine.read("qacc")[:, 3:5].numpy().T
    assert pitch[1] > 0.5 and pitch[2] < -0.5 and roll[3] < -0.5 and roll[4] > 0.5  # towards the weight
    assert abs(pitch[0]) < 0.05 and abs(roll[0]) < 0.05


def test_friction_is_what_slows_a_sliding_robot() -> None:
    """Pushed sideways so that its feet slide, its centre of mass slows down by mu g."""
    factors = [0.1, 0.25, 0.5]
    engine = standing(3)
    sideways = torch.zeros(3, 18, dtype=torch.float64)
    sideways[:, 1] = 2.0
    engine.write("qvel", sideways)
    give(engine, friction=factors)
    engine.step(4)  # the feet start to slide
    fast = com_velocity(engine)[:, 1]
    engine.step(8)
    slowing = (fast - com_velocity(engine)[:, 1]) / 0.04
    np.testing.assert_allclose(slowing, np.array(factors) * FRICTION * GRAVITY, rtol=0.1)


def test_noise_has_the_stated_sigma() -> None:
    engine = make_engine(TASK, 2000)
    put(engine, 1.0)
    engine.forward()
    truth = TASK.walker.truth(engine)
    seen = TASK.walker.noisy(truth, torch.Generator().manual_seed(0))
    for name, sigma in {"gyro": 0.1, "joint_pos": 0.01, "joint_vel": 0.5}.items():
        noise = ((seen[name] - truth[name]) / sigma).double().numpy()
        assert all(stats.kstest(column, "norm").pvalue > 1e-4 for column in noise.T), name
        assert noise.std() == pytest.approx(1, rel=0.03), name
    tilt = Rotation.from_quat(np.roll(seen["trunk_quat"].double().numpy(), -1, axis=1)).as_rotvec()
    np.testing.assert_allclose(tilt.std(0), 2 * 0.02, rtol=0.07)  # half a radian for a quaternion's component
    np.testing.assert_allclose(seen["trunk_quat"].norm(dim=1), 1, atol=1e-6)
    for name in ("velocity", "feet", "height", "clearance", "torques"):
        assert torch.equal(seen[name], truth[name])


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
