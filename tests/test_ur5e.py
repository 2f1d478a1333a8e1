"""The UR5e against what Universal Robots publishes, and the task on it."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scripted import cell, env_from
from worlds import joint_vectors, make_engine

from embodied.deploy.limits import Limits
from embodied.sim.robots.arm import REFERENCE_QUAT, build_arm
from embodied.sim.robots.kinematics import forward, inverse
from embodied.sim.robots.ur5e import Ur5eOptions, ur5e
from embodied.sim.tasks import assembly_starts
from embodied.spec import registry
from embodied.spec.errors import BadInput

ARM = ur5e(Ur5eOptions())
TOOL = 0.06
# Universal Robots, "DH parameters for calculations of kinematics and dynamics", UR5e: a, d, alpha of the standard convention,
# and the mass and centre of mass of each link in the frame that these parameters put at the link's end
PUBLISHED = [
    (0.0, 0.1625, math.pi / 2, 3.761, (0.0, -0.02561, 0.00193)),
    (-0.425, 0.0, 0.0, 8.058, (0.2125, 0.0, 0.11336)),
    (-0.3922, 0.0, 0.0, 2.846, (0.15, 0.0, 0.0265)),
    (0.0, 0.1333, math.pi / 2, 1.37, (0.0, -0.0018, 0.01634)),
    (0.0, 0.0997, -math.pi / 2, 1.3, (0.0, 0.0018, 0.01634)),
    (0.0, 0.0996, 0.0, 0.365, (0.0, 0.0, -0.001159)),
]
# ur_description, config/ur5e/physical_parameters.yaml: xx, yy, zz, xy, xz, yz in the same frames
TENSORS = [
    (0.00700210, 0.00648091, 0.00657286, 0.00000073, -0.00001053, 0.00049994),
    (0.01505885, 0.33388086, 0.33247207, -0.00005400, 0.00000563, -0.00000181),
    (0.00399632, 0.07879254, 0.07848510, -0.00001365, 0.00137272, -0.00000660),
    (0.00165491, 0.00135962, 0.00126279, -0.00000282, -0.00000438, 0.00010157),
    (0.00135617, 0.00127827, 0.00096614, -0.00000274, 0.00000444, -0.00005048),
    (0.00018694, 0.00018908, 0.00025756, 0.00000006, -0.00000017, -0.00000092),
]


def link_frames(q: np.ndarray) -> list[np.ndarray]:
    """4 x 4 poses of the frames at the links' ends, by the standard convention: Rz(theta) Tz(d) Tx(a) Rx(alpha)."""
    pose, frames = np.eye(4), []
    for (a, d, alpha, _, _), theta in zip(PUBLISHED, q, strict=True):
        ct, s, ca, sa = math.cos(theta), math.sin(theta), math.cos(alpha), math.sin(alpha)
        pose = pose @ np.array([[ct, -s * ca, s * sa, a * ct], [s, ct * ca, -ct * sa, a * s], [0, sa, ca, d], [0, 0, 0, 1]])
        frames.append(pose)
    return frames


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return build_arm(ARM, TOOL)[0].compile()


@given(q=joint_vectors(ARM))
@settings(max_examples=50, deadline=None)
def test_model_and_kinematics_follow_the_published_parameters(model: mujoco.MjModel, q: np.ndarray) -> None:
    data = mujoco.MjData(model)
    data.qpos[:] = q
    mujoco.mj_kinematics(model, data)
    flange = link_frames(q)[-1]
    reach = np.array([0.0, 0.0, ARM.hand.flange + ARM.hand.grasp + TOOL])
    c, s = math.cos(ARM.hand.turn), math.sin(ARM.hand.turn)
    turned = flange[:3, :3] @ np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
    expected = flange[:3, 3] + flange[:3, :3] @ reach
    np.testing.assert_allclose(data.site("tcp").xpos, expected, atol=1e-9)
    np.testing.assert_allclose(data.site("tcp").xmat.reshape(3, 3), turned, atol=1e-9)
    pos, quat, _ = forward(ARM, torch.from_numpy(q)[None], TOOL)
    np.testing.assert_allclose(pos[0].numpy(), expected, atol=1e-9)
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quat[0].numpy())
    np.testing.assert_allclose(matrix.reshape(3, 3), turned, atol=1e-9)


def test_masses_lie_where_they_are_published(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    rng = np.random.default_rng(0)
    for _ in range(5):
        q = rng.uniform(-3.0, 3.0, 6)
        data.qpos[:] = q
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        for name, frame, (*_, mass, com), tensor in zip(ARM.spec.joint_names, link_frames(q), PUBLISHED, TENSORS, strict=True):
            body = model.joint(name).bodyid[0]
            assert model.body_mass[body] == pytest.approx(mass)
            np.testing.assert_allclose(data.xipos[body], frame[:3, 3] + frame[:3, :3] @ np.array(com), atol=1e-9)
            xx, yy, zz, xy, xz, yz = tensor
            expected = frame[:3, :3] @ np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]) @ frame[:3, :3].T
            axes = data.ximat[body].reshape(3, 3)
            np.testing.assert_allclose(axes @ np.diag(model.body_inertia[body]) @ axes.T, expected, atol=1e-8)


