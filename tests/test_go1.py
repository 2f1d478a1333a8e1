"""The Go1 against what Unitree publishes, and against mechanics."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import mujoco
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.robots.legged import CONTACT, build_legged
from embodied.spec import registry
from embodied.spec.errors import BadInput
from embodied.spec.robot import RobotSpec

ROBOT = go1(Go1Options())
SPEC = ROBOT.spec
GRAVITY = 9.81
LEGS = {"FR": (1, -1), "FL": (1, 1), "RR": (-1, -1), "RL": (-1, 1)}  # ahead, left
PARTS = ("hip", "thigh", "calf")

# unitree_ros, go1_description/xacro/const.xacro: lower, upper, velocity, torque
LIMITS = {"hip": (-0.863, 0.863, 30.1, 23.7), "thigh": (-0.686, 4.501, 30.1, 23.7), "calf": (-2.818, -0.888, 20.06, 35.55)}
# leg_offset_x, leg_offset_y, thigh_offset, thigh_length, calf_length of the same file
HIP_X, HIP_Y, ABDUCTION, THIGH, CALF = 0.1881, 0.04675, 0.08, 0.213, 0.213
# the same file, front left: mass, centre of mass, (xx, yy, zz, xy, xz, yz); a body and what is fixed to it. Rotors turn about y
ROTOR = (5.9647e-05, 0.000111842, 5.9647e-05, 0, 0, 0)
FOOT = (2 * 0.06 / 5 * 0.02**2,) * 3 + (0, 0, 0)
MASSES = {
    "hip": [
        (0.591, (-0.005657, -0.008752, -0.000102),
         (0.000334008405, 0.000619101213, 0.00040057614, -0.000010826066, 0.000001290732, 0.000001643194)),
        (0.089, (0.0, -0.00015, 0.0), ROTOR),
    ],
    "thigh": [
        (0.92, (-0.003342, -0.018054, -0.033451),
         (0.004431760472, 0.004485671726, 0.000740309489, 0.000057496807, -0.000218457134, 0.000572001265)),
        (0.089, (0.0, -0.03235, 0.0), ROTOR),
    ],
    "calf": [
        (0.135862, (0.006197, 0.001408, -0.116695),
         (0.001088793059, 0.001100428748, 0.000024787446, -0.000000255679, 0.000007117814, 0.000002077264)),
        (0.06, (0.0, 0.0, -CALF), FOOT),
    ],
}  # fmt: skip
TRUNK = (5.204, (0.0223, 0.002, -0.0005),
         (0.0168128557, 0.063009565, 0.0716547275, -0.0002296769, -0.0002945293, -0.0000418731))  # fmt: skip


def ground(friction: float = 0.8) -> mujoco.MjModel:
    """The robot over a plane that its feet, and nothing else, can touch."""
    spec, _ = build_legged(ROBOT)
    spec.worldbody.add_geom(name="ground", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05])
    for foot in SPEC.feet:
        spec.add_pair(
            name=foot, geomname1=foot, geomname2="ground", friction=[friction, friction, 0.005, 0.0001, 0.0001], **CONTACT
        )
    return spec.compile()


@pytest.fixture(scope="module")
def model() -> mujoco.MjModel:
    return build_legged(ROBOT)[0].compile()


@pytest.fixture
def data(model: mujoco.MjModel) -> mujoco.MjData:
    return mujoco.MjData(model)


def matrix(tensor: tuple[float, ...]) -> np.ndarray:
    xx, yy, zz, xy, xz, yz = tensor
    return np.array([[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]])


def fused(parts: list[tuple], mirror: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Mass, centre of mass and inertia of parts that are one body, by the parallel axis theorem, mirrored by signs [3]."""
    mass = sum(part[0] for part in parts)
    com = sum(part[0] * np.array(part[1]) for part in parts) / mass
    inertia = np.zeros((3, 3))
    for own, centre, tensor in parts:
        away = np.array(centre) - com
        inertia += matrix(tensor) + own * (away @ away * np.eye(3) - np.outer(away, away))
    return mass, mirror * com, np.outer(mirror, mirror) * inertia


