"""The Franka against its published parameters, and against an independent model of it."""

from __future__ import annotations

import importlib.resources
import math
import xml.etree.ElementTree as ET

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from worlds import joint_vectors

from embodied.sim.robots.arm import REFERENCE_QUAT, build_arm
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.kinematics import forward, inverse
from embodied.spec.rotations import quat_multiply, rotvec_to_quat

ARM = franka(FrankaOptions())
TOOL = 0.06
# Franka Control Interface documentation, "Denavit-Hartenberg parameters", Craig's convention: a, d, alpha
PUBLISHED_DH = [
    (0, 0.333, 0),
    (0, 0, -math.pi / 2),
    (0, 0.316, math.pi / 2),
    (0.0825, 0, math.pi / 2),
    (-0.0825, 0.384, -math.pi / 2),
    (0, 0, math.pi / 2),
    (0.088, 0, math.pi / 2),
]
FLANGE, GRASP = 0.107, 0.1034  # the same page, and the hand's datasheet


def published_tcp(q: np.ndarray) -> np.ndarray:
    """The 4 x 4 pose of the tcp, multiplied out by the textbook's matrix."""
    pose = np.eye(4)
    for (a, d, alpha), theta in zip(PUBLISHED_DH, q, strict=True):
        ct, stheta, ca, sa = math.cos(theta), math.sin(theta), math.cos(alpha), math.sin(alpha)
        pose = pose @ np.array(
            [
                [ct, -stheta, 0, a],
                [stheta * ca, ct * ca, -sa, -d * sa],
                [stheta * sa, ct * sa, ca, d * ca],
                [0, 0, 0, 1],
            ]
        )
    turn = np.eye(4)
    c, s = math.cos(-math.pi / 4), math.sin(-math.pi / 4)
    turn[:2, :2] = [[c, -s], [s, c]]
    offset = np.eye(4)
    offset[2, 3] = FLANGE + GRASP + TOOL
    return pose @ offset @ turn


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return build_arm(ARM, TOOL)[0].compile()


@given(q=joint_vectors(ARM))
@settings(max_examples=50, deadline=None)
def test_model_and_kinematics_follow_the_published_parameters(model: mujoco.MjModel, q: np.ndarray) -> None:
    data = mujoco.MjData(model)
    data.qpos[:] = q
    mujoco.mj_kinematics(model, data)
    expected = published_tcp(q)
    np.testing.assert_allclose(data.site("tcp").xpos, expected[:3, 3], atol=1e-9)
    np.testing.assert_allclose(data.site("tcp").xmat.reshape(3, 3), expected[:3, :3], atol=1e-9)
    pos, quat, _ = forward(ARM, torch.from_numpy(q)[None], TOOL)
    np.testing.assert_allclose(pos[0].numpy(), expected[:3, 3], atol=1e-9)
    matrix = np.empty(9)
    mujoco.mju_quat2Mat(matrix, quat[0].numpy())
    np.testing.assert_allclose(matrix.reshape(3, 3), expected[:3, :3], atol=1e-9)


def menagerie() -> mujoco.MjModel:
    """The Franka Research 3 that franky-sim ships (MuJoCo Menagerie's), its meshes left out."""
    source = importlib.resources.files("franky_sim") / "assets" / "fr3.xml"
    root = ET.fromstring(source.read_text())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in ("geom", "mesh", "material", "texture", "exclude"):
                parent.remove(child)
    return mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))


def test_an_independent_model_agrees(model: mujoco.MjModel) -> None:
    other = menagerie()
    ours, theirs = mujoco.MjData(model), mujoco.MjData(other)
    rng = np.random.default_rng(0)
    for _ in range(20):
        q = np.array([rng.uniform(j.lower, j.upper) for j in ARM.spec.joints])
        ours.qpos[:], theirs.qpos[:7] = q, q
        mujoco.mj_forward(model, ours)
        mujoco.mj_forward(other, theirs)
        for joint in ARM.spec.joint_names:
            np.testing.assert_allclose(ours.joint(joint).xanchor, theirs.joint(joint).xanchor, atol=1e-6)
            np.testing.assert_allclose(ours.joint(joint).xaxis, theirs.joint(joint).xaxis, atol=1e-6)
        np.testing.assert_allclose(ours.body("hand").xpos, theirs.body("hand").xpos, atol=1e-6)
    for joint in ARM.spec.joint_names:
        assert model.joint(joint).range == pytest.approx(other.joint(joint).range)
        assert model.joint(joint).armature == pytest.approx(other.joint(joint).armature)
        assert model.jnt_actfrcrange[model.joint(joint).id] == pytest.approx(other.jnt_actfrcrange[other.joint(joint).id])
        link, its = model.joint(joint).bodyid[0], other.joint(joint).bodyid[0]
        assert model.body_mass[link] == pytest.approx(other.body_mass[its], rel=1e-4)
        np.testing.assert_allclose(np.sort(model.body_inertia[link]), np.sort(other.body_inertia[its]), rtol=2e-2, atol=1e-6)
        np.testing.assert_allclose(model.body_ipos[link], other.body_ipos[its], atol=1e-5)


def test_jacobian_is_mujocos(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    q = np.array(ARM.spec.home) + 0.1
    data.qpos[:] = q
    mujoco.mj_forward(model, data)
    jacobian = np.empty((6, 7))
    mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], data.site("tcp").id)
    np.testing.assert_allclose(forward(ARM, torch.from_numpy(q)[None], TOOL)[2][0].numpy(), jacobian, atol=1e-9)


def test_inverse_kinematics_finds_poses_and_admits_when_it_cannot() -> None:
    generator = torch.Generator().manual_seed(0)
    pos = torch.tensor([0.5, 0.0, 0.15]) + 0.1 * (torch.rand(200, 3, generator=generator) - 0.5)
    tilt = 0.2 * torch.randn(200, 3, generator=generator)
    quat = quat_multiply(rotvec_to_quat(tilt), torch.tensor(REFERENCE_QUAT).expand(200, 4))
    joints, found = inverse(ARM, pos, quat, TOOL)
    assert found.float().mean() > 0.97
    reached, _, _ = forward(ARM, joints, TOOL)
    assert (reached - pos)[found].abs().max() < 1e-5
    _, found = inverse(ARM, torch.tensor([[2.0, 0.0, 0.5]]), quat[:1], TOOL)
    assert not found.any()


def test_impedance_is_the_spring_it_says(model: mujoco.MjModel) -> None:
    """At rest under a push the tool yields by force / stiffness, in each axis, and by torque / stiffness in turn."""
    stiffness, turning = ARM.spec.impedance.stiffness
    model = build_arm(ARM, TOOL)[0].compile()
    model.opt.gravity[:] = 0
    data = mujoco.MjData(model)
    data.qpos[:] = ARM.spec.home
    mujoco.mj_forward(model, data)
    data.ctrl[:] = data.actuator_length
    start = data.site("tcp").xpos.copy()
    push = np.array([6.0, -3.0, 4.5])
    jacobian = np.empty((6, 7))
    for _ in range(3000):
        mujoco.mj_jacSite(model, data, jacobian[:3], jacobian[3:], data.site("tcp").id)
        data.qfrc_applied[:] = jacobian[:3].T @ push
        mujoco.mj_step(model, data)
    np.testing.assert_allclose(data.site("tcp").xpos - start, push / stiffness, atol=2e-5)
    assert turning > 0
