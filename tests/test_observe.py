"""The shared observation and command functions: numpy and torch alike, against hand calculation and MuJoCo."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.tasks.assembly import policy_spec
from embodied.spec.errors import BadInput
from embodied.spec.observe import command, observe, start_memory
from embodied.spec.policy import PolicySpec, Term
from embodied.spec.robot import digest
from embodied.spec.rotations import (
    quat_conjugate,
    quat_multiply,
    quat_to_rotvec,
    rotate,
    rotate_inverse,
    rotvec_to_quat,
)

SPEC = policy_spec(franka(FrankaOptions()))
finite = st.floats(-3.0, 3.0)
vectors = st.tuples(finite, finite, finite).map(np.array)


def scipy_of(q: np.ndarray) -> Rotation:
    return Rotation.from_quat(np.roll(q, -1))


@given(r=vectors, s=vectors, v=vectors)
@settings(max_examples=100, deadline=None)
def test_rotations_agree_with_scipy(r: np.ndarray, s: np.ndarray, v: np.ndarray) -> None:
    p, q = rotvec_to_quat(r), rotvec_to_quat(s)
    one, two = Rotation.from_rotvec(r), Rotation.from_rotvec(s)
    np.testing.assert_allclose(scipy_of(p).as_matrix(), one.as_matrix(), atol=1e-9)
    np.testing.assert_allclose(scipy_of(quat_multiply(p, q)).as_matrix(), (one * two).as_matrix(), atol=1e-9)
    np.testing.assert_allclose(rotate(p, v), one.apply(v), atol=1e-9)
    np.testing.assert_allclose(rotate_inverse(p, v), one.inv().apply(v), atol=1e-9)
    back = Rotation.from_rotvec(quat_to_rotvec(p))
    np.testing.assert_allclose(back.as_matrix(), one.as_matrix(), atol=1e-9)
    assert np.linalg.norm(quat_to_rotvec(p)) <= math.pi + 1e-9


@pytest.mark.parametrize("angle", [0.0, 1e-9, 1e-7, 1e-5, 1e-3, 3.14159])
def test_rotation_vectors_near_their_ends(angle: float) -> None:
    r = torch.tensor([[0.6 * angle, 0.0, 0.8 * angle]])
    torch.testing.assert_close(quat_to_rotvec(rotvec_to_quat(r)), r, atol=1e-6, rtol=1e-4)


def readings_at(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    def unit() -> np.ndarray:
        return rotvec_to_quat(0.5 * rng.standard_normal((count, 3)))

    shapes = {"tcp_linvel": 0.1, "tcp_angvel": 0.5, "force": 10.0, "torque": 1.0}
    return {
        "tcp_pos": np.array([0.5, 0.0, 0.2]) + 0.05 * rng.standard_normal((count, 3)),
        "tcp_quat": unit(),
        "socket_pos": np.array([0.5, 0.0, 0.1]) + 0.01 * rng.standard_normal((count, 3)),
        "socket_quat": unit(),
        **{name: scale * rng.standard_normal((count, 3)) for name, scale in shapes.items()},
    }


def test_torch_and_numpy_compute_the_same() -> None:
    rng = np.random.default_rng(1)
    readings = readings_at(rng, 16)
    tensors = {name: torch.from_numpy(x) for name, x in readings.items()}
    memory, other = start_memory(SPEC, readings), start_memory(SPEC, tensors)
    for _ in range(5):
        action = rng.uniform(-1.5, 1.5, (16, 6))
        memory = command(SPEC, action, readings, memory)
        other = command(SPEC, torch.from_numpy(action), tensors, other)
        np.testing.assert_allclose(observe(SPEC, readings, memory), observe(SPEC, tensors, other).numpy(), atol=1e-12)


def test_observation_by_hand() -> None:
    """Socket turned 90 degrees about z and flipped, tool likewise: every vector can be turned in the head."""
    # the socket's frame: x along base y, z down
    socket = scipy_quat(Rotation.from_matrix([[0, 1, 0], [1, 0, 0], [0, 0, -1]]))
    readings = {
        "tcp_pos": np.array([[0.51, 0.02, 0.13]]),
        "tcp_quat": socket[None],
        "socket_pos": np.array([[0.5, 0.0, 0.1]]),
        "socket_quat": socket[None],
        "tcp_linvel": np.array([[0.1, 0.2, 0.3]]),
        "tcp_angvel": np.array([[0.0, 0.0, 0.5]]),
        "force": np.array([[1.0, 2.0, -5.0]]),
        "torque": np.array([[0.1, 0.2, 0.3]]),
    }
    memory = start_memory(SPEC, readings)
    memory["target_pos"] = readings["tcp_pos"] + [[0.0, 0.01, 0.0]]
    seen = dict(zip([t.name for t in SPEC.terms], split(observe(SPEC, readings, memory)[0]), strict=True))
    np.testing.assert_allclose(seen["tip position"], np.array([0.02, 0.01, -0.03]) / 0.05, atol=1e-12)
    np.testing.assert_allclose(seen["tip position, fine"], [1.5, 1.5, -1.5])  # all beyond the clip
    np.testing.assert_allclose(seen["tip rotation"], 0, atol=1e-7)
    np.testing.assert_allclose(seen["tip velocity"], np.array([0.2, 0.1, -0.3]) / 0.1, atol=1e-12)
    np.testing.assert_allclose(seen["tip angular velocity"], [0, 0, -1], atol=1e-12)
    np.testing.assert_allclose(seen["wrist force"], np.array([1, 2, -5]) / 10.0, atol=1e-12)
    np.testing.assert_allclose(seen["target lead"], [1, 0, 0], atol=1e-12)


def scipy_quat(rotation: Rotation) -> np.ndarray:
    return np.roll(rotation.as_quat(), 1)


def split(values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(SPEC.sizes)[:-1])


@given(seed=st.integers(0, 2**31), action=st.lists(st.floats(-5, 5), min_size=6, max_size=6))
@settings(max_examples=100, deadline=None)
def test_the_target_never_leaves_leash_or_workspace(seed: int, action: list[float]) -> None:
    readings = readings_at(np.random.default_rng(seed), 1)
    memory = start_memory(SPEC, readings)
    for _ in range(10):
        memory = command(SPEC, np.array([action]), readings, memory)
    leash = SPEC.robot.impedance.leash
    lead = np.linalg.norm(memory["target_pos"] - readings["tcp_pos"])
    turn = (scipy_of(memory["target_quat"][0]) * scipy_of(readings["tcp_quat"][0]).inv()).magnitude()
    outside = any(not low <= x <= high for x, (low, high) in zip(readings["tcp_pos"][0], SPEC.robot.workspace, strict=True))
    assert lead <= leash[0] + 1e-9 or outside
    assert turn <= leash[1] + 1e-6
    for x, (low, high) in zip(memory["target_pos"][0], SPEC.robot.workspace, strict=True):
        assert low <= x <= high
    assert np.abs(memory["last_action"]).max() <= 1


def test_targets_integrate_actions() -> None:
    """target(t + 1) = target(t) + action, in the socket's frame, not measured pose + action."""
    readings = readings_at(np.random.default_rng(3), 1)
    memory = start_memory(SPEC, readings)
    action = np.array([[0.2, -0.1, 0.3, 0.0, 0.0, 0.0]])
    for _ in range(3):
        memory = command(SPEC, action, readings, memory)
    step = SPEC.action.translation * action[0, :3]
    expected = readings["tcp_pos"][0] + 3 * scipy_of(readings["socket_quat"][0]).apply(step)
    np.testing.assert_allclose(memory["target_pos"][0], expected, atol=1e-12)