def test_it_weighs_what_the_fact_sheet_says(model: mujoco.MjModel) -> None:
    """20.6 kg with the cable, of which the base, which does not move, is not simulated (ur_description guesses 4 kg)."""
    moving = sum(model.body_mass[model.joint(name).bodyid[0]] for name in ARM.spec.joint_names)
    assert moving == pytest.approx(17.7)
    assert 2.0 < 20.6 - moving < 4.0
    # 5 kg payload: the gripper and what it holds
    assert model.body("hand").mass[0] == pytest.approx(0.925)


def test_limits_are_the_data_sheets(model: mujoco.MjModel) -> None:
    names = ["shoulder_pan", "shoulder_lift", "elbow", "wrist_1", "wrist_2", "wrist_3"]
    assert ARM.spec.joint_names == tuple(f"{name}_joint" for name in names)
    for joint, name in zip(ARM.spec.joints, names, strict=True):
        turns = math.radians(180 if name == "elbow" else 360)
        assert (joint.lower, joint.upper) == pytest.approx((-turns, turns))
        assert joint.velocity == pytest.approx(math.radians(180))
        assert joint.effort == (28.0 if name.startswith("wrist") else 150.0)
        assert model.joint(joint.name).range == pytest.approx((joint.lower, joint.upper))
        assert model.jnt_actfrcrange[model.joint(joint.name).id] == pytest.approx((-joint.effort, joint.effort))
    # the flange's force sensor: 50 N, 10 N m; nothing the impedance can do exceeds it
    assert ARM.spec.motion.wrench == (50.0, 10.0)
    assert ARM.spec.impedance.limit[0] <= 50.0 and ARM.spec.impedance.limit[1] <= 10.0
    # and the guard can hold them, and lets through what the task commands: from full speed one way to the other, in one step
    limits, action = Limits.of(ARM.spec), cell("bayonet", "ur5e").spec.action
    assert limits.velocity[0] > action.translation / limits.dt and limits.velocity[3] > action.rotation / limits.dt
    assert limits.acceleration[0] > 2 * action.translation / limits.dt**2
    assert limits.acceleration[3] > 2 * action.rotation / limits.dt**2


def test_rest_pose_points_down_in_front_of_the_base() -> None:
    pos, quat, _ = forward(ARM, torch.tensor([ARM.spec.home], dtype=torch.float64), TOOL)
    torch.testing.assert_close(pos[0], torch.tensor([0.5, 0.0, 0.16], dtype=torch.float64), atol=2e-3, rtol=0)
    assert float((quat[0] * torch.tensor(REFERENCE_QUAT)).sum().abs()) > 1 - 1e-4


def test_jacobian_is_mujocos_and_the_rest_pose_is_no_singularity(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    data.qpos[:] = ARM.spec.home
    mujoco.mj_forward(model, data)
    jacobian = np.empty((6, 6))
    mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], data.site("tcp").id)
    np.testing.assert_allclose(forward(ARM, torch.from_numpy(data.qpos)[None], TOOL)[2][0].numpy(), jacobian, atol=1e-9)
    assert np.linalg.cond(jacobian) < 20


def test_inverse_kinematics_admits_what_is_out_of_reach() -> None:
    _, found = inverse(ARM, torch.tensor([[1.2, 0.0, 0.3]]), torch.tensor([REFERENCE_QUAT]), TOOL)
    assert not found.any()


def test_commanding_rate_is_free_within_physics() -> None:
    assert ur5e(Ur5eOptions(control_dt=0.1)).spec.substeps == 50
    with pytest.raises(BadInput, match=r"control_dt=0.003: expected a multiple of 0.002"):
        ur5e(Ur5eOptions(control_dt=0.003))
    assert registry.find("robot", "ur5e").options is Ur5eOptions


@pytest.mark.parametrize("part", ["peg", "bayonet"])
def test_nothing_moves_without_an_action(part: str) -> None:
    task = cell(part, "ur5e")
    rows = task.fresh_starts(make_engine(task, 8), torch.Generator().manual_seed(0))
    env = env_from(task, rows)
    env.reset(0)
    before = env.engine.read("sensordata")[:, task.sensors["tcp_pos"]]
    for _ in range(50):
        *_, info = env.step(torch.zeros(8, 6))
        assert not info["invalid"].any()
    after = env.engine.read("sensordata")[:, task.sensors["tcp_pos"]]
    assert (after - before).norm(dim=-1).max() < 2e-4


def test_the_task_makes_its_bank_and_the_bank_is_not_the_frankas() -> None:
    task, other = cell("peg", "ur5e"), cell("peg", "franka")
    engine = make_engine(task, 64)
    bank = task.make_bank(engine)
    assert torch.bincount(bank.tags).tolist() == [26, 22, 16]
    assert bank.signature == engine.signature
    assert bank.hash == assembly_starts.bank_hash(task, engine.signature)
    assert bank.hash != assembly_starts.bank_hash(other, make_engine(other, 1).signature)
