"""The task traverse: what is seen, judged and rewarded at placed states."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.compose import compose
from embodied.sim.engines.cpu import CpuEngine
from embodied.sim.env import WorldsEnv
from embodied.sim.fresh import FreshStarts
from embodied.sim.robots.franka import FrankaOptions, franka
from embodied.sim.robots.go1 import Go1Options, go1
from embodied.sim.samplers.uniform import Uniform, UniformOptions
from embodied.sim.tasks.traverse import Traverse, TraverseOptions, TraverseRewardOptions, request
from embodied.sim.tasks.walker import WalkerBankOptions, heading
from embodied.spec.errors import BadInput

ROBOT = go1(Go1Options())
KINDS, LEVELS = ["stairs", "gaps"], [1, 5]
STEP = 0.05 + (0.23 - 0.05) / 9  # height of a step of level 1: levels go from 0.05 to 0.23 m
CPU = torch.device("cpu")
BORDER, SIDE = 2.0, 8.0  # of the map, of a tile [m]


def make(**changes) -> Traverse:
    options = {"terrain": KINDS, "levels": LEVELS, "bank": WalkerBankOptions(20)} | changes
    return Traverse(TraverseOptions(**options), ROBOT)


@pytest.fixture(scope="module")
def task() -> Traverse:
    return make()


def make_engine(task: Traverse, num_worlds: int) -> CpuEngine:
    engine = CpuEngine(task.model, num_worlds, task.parameters, 1)
    engine.bind(task.fields)
    return engine


def make_env(task, bank, seed: int = 0) -> WorldsEnv:
    sampler = Uniform(UniformOptions(), bank.slots(6, seed, CPU))
    return WorldsEnv(make_engine(task, 6), task, sampler, bank)


def yawed(angle: float) -> list[float]:
    return [math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2)]


def put(task: Traverse, pos: list, quat: list, goals: list) -> tuple[CpuEngine, dict]:
    """Worlds with the robot in its rest pose at these places and orientations, and the state of their episodes."""
    engine = make_engine(task, len(pos))
    joints = torch.tensor(ROBOT.spec.home, dtype=torch.float64).expand(len(pos), -1)
    placed = torch.cat([torch.tensor(pos, dtype=torch.float64), torch.tensor(quat, dtype=torch.float64)], -1)
    engine.write("qpos", torch.cat([placed, joints], -1))
    engine.write("ctrl", joints)
    goal = torch.cat([torch.tensor(goals, dtype=torch.float64), torch.zeros(len(goals), 1, dtype=torch.float64)], -1)
    engine.write("mocap_pos", goal[:, None])
    engine.forward()
    factors = task.randomise(engine, torch.ones(len(pos), dtype=torch.bool), torch.Generator().manual_seed(0), on=False)
    state = task.start(engine, factors, torch.Generator().manual_seed(0))
    state["elapsed"] = torch.zeros(len(pos))
    return engine, state


def look(task: Traverse, engine: CpuEngine, state: dict) -> tuple[dict, dict]:
    return task.look(engine, state, torch.Generator().manual_seed(1))


def platform(task: Traverse, kind: int, level: int) -> tuple[float, float]:
    """The middle of a tile whose platform is at height 0."""
    for x, y in task.map.tiles[kind, level].tolist():
        row, column = (round((at - low) / 0.05) for at, low in ((y, task.map.ground.origin[1]), (x, task.map.ground.origin[0])))
        if task.map.ground.heights[row, column] == 0:
            return x, y
    raise AssertionError("no variant has its platform at 0")


# -- what the policy sees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("yaw", "offset", "expected"),
    [
        (0.0, (1.5, 0.0), (1.0, 0.0, 1.5)),
        (math.pi / 2, (1.5, 0.0), (0.0, -1.0, 1.5)),  # it faces +y: +x is to its right
        (math.pi, (0.0, 1.0), (0.0, -1.0, 1.0)),
        (-math.pi / 2, (0.0, 1.0), (-1.0, 0.0, 1.0)),
        (0.0, (3.0, 4.0), (0.6, 0.8, 2.0)),  # farther than 2 m it only says that it is far
        (0.0, (0.05, 0.0), (0.5, 0.0, 0.05)),  # and next to it no direction
    ],
)
def test_the_goal_is_seen_in_the_heading_frame(task, yaw, offset, expected):
    x, y = platform(task, 0, 0)
    engine, state = put(task, [[x, y, 0.29]], [yawed(yaw)], [[x + offset[0], y + offset[1]]])
    truth, seen = look(task, engine, state)
    assert truth["request"][0].tolist() == pytest.approx(expected, abs=1e-5)
    where = sum(task.spec.sizes[: [term.name for term in task.spec.terms].index("goal")])
    shown = task.observe(truth, truth, state)["policy"][0, where : where + 3]
    assert shown.tolist() == pytest.approx(expected, abs=1e-5)
    assert not torch.equal(seen["request"], truth["request"])


angles = st.floats(-math.pi, math.pi)


@settings(max_examples=50, deadline=None)
@given(yaw=angles, pitch=st.floats(-0.9, 0.9), roll=st.floats(-0.9, 0.9), bearing=angles, distance=st.floats(0.2, 1.9))
def test_leaning_does_not_move_the_goal(yaw, pitch, roll, bearing, distance):
    """The heading is where the trunk's x axis points, whatever it leans: yaw of MuJoCo's intrinsic zyx angles."""
    quat = np.empty(4)
    mujoco.mju_euler2Quat(quat, np.array([yaw, pitch, roll]), "zyx")
    ahead = heading(torch.from_numpy(quat)[None])
    offset = distance * torch.tensor([[math.cos(bearing), math.sin(bearing)]], dtype=torch.float64)
    found = request(offset, ahead)[0].tolist()
    assert found == pytest.approx([math.cos(bearing - yaw), math.sin(bearing - yaw), distance], abs=1e-9)


@pytest.mark.parametrize("quarter", range(4))
def test_the_scan_reads_stairs_step_by_step(task, quarter):
    """Stairs rise outwards on every side of a platform of 1 m: one step at once and after every 0.3 m, each within 0.05 m.

    0.9 m out and facing outwards, the scan covers 0.6 to 1.8 m every 0.12 m: 1.32 m is 0.4 up the second riser.
    """
    x, y = platform(task, 0, 0)
    yaw = quarter * math.pi / 2
    at = [x + 0.9 * math.cos(yaw), y + 0.9 * math.sin(yaw), 0.31]
    engine, state = put(task, [at], [yawed(yaw)], [[x, y]])
    truth, _ = look(task, engine, state)
    found = truth["heights"].view(11, 7) + 0.31
    expected = STEP * torch.tensor([0, 0, 0, 0, 1, 1, 1.4, 2, 2, 3, 3])
    # positions in float32 err by a few 1e-6 m on a riser of 0.07 m in 0.05 m
    assert found.numpy() == pytest.approx(expected[:, None].expand(11, 7).numpy(), abs=5e-5)


def test_the_scan_goes_from_right_to_left(task):
    """Sideways to the stairs, its left is up: facing -y at 0.9 m along +x, so that the wall of steps is to the left."""
    x, y = platform(task, 0, 0)
    engine, state = put(task, [[x + 0.9, y, 0.31]], [yawed(-math.pi / 2)], [[x, y]])
    found = look(task, engine, state)[0]["heights"].view(11, 7) + 0.31
    # points 0.12 m apart from 0.54 to 1.26 m; 1.02 m is 0.4 up the first riser
    assert found[5].tolist() == pytest.approx([0, 0, 0, 0, 0.4 * STEP, STEP, STEP], abs=5e-5)


def test_what_is_seen_is_noisy_and_what_the_critic_sees_is_not(task):
    x, y = platform(task, 1, 0)
    engine, state = put(task, [[x, y, 0.3]] * 64, [yawed(0.0)] * 64, [[x + 1.5, y]] * 64)
    truth, seen = look(task, engine, state)
    heights = seen["heights"] - truth["heights"]
    assert heights.std() == pytest.approx(0.02, rel=0.05) and abs(heights.mean()) < 1e-3
    assert (seen["request"][:, 2] - 1.5).std() == pytest.approx(0.05, rel=0.35)
    obs = task.observe(truth, seen, state)
    assert {name: x.shape[1] for name, x in obs.items()} == task.obs_sizes
    assert obs["critic"].std(0).max() < 1e-6 < obs["policy"].std(0).max()
    state["elapsed"] = torch.full((64,), 0.5)
    later = task.observe(truth, seen, state)
    assert torch.equal(later["policy"], obs["policy"])
    assert ((later["critic"] - obs["critic"]).abs().amax(0) > 0).sum() == 1


def test_the_mirror_is_what_a_mirrored_robot_sees(task):
    """Stairs look alike on both sides of a tile's middle: there a robot in a mirrored pose sees the mirror of what it saw."""
    x, y = platform(task, 0, 0)
    draw = torch.Generator().manual_seed(0)
    yaw = 0.4
    lean = np.empty(4)
    mujoco.mju_euler2Quat(lean, np.array([yaw, 0.1, 0.2]), "zyx")
    engine, state = put(
        task,
        [[x + 0.8, y + 0.2, 0.35], [x + 0.8, y - 0.2, 0.35]],
        # in a mirror at y = 0 turns about x and z are the other way round
        [lean.tolist(), (lean * [1, -1, 1, -1]).tolist()],
        [[x + 1.5, y + 0.9], [x + 1.5, y - 0.9]],
    )
    pose, speed = (0.3 * torch.randn(12, generator=draw, dtype=torch.float64) for _ in range(2))
    linear, angular = torch.tensor([0.3, 0.2, -0.1]).double(), torch.tensor([0.5, -0.4, 0.3]).double()
    names = [joint.name for joint in ROBOT.spec.joints]
    swap = [names.index(name[0] + {"L": "R", "R": "L"}[name[1]] + name[2:]) for name in names]
    sign = torch.tensor([-1.0 if "hip" in name else 1.0 for name in names], dtype=torch.float64)
    home = torch.tensor(ROBOT.spec.home, dtype=torch.float64)
    qpos = engine.read("qpos").double()
    qpos[:, 7:] = home + torch.stack([pose, pose[swap] * sign])
    engine.write("qpos", qpos)
    flip = torch.tensor([1.0, -1.0, 1.0]).double()
    qvel = [torch.cat([linear, angular, speed]), torch.cat([linear * flip, -angular * flip, speed[swap] * sign])]
    engine.write("qvel", torch.stack(qvel))
    engine.forward()
    action = torch.randn(12, generator=draw)
    state["last_action"] = torch.stack([action, action[swap] * sign.float()])
    state["factor/centre_y"] = torch.tensor([0.02, -0.02])
    state["time"] = torch.tensor([[0.1], [0.35]])  # diagonal legs change places after half of 0.5 s
    truth, _ = look(task, engine, state)
    obs = task.observe(truth, truth, state)
    assert set(task.mirror) == {*obs, "action"}
    for name, seen in obs.items():
        index, signs = task.mirror[name]
        assert sorted(index.tolist()) == list(range(seen.shape[1]))
        assert (seen[0] - seen[1]).abs().max() > 0.1
        torch.testing.assert_close(seen[0][index] * signs, seen[1], atol=2e-4, rtol=0)


