"""Terrains: their obstacles measured from the heights alone, safe ground by scipy's filters, the lookup against MuJoCo."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial import cKDTree

from embodied.sim.tasks.terrains import KINDS, LEVELS, VOID
from embodied.sim.tasks.terrains.kinds import make_tile

CELL, SAMPLES, SIDE = 0.05, 160, 8.0
LEG = 0.426  # hip to foot of a Go1 [m]: two links of 0.213 m
AT = np.arange(SAMPLES) - SAMPLES // 2
RING = np.maximum(abs(AT)[:, None], abs(AT)[None])
AWAY = CELL * np.hypot(AT[:, None], AT[None])
TWO_FORMS = ("slopes", "stairs", "floating_islands")
kinds = pytest.mark.parametrize("kind", list(KINDS))
seeds = st.integers(0, 2**31)


# -- how hard: from the heights alone -------------------------------------------------------------------------------------


def ground(tile):
    return tile.heights > VOID / 2


def runs(line):
    """(value, first, length) of each run of equal values."""
    found, first = [], 0
    for value, group in groupby(line.tolist()):
        length = len(list(group))
        found.append((value, first, length))
        first += length
    return found


def inner_runs(mask, wanted, within):
    """Lengths [cells] of the runs of `wanted` in rows, and in columns, of a mask that end inside the region `within`."""
    lengths = ([], [])
    for axis, (lines, region) in enumerate(((mask, within), (mask.T, within.T))):
        for line, inside in zip(lines, region, strict=True):
            lengths[axis].extend(n for value, i, n in runs(line) if value == wanted and inside[max(i - 1, 0) : i + n + 1].all())
    return lengths


def mode(values):
    return max(set(values), key=values.count)


def steepest(tile):
    """Greatest slope along x or y between neighbouring heights of the ground."""
    inside = tile.heights[9:152, 9:152]
    return max(abs(np.diff(inside, axis=axis)).max() for axis in (0, 1)) / CELL


def riser(tile):
    """The one difference of height between neighbours on the line from the middle outwards."""
    steps = abs(np.diff(tile.heights[80, 80:152].astype(float)))
    steps = steps[steps > 1e-6]
    assert len(steps) == 6 and np.ptp(steps) < 1e-6
    return steps.mean()


def height(tile):
    return np.ptp(tile.heights[ground(tile)])


def gap(tile):
    line = ground(tile)[80, 80:152]
    lengths = {n for value, _, n in runs(line) if not value}
    assert len(lengths) == 1
    return (lengths.pop() + 1) * CELL


def stone(tile):
    along, across = (mode(lengths) for lengths in inner_runs(ground(tile), True, (RING > 20) & (RING < 56)))
    assert along == across
    return (along - 1) * CELL


def beam(tile):
    """Thinnest run of ground on the line through the middle that crosses the beams."""
    cut = min(ground(tile)[80, 8:152], ground(tile)[8:152, 80], key=lambda line: line.sum())
    lengths = [n for value, _, n in runs(cut) if value]
    assert len(lengths) == 3
    return (min(lengths) - 1) * CELL


def radial_beam(tile):
    """Eight beams cover 8 x width of each circle, nearly: the area of ground between two circles, over their distance."""
    between = (AWAY > 2.4) & (AWAY < 2.75)
    return ground(tile)[between].sum() * CELL**2 / 0.35 / 8


def corridor(tile):
    floor = tile.heights == 0
    return (min(min(lengths) for lengths in inner_runs(floor, True, RING <= 72)) - 1) * CELL


def hills(tile):
    """Greatest slope, of a spline through the heights."""
    inside = tile.heights[9:152, 9:152].astype(float)
    return np.hypot(*(ndimage.correlate1d(inside, [-0.5, 0, 0.5], axis=a, mode="nearest") for a in (0, 1))).max() / CELL


def channel(tile):
    """Narrowest hole between two islands: the same along x and along y."""
    along, across = (min(lengths) for lengths in inner_runs(ground(tile), False, (RING > 20) & (RING < 56)))
    assert along == across
    return (along + 1) * CELL


def goal_distance(tile):
    return AWAY[tile.goal].min()


MEASURES = {
    # kind: (measured from heights, at level 0, at level 9, how exactly it can be measured on the grid)
    "flat": (goal_distance, 2.4, 3.1, CELL),
    "slopes": (steepest, 0.04, 0.4, 1e-4),
    "rough": (height, 0.02, 0.15, 5e-3),
    "stairs": (riser, 0.05, 0.23, 1e-6),
    "boxes": (height, 0.05, 0.20, 1e-6),
    "gaps": (gap, 0.10, 0.55, 1e-6),
    "pits": (height, 0.05, 0.35, 1e-6),
    "stepping_stones": (stone, 0.60, 0.15, 1e-6),
    "balance_beams": (beam, 0.60, 0.15, 1e-6),
    "radiating_beams": (radial_beam, 0.60, 0.15, 0.03),
    "maze": (corridor, 1.5, 0.6, 1e-6),
    "contoured": (hills, 0.1, 0.6, 1e-4),
    "floating_islands": (channel, 0.10, 0.55, 1e-6),
}


def test_there_are_thirteen_kinds_in_ten_levels():
    assert len(KINDS) == 13 and LEVELS == 10 and list(MEASURES) == list(KINDS)


@kinds
def test_levels_get_harder_by_the_published_measure(kind):
    measure, first, last, exactness = MEASURES[kind]
    tiles = [make_tile(kind, level, variant=level % 2, seed=3) for level in range(LEVELS)]
    measured = np.array([measure(tile) for tile in tiles])
    assert [tile.measure for tile in tiles] == pytest.approx(measured, abs=exactness)
    # the ends, and evenly spaced between them
    assert [tile.measure for tile in tiles] == pytest.approx(np.linspace(first, last, LEVELS), abs=1e-9)
    assert (np.diff(measured) < 0).all() if KINDS[kind].shrinks else (np.diff(measured) > 0).all()


def test_stones_move_apart_as_they_shrink():
    spaces = [channel(make_tile("stepping_stones", level, 0, 5)) for level in range(LEVELS)]
    assert spaces[0] == pytest.approx(0.10) and spaces[-1] == pytest.approx(0.20)
    assert (np.diff(spaces) >= 0).all()


@pytest.mark.parametrize("level", [0, 4, 9])
def test_jump_boxes_differ_in_height_by_no_more_than_a_stair(level):
    tops = [sorted(height(make_tile("floating_islands", level, variant, seed)) for variant in range(2)) for seed in range(3)]
    assert np.array(tops) == pytest.approx(np.tile([0, 0.05 + 0.02 * level], (3, 1)))


@pytest.mark.parametrize("kind", TWO_FORMS)
def test_variants_take_both_forms_in_turn(kind):
    """Bowls and hills, level and raised islands: told apart by the height of the middle and of the highest ground."""
    shapes = [make_tile(kind, 9, variant, 11).heights for variant in range(4)]
    signs = [(round(float(h[80, 80]), 6), round(float(h.max()), 6)) for h in shapes]
    assert signs[0] == signs[2] != signs[1] == signs[3]


# -- where to stand ---------------------------------------------------------------------------------------------------------


@kinds
@settings(max_examples=8, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1), variant=st.integers(0, 3))
def test_starts_and_goals_stand_on_safe_ground(kind, seed, level, variant):
    tile = make_tile(kind, level, variant, seed)
    assert tile.heights.dtype == np.float32 and tile.heights.shape == (SAMPLES, SAMPLES)
    # 0.25 m on every side
    high, low = (f(tile.heights, 11, mode="constant", cval=VOID) for f in (ndimage.maximum_filter, ndimage.minimum_filter))
    for places in (tile.start, tile.goal):
        assert places.sum() >= 9
        assert (high[places] - low[places] < 1e-3).all() and (low[places] >= 0).all()
    # positions are drawn within half a cell of these
    nearest = cKDTree(np.argwhere(tile.start)).query(np.argwhere(tile.goal))[0].min()
    assert nearest * CELL >= 2.0 + CELL * math.sqrt(2) - 1e-9


@kinds
@settings(max_examples=8, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1))
def test_ground_is_at_or_above_zero_and_all_else_deeper_than_a_leg(kind, seed, level):
    heights = make_tile(kind, level, 0, seed).heights
    deep = heights < 0
    assert (heights[deep] == VOID).all() and VOID < -LEG
    # behind the moat there is no way to the next tile
    assert deep[RING > 72].all() and not deep[RING == 72].all()


# -- ways from start to goal ------------------------------------------------------------------------------------------------


def joined(passable, tile):
    """Whether every start and every goal is in one 4-connected piece of `passable`."""
    pieces = ndimage.label(passable)[0]
    return len(set(pieces[tile.start | tile.goal])) == 1 and pieces[tile.start].all()


@settings(max_examples=10, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1))
def test_mazes_have_exactly_one_way_between_any_two_places(seed, level):
    tile = make_tile("maze", level, 0, seed)
    floor = tile.heights == 0
    assert joined(floor, tile) and ndimage.label(floor)[1] == 1
    # m x m rooms of width w and m x m - 1 openings through walls that are 4 cells thick, counted in heights
    width = round(tile.measure / CELL)
    rooms = ((144 - 4) // (width + 4)) ** 2
    assert floor.sum() == rooms * (width + 1) ** 2 + (rooms - 1) * (width + 1) * 3
    # a loop would cut a piece of wall off from the rest
    assert ndimage.label(tile.heights > 0)[1] == 1
    # nor can a wall be climbed: it is higher than a leg is long
    assert tile.heights.max() > LEG


@pytest.mark.parametrize("kind", ["balance_beams", "radiating_beams"])
@settings(max_examples=10, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1))
def test_beams_join_starts_and_goals(kind, seed, level):
    tile = make_tile(kind, level, 0, seed)
    assert joined(ground(tile), tile) and ndimage.label(ground(tile))[1] == 1
    # and nothing else does
    thin = ndimage.binary_opening(ground(tile), np.ones((15, 15)))
    assert not joined(thin, tile)


@pytest.mark.parametrize("kind", ["gaps", "stepping_stones", "floating_islands"])
@settings(max_examples=10, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1), variant=st.integers(0, 1))
def test_islands_are_joined_by_jumps_of_the_published_width_only(kind, seed, level, variant):
    tile = make_tile(kind, level, variant, seed)
    widest = {"stepping_stones": 0.10 + 0.10 * level / 9}.get(kind, tile.measure)
    width = round(widest / CELL)  # from edge to edge: one less than the holes' heights between
    land = ground(tile)
    assert joined(jumped(land, width), tile)
    if kind == "gaps":
        assert not joined(jumped(land, width - 1), tile)


def jumped(land, width):
    """Land, and what lies between two pieces of it at most `width` cells apart along a row or a column."""
    bridged = land.copy()
    for lines in (bridged, bridged.T):
        for line in lines:
            for value, first, length in runs(line):
                if not value and length < width and first > 0 and first + length < len(line):
                    line[first : first + length] = True
    return bridged


@pytest.mark.parametrize("kind", ["flat", "slopes", "rough", "stairs", "boxes", "pits", "contoured"])
@settings(max_examples=5, deadline=None)
@given(seed=seeds, level=st.integers(0, LEVELS - 1))
def test_whole_ground_has_no_step_above_the_published_one(kind, seed, level):
    tile = make_tile(kind, level, 0, seed)
    inside = tile.heights[8:153, 8:153]
    assert (inside >= 0).all()
    step = max(abs(np.diff(inside, axis=axis)).max() for axis in (0, 1))
    slopes = ("slopes", "contoured")
    assert step <= (tile.measure * CELL * math.sqrt(2) if kind in slopes else tile.measure) + 1e-6
