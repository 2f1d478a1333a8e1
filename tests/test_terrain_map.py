"""The map of terrains: its assembly, its lookup against MuJoCo's own rays and contacts, and pairs of starts and goals."""

from __future__ import annotations

import math

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.sim.tasks.terrains import KINDS, LEVELS, VOID, add_to, height_at, make_map, sample_pairs
from embodied.spec.errors import BadInput

CELL, SAMPLES, SIDE = 0.05, 160, 8.0
seeds = st.integers(0, 2**31)


# -- the map ----------------------------------------------------------------------------------------------------------------


def compiled(terrain, *bodies):
    spec = mujoco.MjSpec()
    name = add_to(spec, terrain.ground)
    for body in bodies:
        at = spec.worldbody.add_body(name=body)
        at.add_freejoint()
        at.add_geom(name=body, type=mujoco.mjtGeom.mjGEOM_SPHERE, size=[0.02, 0, 0], mass=0.1, contype=0, conaffinity=0)
        spec.add_pair(geomname1=name, geomname2=body, solref=[0.01, 1])
    spec.option.timestep = 0.005
    model = spec.compile()
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def ray(model, data, x, y):
    """Height of what a ray from above meets."""
    hit = np.zeros(1, np.int32)
    distance = mujoco.mj_ray(model, data, np.array([x, y, 5.0]), np.array([0, 0, -1.0]), None, 1, -1, hit)
    return math.nan if distance < 0 else 5.0 - distance


def test_every_kind_and_level_fits_on_one_map():
    terrain = make_map(list(KINDS), range(LEVELS), 1, 0)
    assert terrain.ground.heights.shape == (13 * SAMPLES + 81, 10 * SAMPLES + 81)
    assert terrain.tiles.shape == (13, 10, 1, 2) and terrain.measures.shape == (13, 10, 1)
    # middles are a tile apart: levels along x, kinds along y, and the map's middle is the origin
    assert terrain.tiles[0, 1, 0] - terrain.tiles[0, 0, 0] == pytest.approx(torch.tensor([SIDE, 0.0]))
    assert terrain.tiles[1, 0, 0] - terrain.tiles[0, 0, 0] == pytest.approx(torch.tensor([0.0, SIDE]))
    assert terrain.tiles.mean((0, 1, 2)) == pytest.approx(torch.zeros(2), abs=1e-4)
    assert terrain.ground.origin == pytest.approx((-(SIDE * 10 / 2 + 2), -(SIDE * 13 / 2 + 2)))
    # two metres of deep floor on every side
    inside = torch.zeros_like(terrain.ground.heights, dtype=torch.bool)
    inside[40:-40, 40:-40] = True
    assert (terrain.ground.heights[~inside] == VOID).all()


@settings(max_examples=4, deadline=None)
@given(seed=seeds)
def test_the_same_seed_gives_the_same_map_and_another_another(seed):
    names = ["rough", "stepping_stones", "maze"]
    one, same, other = (make_map(names, [2, 7], 2, s) for s in (seed, seed, seed + 1))
    assert torch.equal(one.ground.heights, same.ground.heights) and torch.equal(one.starts.xy, same.starts.xy)
    assert torch.equal(one.goals.xy, same.goals.xy) and torch.equal(one.measures, same.measures)
    for row in range(40, 40 + 3 * SAMPLES, SAMPLES):
        for column in range(40, 40 + 4 * SAMPLES, SAMPLES):
            tile = (slice(row, row + SAMPLES), slice(column, column + SAMPLES))
            assert not torch.equal(one.ground.heights[tile], other.ground.heights[tile])
        # nor are two variants the same
        assert not torch.equal(
            one.ground.heights[row : row + SAMPLES, 40:200], one.ground.heights[row : row + SAMPLES, 200:360]
        )