# -- how it is judged -------------------------------------------------------------------------------------------------------


def test_success_is_to_stand_at_the_goal_for_some_steps(task):
    x, y = platform(task, 1, 0)
    upside_down = [0.0, 1.0, 0.0, 0.0]
    engine, state = put(
        task,
        [[x, y, 0.29]] * 4,
        [yawed(0.3), yawed(0.3), upside_down, yawed(0.3)],
        [[x + 0.29, y], [x + 0.31, y], [x, y], [x, y + 0.2]],
    )
    truth, _ = look(task, engine, state)
    away = dict(truth, distance=truth["distance"] + torch.tensor([0.0, 0.0, 0.0, 0.5]))
    succeeded, rewards = [], []
    for number in range(1, 6):
        # the last world leaves for a moment after three steps
        reward, success, failure = task.judge(away if number == 4 else truth, state)
        succeeded.append(success.tolist())
        rewards.append(reward)
        assert failure.tolist() == [False, False, True, False]
    assert succeeded == [[False] * 4] * 4 + [[True, False, False, False]]
    assert rewards[-1][0] - rewards[-2][0] == pytest.approx(50.0)
    assert state["held"].tolist() == [5, 0, 0, 1]


def test_failure_is_to_fall_or_to_be_in_the_void(task):
    x, y = platform(task, 1, 0)
    moat = x + SIDE / 2 - 0.1
    pitched = [math.cos(math.radians(65) / 2), 0.0, math.sin(math.radians(65) / 2), 0.0]
    engine, state = put(
        task,
        # standing; lying; pitched by 65 degrees; over a moat with its feet 0.1 m and 0.24 m below ground; trunk below ground
        [[x, y, 0.29], [x, y, 0.1], [x, y, 0.4], [moat, y, 0.18], [moat, y, 0.02], [moat, y, -0.05]],
        [yawed(0.0), yawed(0.0), pitched, yawed(0.0), yawed(0.0), yawed(0.0)],
        [[x + 2.5, y]] * 6,
    )
    # the last one's legs are folded: its feet are 0.14 m below ground, which alone would be no failure
    qpos = engine.read("qpos").double()
    qpos[5, 7:] = torch.tensor([0.0, 1.35, -2.7] * 4)
    engine.write("qpos", qpos)
    engine.forward()
    truth, _ = look(task, engine, state)
    assert (truth["feet"][5, :, 2] > -0.19).all()
    _, success, failure = task.judge(truth, state)
    assert failure.tolist() == [False, True, True, False, True, True]
    assert not success.any()


