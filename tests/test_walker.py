"""The randomised physics, delays, pushes and sensors of robots on legs, against mechanics."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from scipy import stats
from scipy.spatial.transform import Rotation
from torch import Tensor
from walkers import CALM, DT, FRICTION, GRAVITY, HOME, TASK, give, make, make_engine, put, start_at

from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.fresh import FreshStarts
from embodied.spec.errors import BadInput


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


def test_strength_is_the_most_that_motors_give() -> None:
    """Targets far away ask for more than there is: the forces are the limits, scaled."""
    engine = make_engine(TASK, 3)
    put(engine, 1.0)
    engine.write("ctrl", (HOME + 50.0).expand(3, -1))
    give(engine, strength=[1.0, 0.9, 1.1])
    limits = [joint.effort for joint in TASK.spec.robot.joints]
    np.testing.assert_allclose(engine.read("actuator_force").numpy(), np.outer([1.0, 0.9, 1.1], limits), rtol=1e-6)


# -- rough ground --------------------------------------------------------------------------------------------------------


def test_rough_ground_is_bumps_of_the_height_asked_for_as_far_as_anyone_walks() -> None:
    task = make(CALM, {"ahead": 1.0, "sideways": 0.0}, rough=0.08, episode_s=5.0)
    heights = task.walker.ground.heights
    # 1 m of starts, 1.2 x 5 m of walking and 1 m to spare on either side, every 5 cm
    assert heights.shape == (321, 321) and task.walker.ground.origin == (-8.0, -8.0)
    knots = heights[::4, ::4].double().numpy()
    assert stats.kstest(knots.ravel() / 0.08, "uniform").pvalue > 1e-3
    between = (knots[:, 1:] + knots[:, :-1]) / 2
    np.testing.assert_allclose(heights[::4, 2::4], between, atol=1e-6)
    data = mujoco.MjData(task.model)
    mujoco.mj_kinematics(task.model, data)
    geom, at = np.zeros(1, np.int32), heights[100, 200]
    place = np.array([-8.0 + 200 * 0.05, -8.0 + 100 * 0.05, 5.0])
    down = mujoco.mj_ray(task.model, data, place, np.array([0.0, 0.0, -1.0]), None, 1, -1, geom)
    assert 5.0 - down == pytest.approx(float(at), abs=1e-5)


def test_robots_start_above_rough_ground_and_stand_on_it() -> None:
    task = make(CALM, rough=0.05)
    env = FreshStarts(make_engine(task, 64), task, randomise=False)
    env.reset(0)
    truth = task.walker.truth(env.engine)
    xy = truth["trunk_pos"][:, :2]
    # legs are bent by up to 0.1 rad: a foot may be beside the place whose height was looked up
    assert float(truth["clearance"].min()) > -0.005 and float(xy.abs().max()) < 1.0 and float(xy.std()) > 0.4
    for _ in range(100):
        _, _, terminated, _, _ = env.step(torch.zeros(64, 12))
        assert not bool(terminated.any())
    truth = task.walker.truth(env.engine)
    assert float(truth["clearance"].amin(-1).abs().max()) < 0.01  # on the ground, not in it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rough": -0.1}, r"task.rough=-0.1: expected 0 \(flat\) to 0.3 m"),
        ({"rough": 0.1, "episode_s": 100.0}, "task.rough on 272 m x 272 m of ground: shorten task.episode_s"),
    ],
)
def test_ground_that_cannot_be_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        make(**change)