def test_a_tile_does_not_depend_on_its_neighbours():
    alone = make_map(["contoured"], [4], 1, 9)
    among = make_map(["boxes", "contoured", "maze"], [1, 4], 2, 9)
    # kind 1 of 3, level 1 of 2, variant 0 of 2
    tile = among.ground.heights[40 + SAMPLES : 40 + 2 * SAMPLES, 40 + 2 * SAMPLES : 40 + 3 * SAMPLES]
    assert torch.equal(alone.ground.heights[40:-41, 40:-41], tile)


@pytest.fixture(scope="module")
def terrain():
    return make_map(list(KINDS), [1, 9], 1, 4)


def test_the_lookup_is_mujocos_height_field(terrain):
    """MuJoCo's own ray, at random points, at heights of the grid, and on the lines between triangles."""
    model, data = compiled(terrain)
    rng = np.random.default_rng(0)
    half = -np.array(terrain.ground.origin)
    points = rng.uniform(-half + 0.01, half - 0.01, (4000, 2))
    points[:500] = np.round(points[:500] / CELL) * CELL
    expected = np.array([ray(model, data, x, y) for x, y in points])
    found = height_at(terrain.ground, torch.from_numpy(points).reshape(1000, 4, 2))
    assert found.shape == (1000, 4)
    # MuJoCo keeps the heights as float32
    assert found.reshape(-1).numpy() == pytest.approx(expected, abs=1e-5)
    # in float32 positions err by half of 4e-6 m here, and walls rise 1.6 m in 0.05 m
    single = height_at(terrain.ground, torch.from_numpy(points).float().reshape(1000, 4, 2))
    assert single.dtype == torch.float32
    assert single.reshape(-1).numpy() == pytest.approx(expected, abs=1e-3)


def test_beyond_the_map_the_deep_floor_goes_on(terrain):
    outside = torch.tensor([[[1000.0, 0.0], [0.0, -1000.0], [-1000.0, 1000.0]]])
    assert (height_at(terrain.ground, outside) == VOID).all()


def test_feet_meet_the_ground_that_the_lookup_gives():
    """On a slope s a sphere's distance is (z - ground) / sqrt(1 + s^2) - radius; pushed 1 mm in, in every direction."""
    terrain = make_map(["slopes"], [6], 2, 1)
    model, data = compiled(terrain, "foot")
    slope = float(terrain.measures[0, 0, 0])
    for middle in terrain.tiles[0, 0]:
        for x, y in ((1.9, 0.33), (-1.72, 0.41), (0.37, 2.21), (0.11, -1.97)):
            at = middle + torch.tensor([x, y])
            above = (0.02 - 0.001) * math.sqrt(1 + slope**2)
            data.qpos[:3] = [*at.tolist(), float(height_at(terrain.ground, at.view(1, 1, 2))) + above]
            mujoco.mj_forward(model, data)
            assert data.ncon >= 1
            assert data.contact.dist.min() == pytest.approx(-0.001, abs=2e-5)
            assert abs(data.contact.frame[data.contact.dist.argmin()][2]) == pytest.approx(
                1 / math.sqrt(1 + slope**2), abs=1e-3
            )


@pytest.mark.parametrize("place", range(8))
def test_a_foot_that_lands_at_three_metres_a_second_stays_on_its_tread(terrain, place):
    """It must not sink into the height field, wherever in a cell it lands: then prisms would hold it there."""
    model, data = compiled(terrain, "foot")
    step, middle = float(terrain.measures[3, 1, 0]), terrain.tiles[3, 1, 0].numpy()
    data.qpos[:2] = middle + np.random.default_rng(place).uniform([1.42, -1], [1.55, 1])
    data.qpos[2] = float(height_at(terrain.ground, torch.from_numpy(data.qpos[:2]).view(1, 1, 2))) + 0.02 + 3**2 / 2 / 9.81
    for _ in range(400):
        mujoco.mj_step(model, data)
    stands = data.qpos[2] - 0.02
    assert abs(step * np.arange(7) - stands).min() < 2e-3
    assert stands == pytest.approx(float(height_at(terrain.ground, torch.from_numpy(data.qpos[:2]).view(1, 1, 2))), abs=2e-3)