def test_progress_pays_by_the_metre_up_to_the_cap():
    free = dict.fromkeys(("trot", "torque", "acceleration", "action_rate", "bounce", "roll", "tilt", "pose"), 0.0)
    task = make(reward=TraverseRewardOptions(progress=0.5, cap=0.8, **free))
    x, y = platform(task, 1, 0)
    engine, state = put(task, [[x, y, 0.29]] * 4, [yawed(1.0)] * 4, [[x, y + 2.5]] * 4)
    moved = torch.tensor([0.01, 0.1, -0.1, 0.0])  # in 0.02 s
    qpos = engine.read("qpos").double()
    qpos[:, 1] += moved
    engine.write("qpos", qpos)
    engine.forward()
    reward, _, _ = task.judge(look(task, engine, state)[0], state)
    assert reward.tolist() == pytest.approx([0.5 * 0.5, 0.5 * 0.8, -0.5 * 5.0, 0.0], abs=2e-3)
    # and only once
    again, _, _ = task.judge(look(task, engine, state)[0], state)
    assert again.tolist() == pytest.approx([0.0] * 4, abs=1e-6)


def test_a_trot_pays_by_its_weight():
    free = dict.fromkeys(("torque", "acceleration", "action_rate", "bounce", "roll", "tilt", "pose"), 0.0)
    task = make(reward=TraverseRewardOptions(trot=0.4, **free))
    x, y = platform(task, 1, 0)
    engine, state = put(task, [[x, y, 0.29]], [yawed(1.0)], [[x, y + 2.5]])
    truth, _ = look(task, engine, state)
    # a quarter of the period on, the first diagonal should be 8 cm up and the others down: two feet are off by all of it
    state["time"] = torch.full_like(state["time"], 0.125)
    low = float(truth["clearance"].abs().sum())
    reward, _, _ = task.judge(truth, state)
    assert reward.item() == pytest.approx(
        0.4 * (1 - 0.16 / (2 * 0.08 * 2 / math.pi)), abs=0.4 * low / (2 * 0.08 * 2 / math.pi) + 1e-6
    )


