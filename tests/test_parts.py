"""The parts: their fit, their locks, their starts, and that each can be put in within its own time."""

from __future__ import annotations

import json
import math

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import EXACT, ROBOTS, cell, env_from, place, relative, successes
from worlds import make_engine

from embodied.sim.tasks import assembly_starts
from embodied.sim.tasks.assembly_options import AssemblyOptions, check
from embodied.sim.tasks.parts import PARTS
from embodied.sim.tasks.parts.bayonet import BACK, END, HOLE, LOCKED, TURN
from embodied.spec.errors import BadInput
from embodied.spec.observe import observe, succeeded, turn_about_z
from embodied.spec.policy import PolicySpec
from embodied.spec.rotations import quat_multiply, rotate, rotvec_to_quat

CLEARANCES = (0.0002, 0.0005, 0.002)
parts = pytest.mark.parametrize("part", list(PARTS))


# -- fit ---------------------------------------------------------------------------------------------------------------


def touching(task, depth: float, lateral: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Bool [n]: a straight tool `lateral` [n, 2] off the axis touches the socket, whose clearance is scaled."""
    rows, poses = place(task, torch.full((len(lateral),), -0.05), torch.zeros(len(lateral)))
    engine = make_engine(task, len(lateral))
    engine.set_state(rows)
    every = torch.ones(len(lateral), dtype=torch.bool)
    factors = {name: torch.ones(len(lateral)) for name in ("friction", "gains", "mass")}
    task.set_physics(engine, every, {**factors, "clearance": torch.full((len(lateral),), factor)})
    # the tool stays where it is: the socket is moved about it, and nothing is stepped
    state = task.start(engine, {"delay": torch.zeros(len(lateral))}, torch.Generator())
    truth, _ = task.look(engine, state, torch.Generator())
    at, turned = relative(truth)
    assert turned[:, 0].abs().min() > 1 - 1e-6
    back = poses["offset"].float() - torch.cat([lateral, torch.full((len(lateral), 1), depth)], -1)
    assert (at - poses["offset"]).norm(dim=-1).max() < 2e-6
    engine.write("mocap_pos", (engine.read("mocap_pos")[:, 0] + rotate(state["socket_quat"], back))[:, None].double())
    engine.forward()
    return engine.read("sensordata")[:, task.sensors["contact"]][:, 0] < 0


def directions(count: int = 24) -> torch.Tensor:
    angle = torch.arange(count) * (2 * math.pi / count) + 0.01
    return torch.stack([angle.cos(), angle.sin()], -1)


@pytest.mark.parametrize(("clearance", "factor"), [(0.0002, 1.0), (0.0005, 1.3), (0.002, 0.8)])
@pytest.mark.parametrize(("part", "depth", "error"), [("rod", 0.015, 0.075), ("bayonet", 0.012, 0.11)])
def test_a_round_hole_is_round_and_as_wide_as_it_says(part, depth, error, clearance, factor) -> None:
    """A round pin touches a true hole when it is the clearance off the axis, whatever the direction."""
    task, radius = cell(part, clearance=clearance), clearance * factor
    slack = 3e-6  # inverse kinematics, float32
    assert not touching(task, depth, (radius * (1 - error) - slack) * directions(), factor).any()
    assert touching(task, depth, (radius * (1 + error) + slack) * directions(), factor).all()


@pytest.mark.parametrize(("clearance", "factor"), [(0.0002, 1.0), (0.0005, 1.3), (0.002, 0.8)])
def test_a_square_hole_has_its_clearance_on_each_side(clearance, factor) -> None:
    task, side = cell("peg", clearance=clearance), clearance * factor
    axes = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert not touching(task, 0.015, (side - 3e-6) * axes, factor).any()
    assert touching(task, 0.015, (side + 3e-6) * axes, factor).all()


@parts
def test_the_floor_is_where_the_part_says(part) -> None:
    task = cell(part)
    nowhere = torch.zeros(4, 2)
    assert not touching(task, task.part.hole - 5e-6, nowhere).any()
    assert touching(task, task.part.hole + 5e-6, nowhere).all()


@parts
def test_shapes_weigh_what_they_say_and_meet_only_by_pairs(part) -> None:
    model = cell(part).model
    assert model.body("tool").mass[0] == pytest.approx(sum(shape.mass for shape in PARTS[part].tool))
    assert not model.geom_contype.any() and not model.geom_conaffinity.any()
    kinds = mujoco.mjtGeom
    convex = (kinds.mjGEOM_PLANE, kinds.mjGEOM_BOX, kinds.mjGEOM_CAPSULE, kinds.mjGEOM_CYLINDER)
    assert set(model.geom_type.tolist()) <= {int(kind) for kind in convex}


# -- the lock ----------------------------------------------------------------------------------------------------------


def pulled(task, rows: torch.Tensor, newton: float) -> torch.Tensor:
    """Depth of the tip [n] after a second of a pull along the socket's axis, while the arm holds."""
    engine = make_engine(task, len(rows))
    engine.set_state(rows)
    pull = torch.zeros(len(rows), task.model.nbody, 6, dtype=torch.float64)
    pull[:, task.model.body("tool").id, 2] = newton
    engine.write("xfrc_applied", pull)
    engine.step(500)
    return engine.read("mocap_pos")[:, 0, 2] - engine.read("sensordata")[:, task.sensors["tcp_pos"]][:, 2]


@pytest.mark.parametrize("clearance", CLEARANCES)
def test_a_locked_bayonet_stays_and_an_unlocked_one_comes_out(clearance) -> None:
    task = cell("bayonet", clearance=clearance)
    degrees = torch.tensor([0.0, 2.0, 60.0, 66.0, 72.0])
    rows, _ = place(task, torch.full((5,), 0.023), torch.deg2rad(degrees))
    # the arm's spring alone lets 45 N take the tool 30 mm
    depth = pulled(task, rows, 45.0)
    assert (depth[:2] < 0.0).all()
    assert (depth[2:] > LOCKED - 1e-4).all()
    assert (pulled(task, rows, 150.0)[2:] > LOCKED - 3e-4).all()


def test_whatever_counts_as_success_resists_a_pull() -> None:
    """Of all the places in a bayonet's socket: none that would be success comes out, and the unturned ones do."""
    task = cell("bayonet", clearance=0.001)
    engine = make_engine(task, 128)
    poses = assembly_starts.sample_poses(task, "inserted", 128, torch.Generator().manual_seed(2))
    rows, valid = assembly_starts.settle(task, engine, poses)
    assert valid.float().mean() > 0.98
    state = task.start(engine, {"delay": torch.zeros(128)}, torch.Generator())
    truth, _ = task.look(engine, state, torch.Generator())
    good = valid & succeeded(task.spec.success, truth)
    out = pulled(task, rows, 45.0) < 0.005
    twist = poses["turn"][:, 2]
    assert good.sum() > 5 and not out[good].any()
    assert out[valid & (twist < 0.02)].float().mean() > 0.95
    assert not out[valid & (twist > math.radians(45))].any()


def test_posts_end_the_turn_at_both_sides() -> None:
    task = cell("bayonet")
    rows, _ = place(task, torch.full((2,), 0.023), torch.deg2rad(torch.tensor([40.0, 10.0])))
    engine = make_engine(task, 2)
    engine.set_state(rows)
    for _ in range(60):  # turned on by 0.05 rad ahead of where it is, up to 1 N m
        state = task.start(engine, {"delay": torch.zeros(2)}, torch.Generator())
        truth, _ = task.look(engine, state, torch.Generator())
        lead = torch.tensor([[0.0, 0.0, 0.05], [0.0, 0.0, -0.05]])
        engine.write("ctrl", task.controls(truth["tcp_pos"], quat_multiply(truth["tcp_quat"], rotvec_to_quat(lead))).double())
        engine.step(20)
    twist = turn_about_z(relative(truth)[1])
    assert float(twist[0]) == pytest.approx(END, abs=math.radians(4))
    assert float(twist[1]) == pytest.approx(BACK, abs=math.radians(4))


@pytest.mark.parametrize(("depth", "degrees"), [(0.023, 0.0), (0.023, 55.0), (-0.002, 65.0), (LOCKED - 0.001, 20.0)])
def test_less_than_inserted_and_turned_is_no_success(depth: float, degrees: float) -> None:
    """Held for half an episode: inserted and not turned, not turned enough, turned above the mouth, not at the bottom."""
    task = cell("bayonet")
    rows, _ = place(task, torch.full((2,), depth), torch.full((2,), math.radians(degrees)))
    env = env_from(task, rows)
    env.reset(0)
    for _ in range(100):
        assert not env.step(torch.zeros(2, 6))[4]["success"].any()


def test_locked_for_five_steps_is_success() -> None:
    task = cell("bayonet")
    rows, _ = place(task, torch.full((2,), 0.023), torch.full((2,), math.radians(63.0)))
    env = env_from(task, rows)
    env.reset(0)
    assert [bool(env.step(torch.zeros(2, 6))[4]["success"].all()) for _ in range(5)] == [False] * 4 + [True]


# -- turn --------------------------------------------------------------------------------------------------------------


@given(st.floats(-3.1, 3.1), st.floats(0.0, 2.5), st.floats(0.0, 6.3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_turn_about_z_is_what_is_left_without_the_tilt(turn: float, tilt: float, way: float, negative: bool) -> None:
    about = rotvec_to_quat(np.array([0.0, 0.0, turn]))
    tilted = rotvec_to_quat(np.array([tilt * math.cos(way), tilt * math.sin(way), 0.0]))
    quat = (-1.0 if negative else 1.0) * quat_multiply(about, tilted)
    assert turn_about_z(quat) == pytest.approx(turn, abs=1e-9)
    assert turn_about_z(torch.from_numpy(quat)[None])[0] == pytest.approx(turn, abs=1e-9)


def test_success_asks_for_the_turn_in_torch_and_numpy_alike_and_survives_json() -> None:
    task = cell("bayonet")
    spec = PolicySpec.from_dict(json.loads(json.dumps(task.spec.to_dict())))
    assert spec == task.spec and spec.success.turn == TURN
    peg = cell("peg").spec
    assert PolicySpec.from_dict(json.loads(json.dumps(peg.to_dict()))) == peg and peg.success.turn is None
    degrees = torch.tensor([-65.0, 0.0, 59.9, 60.1, 100.0])
    rows = rotvec_to_quat(torch.stack([0 * degrees, 0 * degrees, torch.deg2rad(degrees)], -1))
    readings = {
        "tcp_pos": torch.tensor([[0.0, 0.0, 0.023]]).expand(5, 3),
        "tcp_quat": rows,
        "socket_pos": torch.zeros(5, 3),
        "socket_quat": torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(5, 4),
    }
    arrays = {name: value.numpy() for name, value in readings.items()}
    assert succeeded(spec.success, readings).tolist() == succeeded(spec.success, arrays).tolist() == [False] * 3 + [True] * 2


def test_the_policy_sees_how_far_it_has_turned() -> None:
    """From the largest twist of a start to beyond the lock: in proportion, without a jump, and finely about 0."""
    task = cell("bayonet", **EXACT)
    twist = torch.deg2rad(torch.tensor([-20.0, -5.0, 0.0, 2.0, 30.0, 60.0, 80.0, 120.0]))
    rows, _ = place(task, torch.full((8,), -0.02), twist)
    engine = make_engine(task, 8)
    engine.set_state(rows)
    state = task.start(engine, {"delay": torch.zeros(8)}, torch.Generator())
    obs = observe(task.spec, task.look(engine, state, torch.Generator())[1], state)
    starts = np.cumsum([0, *task.spec.sizes])
    names = [term.name for term in task.spec.terms]
    coarse = obs[:, starts[names.index("tip rotation")] + 2]
    fine = obs[:, starts[names.index("tip rotation, fine")] + 2]
    torch.testing.assert_close(coarse, twist / 0.2, atol=0.01, rtol=0)
    torch.testing.assert_close(fine, (twist / 0.05).clamp(-3, 3), atol=0.03, rtol=0)


# -- starts and reachability -------------------------------------------------------------------------------------------


@parts
@pytest.mark.parametrize("robot", list(ROBOTS))
def test_proposed_starts_are_reachable_and_settle(part: str, robot: str) -> None:
    task = cell(part, robot, clearance=0.0002)
    engine = make_engine(task, 128)
    for tag in task.tag_names:
        poses = assembly_starts.sample_poses(task, tag, 128, torch.Generator().manual_seed(4))
        _, valid = assembly_starts.settle(task, engine, poses)
        assert valid.float().mean() >= 0.99, tag


@parts
def test_inserted_starts_lie_along_the_whole_way(part: str) -> None:
    task = cell(part)
    poses = assembly_starts.sample_poses(task, "inserted", 2000, torch.Generator().manual_seed(0))
    depth, twist = poses["offset"][:, 2], poses["turn"][:, 2]
    success = task.spec.success
    bins = torch.histc(depth, 8, 0.0, success.depth)
    assert bins.min() > 40
    arrived = depth >= success.depth
    if success.turn is not None:
        assert torch.histc(twist[depth > 0.022], 6, 0.0, success.turn).min() > 60
        arrived &= twist >= success.turn
    assert 0.05 < arrived.double().mean() < 0.3


def test_a_bank_holds_all_kinds_and_orders_them_by_what_is_left() -> None:
    task = cell("bayonet")
    bank = task.make_bank(make_engine(task, 64))
    assert torch.bincount(bank.tags).tolist() == [26, 22, 16]
    assert bank.difficulty is not None
    inserted, near, far = (bank.difficulty[bank.tags == tag] for tag in range(3))
    assert float(inserted.min()) < 0.0005  # some have arrived, but for a clearance
    assert inserted.max() < 0.05 and near.min() > LOCKED and far.min() > near.min() + 0.02
    # what is in and not turned has the turn before it
    rows, _ = place(task, torch.tensor([0.023, 0.023, 0.0]), torch.tensor([0.0, TURN / 2, 0.0]))
    engine = make_engine(task, 8)
    left = assembly_starts.goal_distance(task, engine, rows)
    expected = torch.tensor([0.02 * TURN, 0.01 * TURN, LOCKED + 0.02 * TURN], dtype=torch.float64)
    torch.testing.assert_close(left, expected, atol=4e-4, rtol=0)


@parts
@pytest.mark.parametrize("robot", list(ROBOTS))
def test_a_script_that_sees_the_socket_puts_every_part_in_within_its_time(part: str, robot: str) -> None:
    task = cell(part, robot, **EXACT)
    engine, generator = make_engine(task, 16), torch.Generator().manual_seed(7)
    rows = torch.cat([assembly_starts.starts(task, engine, tag, 6, generator) for tag in task.tag_names])
    assert successes(env_from(task, rows)).all()


@parts
def test_the_tightest_clearance_can_be_solved(part: str) -> None:
    task = cell(part, clearance=0.0002, **EXACT)
    rows = assembly_starts.starts(task, make_engine(task, 16), "far", 8, torch.Generator().manual_seed(8))
    assert successes(env_from(task, rows)).float().mean() > 0.8


def test_turning_the_wrong_way_does_not_lock() -> None:
    task = cell("bayonet", **EXACT)
    rows, _ = place(task, torch.full((4,), 0.023), torch.zeros(4))
    env = env_from(task, rows)
    env.reset(0)
    backward = torch.zeros(4, 6)
    backward[:, 5] = -1.0
    for _ in range(150):
        assert not env.step(backward)[4]["success"].any()
    assert (turn_about_z(relative(env._seen)[1]) < 0).all()


@parts
def test_errors_name_depth_and_turn(part: str) -> None:
    task = cell(part)
    rows, _ = place(task, torch.full((2,), 0.015 if part != "bayonet" else 0.023), torch.tensor([0.0, 0.01]))
    env = env_from(task, rows)
    env.reset(0)
    errors = env.step(torch.zeros(2, 6))[4]["errors"]
    assert set(errors) == ({"depth_m", "turn_rad"} if part == "bayonet" else {"depth_m"})
    if part == "bayonet":
        torch.testing.assert_close(errors["turn_rad"], torch.tensor([0.0, 0.01]), atol=2e-3, rtol=0)
        torch.testing.assert_close(errors["depth_m"], torch.tensor([0.023, 0.023]), atol=2e-4, rtol=0)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": "bayonett"}, "did you mean 'bayonet'"),
        ({"part": "rod", "clearance": 0.0001}, "expected 0.0002 to 0.005 with task.part=rod"),
        ({"part": "bayonet", "clearance": 0.003}, "expected 0.0002 to 0.002 with task.part=bayonet"),
        ({"part": "rod", "success_depth": 0.04}, "less than the hole's 0.032 m"),
        ({"part": "bayonet", "success_depth": 0.01}, "locked from"),
        ({"part": "peg", "episode_s": 0.1}, "expected 0.5 to 3600 s"),
    ],
)
def test_impossible_options_are_refused(changes, message) -> None:
    options = AssemblyOptions()
    for name, value in changes.items():
        setattr(options, name, value)
    with pytest.raises(BadInput, match=message):
        check(options)


def test_limits_of_time_and_depth_are_the_parts_unless_given() -> None:
    assert cell("peg").spec.episode_s == 3.2 and cell("bayonet").spec.episode_s == 8.0
    assert cell("bayonet", episode_s=5.0).spec.max_steps == 125
    assert cell("rod", success_depth=0.02).spec.success.depth == 0.02
    assert LOCKED - 0.0005 < cell("bayonet").spec.success.depth < LOCKED < HOLE


def test_the_script_pushes_only_what_is_aligned() -> None:
    """The script is no brute force: from 10 mm beside the mouth it first moves over."""
    task = cell("peg", **EXACT)
    rows, _ = place(task, torch.full((1,), -0.01), torch.zeros(1), torch.tensor([[0.01, 0.0]]))
    env = env_from(task, rows)
    env.reset(0)
    action = task.script(env.engine, env._state)
    assert float(action[0, 0]) == -1.0 and float(action[0, 2]) == 1.0