def turn(axis: str, angle: float) -> np.ndarray:
    c, s = math.cos(angle), math.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]]) if axis == "x" else np.array([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def published_foot(leg: str, q: np.ndarray) -> np.ndarray:
    """A foot's place in the trunk's frame, from the published offsets."""
    ahead, left = LEGS[leg]
    knee = turn("y", q[2]) @ [0, 0, -CALF] + [0, 0, -THIGH]
    return np.array([ahead * HIP_X, left * HIP_Y, 0]) + turn("x", q[0]) @ (turn("y", q[1]) @ knee + [0, left * ABDUCTION, 0])


poses = st.lists(st.floats(0.0, 1.0), min_size=12, max_size=12).map(
    lambda shares: np.array([j.lower + x * (j.upper - j.lower) for j, x in zip(SPEC.joints, shares, strict=True)])
)


def feet(model: mujoco.MjModel, q: np.ndarray) -> dict[str, np.ndarray]:
    """The feet's places in the trunk's frame, which has the world's orientation here."""
    data = mujoco.MjData(model)
    data.qpos[7:] = q
    mujoco.mj_kinematics(model, data)
    return {leg: data.site(f"{leg}_foot").xpos - data.body("trunk").xpos for leg in LEGS}


def test_joints_are_in_unitrees_order_with_published_limits(model: mujoco.MjModel) -> None:
    # unitree_legged_sdk, quadruped.h: FR_ 0, FL_ 1, RR_ 2, RL_ 3; each 0 hip, 1 thigh, 2 calf
    assert SPEC.joint_names == tuple(f"{leg}_{part}_joint" for leg in ("FR", "FL", "RR", "RL") for part in PARTS)
    assert [model.joint(i + 1).name for i in range(12)] == list(SPEC.joint_names)
    assert [model.actuator(i).name for i in range(12)] == list(SPEC.joint_names)
    for joint in SPEC.joints:
        limits = LIMITS[joint.name.split("_")[1]]
        assert (joint.lower, joint.upper, joint.velocity, joint.effort) == limits
        assert tuple(model.joint(joint.name).range) == limits[:2]
        assert model.joint(joint.name).limited
        assert tuple(model.actuator(joint.name).forcerange) == (-limits[3], limits[3])
        assert joint.lower < joint.home < joint.upper
    assert asdict(RobotSpec.from_dict(json.loads(json.dumps(asdict(SPEC))))) == asdict(SPEC)


def test_masses_lie_where_they_are_published(model: mujoco.MjModel) -> None:
    assert model.body_subtreemass[0] == pytest.approx(12.743, abs=1e-3)  # MuJoCo Menagerie's unitree_go1; the URDF says 12.84
    expected = {"trunk": fused([TRUNK], np.ones(3))}
    for leg, (ahead, left) in LEGS.items():
        # leg.xacro: hips are mirrored to the other side and to the rear, thighs to the other side, calves are one part
        for part, signs in (("hip", (ahead, left, 1)), ("thigh", (1, left, 1)), ("calf", (1, 1, 1))):
            expected[f"{leg}_{part}"] = fused(MASSES[part], np.array(signs))
    assert model.nbody == 1 + len(expected)
    for name, (mass, com, inertia) in expected.items():
        body = model.body(name)
        assert body.mass[0] == pytest.approx(mass)
        np.testing.assert_allclose(body.ipos, com, atol=1e-7)
        axes = np.empty(9)
        mujoco.mju_quat2Mat(axes, body.iquat)
        axes = axes.reshape(3, 3)
        np.testing.assert_allclose(axes @ np.diag(body.inertia) @ axes.T, inertia, atol=2e-9)


@given(q=poses)
@settings(max_examples=50, deadline=None)
def test_feet_are_where_published_lengths_put_them(model: mujoco.MjModel, q: np.ndarray) -> None:
    for i, (leg, place) in enumerate(feet(model, q).items()):
        np.testing.assert_allclose(place, published_foot(leg, q[3 * i : 3 * i + 3]), atol=1e-9)


@given(q=poses)
@settings(max_examples=25, deadline=None)
def test_left_mirrors_right(model: mujoco.MjModel, q: np.ndarray) -> None:
    angles = dict(zip(SPEC.joint_names, q, strict=True))
    swapped = {"R": "L", "L": "R"}
    mirrored = [(-1 if "hip" in name else 1) * angles[name[0] + swapped[name[1]] + name[2:]] for name in SPEC.joint_names]
    here, there = feet(model, q), feet(model, np.array(mirrored))
    for leg in LEGS:
        np.testing.assert_allclose(there[leg[0] + swapped[leg[1]]], here[leg] * [1, -1, 1], atol=1e-9)


def test_lengths_between_joints(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    mujoco.mj_kinematics(model, data)
    for leg in LEGS:
        hip, thigh, calf = (data.joint(f"{leg}_{part}_joint").xanchor for part in PARTS)
        lengths = [np.linalg.norm(b - a) for a, b in ((hip, thigh), (thigh, calf), (calf, data.site(f"{leg}_foot").xpos))]
        assert lengths == pytest.approx([0.08, 0.213, 0.213])
    front, rear = (data.joint(f"{leg}_hip_joint").xanchor for leg in ("FL", "RL"))
    assert np.linalg.norm(front - rear) == pytest.approx(2 * 0.1881)
    assert np.linalg.norm(front - data.joint("FR_hip_joint").xanchor) == pytest.approx(2 * 0.04675)


def test_reference_is_the_rest_pose_with_the_soles_on_the_ground(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    np.testing.assert_array_equal(data.qpos[7:], SPEC.home)
    mujoco.mj_kinematics(model, data)
    # two equal lengths at 0.9 rad to the vertical, and the sphere below: MuJoCo Menagerie's has 23 mm
    assert data.body("trunk").xpos[2] == SPEC.height == pytest.approx(2 * 0.213 * math.cos(0.9) + 0.023)
    for foot in SPEC.feet:
        assert data.site(foot).xpos[2] == pytest.approx(model.geom(foot).size[0]) == pytest.approx(0.023)
        np.testing.assert_array_equal(data.geom(foot).xpos, data.site(foot).xpos)
    np.testing.assert_array_equal(data.site("imu").xpos, data.body("trunk").xpos)


def test_stands_on_its_feet() -> None:
    model = ground()
    data = mujoco.MjData(model)
    data.ctrl[:] = SPEC.home
    carried, force = [], np.empty(6)
    for step in range(round(2.0 / SPEC.physics_dt)):
        mujoco.mj_step(model, data)
        upright = 1 - 2 * (data.qpos[4] ** 2 + data.qpos[5] ** 2)
        assert upright > math.cos(0.15)
        assert 0.8 * SPEC.height < data.qpos[2] <= SPEC.height
        if step * SPEC.physics_dt >= 1.5:
            total = 0.0
            for i in range(data.ncon):
                mujoco.mj_contactForce(model, data, i, force)
                total += force[0]
            carried.append(total)
    assert data.ncon == 4
    assert np.mean(carried) == pytest.approx(12.743 * GRAVITY, rel=0.02)
    assert np.abs(data.qvel).max() < 0.03
    # at rest each actuator is the spring it says
    np.testing.assert_allclose(data.actuator_force, np.array(SPEC.stiffness) * (np.array(SPEC.home) - data.qpos[7:]), atol=0.05)


def test_torque_is_limited_and_reached(model: mujoco.MjModel, data: mujoco.MjData) -> None:
    effort = np.array([joint.effort for joint in SPEC.joints])
    sign = np.resize([1.0, -1.0], 12)
    data.ctrl[:] = np.array(SPEC.home) + sign * 100.0
    for _ in range(40):
        mujoco.mj_step(model, data)
        np.testing.assert_allclose(data.actuator_force, sign * effort)


def test_falls_with_g_whatever_the_legs_do(model: mujoco.MjModel) -> None:
    data = mujoco.MjData(model)
    data.ctrl[:] = SPEC.home
    mujoco.mj_forward(model, data)
    np.testing.assert_allclose(data.qacc, [0, 0, -GRAVITY] + [0] * 15, atol=1e-9)
    # forces between its parts cannot move its centre of mass; steps are small, so that their errors are
    model = build_legged(ROBOT)[0].compile()
    model.opt.timestep = dt = 0.0005
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    start = data.subtree_com[0].copy()
    rng = np.random.default_rng(0)
    steps = 600
    for i in range(steps):
        if i % 40 == 0:
            data.ctrl[:] = np.array(SPEC.home) + rng.uniform(-0.4, 0.4, 12)
        mujoco.mj_step(model, data)
    mujoco.mj_forward(model, data)
    assert np.abs(data.qpos[7:] - SPEC.home).max() > 0.1
    fallen = -GRAVITY * dt**2 * steps * (steps + 1) / 2  # of semi-implicit steps
    np.testing.assert_allclose(data.subtree_com[0] - start, [0, 0, fallen], atol=5e-4)


def test_touches_nothing_unless_named() -> None:
    spec, _ = build_legged(ROBOT)
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 0.05])
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[2] = 0.05
    mujoco.mj_forward(model, data)
    assert data.ncon == 0
    names = {"trunk", *(f"{leg}_{part}" for leg in LEGS for part in (*PARTS, "foot"))}
    assert names < {model.geom(i).name for i in range(model.ngeom)}


@pytest.mark.parametrize("dt", [0.0, 0.004, 0.0125, 0.2, -0.02])
def test_rates_that_no_step_fits_are_refused(dt: float) -> None:
    with pytest.raises(BadInput, match=r"robot\.control_dt=.*expected a multiple of 0\.005 s"):
        go1(Go1Options(control_dt=dt))


def test_is_registered() -> None:
    assert go1(Go1Options(control_dt=0.01)).spec.substeps == 2
    assert registry.find("robot", "go1").build(Go1Options()).spec.substeps == 4