def test_flat_ground_alone_is_a_plane_without_moats():
    terrain = make_map(["flat"], [0, 5], 1, 0)
    model, data = compiled(terrain)
    assert terrain.ground.flat and model.nhfield == 0 and model.geom("ground").type[0] == mujoco.mjtGeom.mjGEOM_PLANE
    assert ray(model, data, 100.0, -3.0) == pytest.approx(0)
    assert (terrain.ground.heights == 0).all()
    assert not make_map(["flat", "rough"], [0], 1, 0).ground.flat


def test_the_ground_touches_only_what_is_named(terrain):
    model, _ = compiled(terrain)
    assert model.geom("ground").contype[0] == 0 and model.geom("ground").conaffinity[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((["stairz"], [0], 1, 0), "did you mean 'stairs'"),
        (([], [0], 1, 0), "at least one"),
        ((["maze", "maze"], [0], 1, 0), "each once"),
        ((["maze"], [], 1, 0), "0 to 9"),
        ((["maze"], [10], 1, 0), "0 to 9"),
        ((["maze"], [3, 3], 1, 0), "each once"),
        ((["maze"], [0], 0, 0), "at least 1 variant"),
        ((["maze"], [0], 1, -1), "seed of 0 or more"),
    ],
)
def test_what_cannot_be_built_is_said(arguments, said):
    with pytest.raises(BadInput, match=said) as error:
        make_map(*arguments)
    assert "\n" not in str(error.value)


# -- pairs ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(seed=seeds, count=st.integers(1, 300))
def test_pairs_lie_in_their_tile_on_level_ground_and_apart(terrain, seed, count):
    pairs = sample_pairs(terrain, count, torch.Generator().manual_seed(seed))
    middle = terrain.tiles[pairs.kind, pairs.level, pairs.variant]
    assert (pairs.start - middle).abs().max() < SIDE / 2 and (pairs.goal - middle).abs().max() < SIDE / 2
    assert (pairs.start - pairs.goal).norm(dim=1).min() >= 2.0
    # a Go1's feet, turned any way: 0.19 m before and 0.13 m beside
    turn = torch.arange(16) * math.pi / 8
    feet = torch.stack([0.22 * turn.cos(), 0.22 * turn.sin()], 1)
    for places in (pairs.start, pairs.goal):
        under = height_at(terrain.ground, torch.cat([places[:, None], places[:, None] + feet], 1))
        assert (under >= -1e-4).all() and ((under.amax(1) - under.amin(1)) < 1e-3).all()
    again = sample_pairs(terrain, count, torch.Generator().manual_seed(seed))
    assert torch.equal(pairs.start, again.start) and torch.equal(pairs.goal, again.goal)


def test_pairs_take_every_tile_as_often_and_spread_over_it(terrain):
    pairs = sample_pairs(terrain, 26 * 200, torch.Generator().manual_seed(0))
    counts = torch.zeros(13, 2, 1).index_put_(
        (pairs.kind, pairs.level, pairs.variant), torch.ones(len(pairs.kind)), accumulate=True
    )
    assert (counts == 200).all()
    # goals of stairs lie all round: each quarter holds about a quarter, 50 +- 4 sigma
    ours = (pairs.kind == list(KINDS).index("stairs")) & (pairs.level == 1)
    to_goal = pairs.goal[ours] - terrain.tiles[3, 1, 0]
    quarters = torch.bincount(((torch.atan2(to_goal[:, 1], to_goal[:, 0]) + math.pi) / (math.pi / 2)).long().clamp(max=3))
    assert ((quarters - 50).abs() < 4 * math.sqrt(200 * 0.25 * 0.75)).all()


def test_ground_moves_to_another_device(terrain):
    moved = terrain.ground.to("meta")
    assert moved.heights.device.type == "meta" and moved.heights.shape == terrain.ground.heights.shape
    assert moved.origin == terrain.ground.origin and moved.flat == terrain.ground.flat