def test_spec_is_lossless_through_json() -> None:
    again = PolicySpec.from_dict(json.loads(json.dumps(SPEC.to_dict())))
    assert again == SPEC
    assert digest(again) == digest(SPEC)
    other = replace(SPEC, action=replace(SPEC.action, translation=0.02))
    assert digest(other) != digest(SPEC)


def test_unknown_kind_of_term_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'position'"):
        Term("x", "positon", "m", 1.0)


def test_seen_velocity_matches_finite_differences_of_mujoco() -> None:
    """The velocity readings are those of the frame that the position readings are of."""
    from embodied.sim.tasks.assembly import Assembly, AssemblyOptions

    task = Assembly(AssemblyOptions(), franka(FrankaOptions()))
    data = mujoco.MjData(task.model)
    data.qpos[:] = task.arm.spec.home
    data.qvel[:] = np.linspace(-0.3, 0.4, 7)
    mujoco.mj_forward(task.model, data)
    pos, quat = data.sensor("tcp_pos").data.copy(), data.sensor("tcp_quat").data.copy()
    linear, angular = data.sensor("tcp_linvel").data.copy(), data.sensor("tcp_angvel").data.copy()
    dt = 1e-6
    mujoco.mj_integratePos(task.model, data.qpos, data.qvel, dt)
    mujoco.mj_forward(task.model, data)
    np.testing.assert_allclose((data.sensor("tcp_pos").data - pos) / dt, linear, atol=1e-5)
    turned = quat_to_rotvec(quat_multiply(data.sensor("tcp_quat").data, quat_conjugate(quat)))
    np.testing.assert_allclose(turned / dt, angular, atol=1e-5)