def test_zero_actions_stand_and_fail_by_the_time_limit_alone():
    task = make(terrain=["stairs", "stepping_stones"], levels=[2], episode_s=1.6, reward=TraverseRewardOptions(trot=0.0))
    env = FreshStarts(make_engine(task, 8), task, randomise=False)
    env.reset(0)
    for step in range(1, 81):
        _, reward, terminated, truncated, info = env.step(torch.zeros(8, 12))
        assert not truncated.any() and not info["invalid"].any()
        assert terminated.all() if step == 80 else not terminated.any()
    assert info["failure"].all() and not info["success"].any()
    assert reward.tolist() == pytest.approx([-50.0] * 8, abs=0.1)


# -- what it is built from --------------------------------------------------------------------------------------------------


def test_the_goal_touches_nothing(task):
    model = task.model
    goal = model.geom("goal")
    assert model.body("goal").mocapid[0] == 0 and goal.contype[0] == 0 and goal.conaffinity[0] == 0


def test_flat_ground_alone_and_one_tile_each_will_do():
    task = make(terrain=["flat"], levels=[0], variants=1, bank=WalkerBankOptions(4))
    bank = task.make_bank(make_engine(task, 4))
    env = make_env(task, bank)
    obs = env.reset(0)
    assert obs["policy"].shape == (6, task.spec.obs_size) and torch.isfinite(obs["critic"]).all()
    truth, _ = task.look(env.engine, env._state, torch.Generator())
    assert truth["heights"].numpy() == pytest.approx(-truth["trunk_pos"][:, 2:].expand(6, 77).numpy())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bank": WalkerBankOptions(7)}, "bank.size=7: expected at least 8"),
        ({"reach": 0.0}, "reach=0.0"),
        ({"hold_steps": 0}, "hold_steps=0"),
        ({"episode_s": 0.5}, "episode_s=0.5"),
        ({"reward": TraverseRewardOptions(cap=0.0)}, "cap=0.0"),
        ({"terrain": ["stairz"]}, "did you mean 'stairs'"),
        ({"levels": [10]}, "0 to 9"),
        ({"variants": 0, "bank": WalkerBankOptions(1)}, "variants"),
    ],
)
def test_what_cannot_be_built_is_said(changes, said):
    with pytest.raises(BadInput, match=said) as error:
        make(**changes)
    assert "\n" not in str(error.value)


def test_an_arm_cannot_walk():
    with pytest.raises(BadInput, match="go1"):
        Traverse(TraverseOptions(), franka(FrankaOptions()))


def test_terrain_is_chosen_on_the_command_line(tmp_path):
    words = ["task=traverse", "task.terrain=[stairs]", "task.levels=[0,3]", f"out={tmp_path / 'run'}"]
    config = compose("train", words).config
    assert config["task"]["terrain"] == ["stairs"] and config["robot"]["name"] == "go1"
    with pytest.raises(BadInput, match="terrain"):
        compose("train", ["task=traverse", "task.terrain=stairs", f"out={tmp_path / 'run'}"])
