"""Kinds whose ground is whole: a foot finds ground everywhere."""

from __future__ import annotations

import numpy as np

from embodied.sim.tasks.terrains.tile import (
    CELL,
    COLUMNS,
    EDGE,
    OBSTACLE,
    PLATFORM,
    RADIUS,
    RING,
    ROWS,
    SAMPLES,
    Tile,
    cells,
    crossing,
    finish,
    ramp,
)

_LATTICE = 4  # cells between independent heights of rough ground: legged_gym's 0.2 m
_TREAD = 6  # cells of one stair: 0.30 m, legged_gym's 0.31 m
_MIDDLE = 0.25  # m about the middle of flat ground where robots start
_BLOCKS = 100
_WAVES = 8
_HILLS = (12, 60)  # cells: contoured ground needs room for its waves


def flat(share: float, rng: np.random.Generator) -> Tile:
    """Level ground; the goals move away from the middle, 2.4 to 3.1 m."""
    distance = ramp(share, 2.4, 3.1)
    away = np.hypot(ROWS, COLUMNS) * CELL
    heights = np.zeros((SAMPLES, SAMPLES))
    return finish(heights, away <= _MIDDLE, (away >= distance) & (away <= distance + 0.2), distance)


def _outward(profile: np.ndarray, down: bool, measure: float) -> Tile:
    """A bowl to climb out of, or the hill that is its mirror image, from heights that rise with the ring."""
    return crossing(profile.max() - profile if down else profile, measure)


def _slope(share: float, down: bool) -> Tile:
    slope = ramp(share, 0.04, 0.4)
    return _outward(slope * CELL * (np.clip(RADIUS, PLATFORM, RING) - PLATFORM), down, slope)


def slope_up(share: float, rng: np.random.Generator) -> Tile:
    """An inverted pyramid, to be left uphill."""
    return _slope(share, down=False)


def slope_down(share: float, rng: np.random.Generator) -> Tile:
    """A pyramid, to be left downhill."""
    return _slope(share, down=True)


def _stairs(share: float, down: bool) -> Tile:
    step = ramp(share, 0.05, 0.23)
    steps = -(-(np.clip(RADIUS, PLATFORM, RING) - PLATFORM) // _TREAD)
    return _outward(step * steps, down, step)


def stairs_up(share: float, rng: np.random.Generator) -> Tile:
    """Six steps up on every side."""
    return _stairs(share, down=False)


def stairs_down(share: float, rng: np.random.Generator) -> Tile:
    """Six steps down on every side."""
    return _stairs(share, down=True)


def rough(share: float, rng: np.random.Generator) -> Tile:
    """Independent heights every 0.2 m, joined by straight lines."""
    height = ramp(share, 0.02, 0.15)
    return crossing(np.where(OBSTACLE, lattice(height, SAMPLES, rng), height / 2), height)


def lattice(height: float, samples: int, rng: np.random.Generator) -> np.ndarray:
    """Heights [samples, samples] of rough ground, from 0 to `height`."""
    coarse = rng.uniform(0, height, (samples // _LATTICE + 1,) * 2)
    at, knots = np.arange(samples) / _LATTICE, np.arange(samples // _LATTICE + 1)
    along = np.stack([np.interp(at, knots, row) for row in coarse])
    return np.stack([np.interp(at, knots, column) for column in along.T], 1)


def boxes(share: float, rng: np.random.Generator) -> Tile:
    """Blocks of 0.4 to 1.0 m, of half and of full height, strewn over the obstacle ring and over each other."""
    height = ramp(share, 0.05, 0.20)
    ground = np.zeros((SAMPLES, SAMPLES))
    for block in range(_BLOCKS):
        row, column = rng.integers(0, SAMPLES, 2)
        rows, columns = rng.integers(8, 21, 2)
        ground[row : row + rows, column : column + columns] = height if block % 2 else height / 2
    return crossing(np.where(OBSTACLE, ground, 0), height)


def pits(share: float, rng: np.random.Generator) -> Tile:
    """A pit in the middle to climb out of, then a ditch too wide to jump."""
    depth = ramp(share, 0.05, 0.35)
    ditch = int(rng.integers(36, 39))
    raised = (RADIUS > PLATFORM) & ((ditch >= RADIUS) | (RADIUS >= RING))
    return crossing(np.where(raised, depth, 0.0), depth)


def contoured(share: float, rng: np.random.Generator) -> Tile:
    """Smooth hills: waves of 0.8 to 2 m, scaled to a steepest slope, that fade out towards the middle and the rim."""
    steepest = ramp(share, 0.1, 0.6)
    length, heading, phase = rng.uniform(0.8, 2.0, _WAVES), rng.uniform(0, np.pi, _WAVES), rng.uniform(0, 2 * np.pi, _WAVES)
    ground = np.zeros((SAMPLES, SAMPLES))
    for i in range(_WAVES):
        along = CELL * (COLUMNS * np.cos(heading[i]) + ROWS * np.sin(heading[i]))
        ground += length[i] * np.sin(2 * np.pi * along / length[i] + phase[i])
    inside = np.clip(np.minimum(RADIUS - _HILLS[0], _HILLS[1] - RADIUS) / 12, 0, 1)
    ground *= inside**2 * (3 - 2 * inside)
    ground *= steepest * CELL / np.hypot(*np.gradient(ground)).max()
    return crossing(ground - ground.min(), steepest)


def maze(share: float, rng: np.random.Generator) -> Tile:
    """A perfect maze (one way between any two rooms), its walls 0.6 m high; the corridors narrow, and so get longer."""
    width = cells(share, 1.5, 0.6)
    wall = 4
    rooms = (2 * EDGE - wall) // (width + wall)
    first = SAMPLES // 2 - (rooms * (width + wall) + wall) // 2 + wall
    low = first + (width + wall) * np.arange(rooms)
    floor = np.zeros((SAMPLES, SAMPLES), bool)
    start = np.zeros_like(floor)
    for a, b in _spanning_tree(rooms, rng):
        (top, left), (bottom, right) = np.minimum(a, b), np.maximum(a, b)
        floor[low[top] : low[bottom] + width + 1, low[left] : low[right] + width + 1] = True
    row, column = low[rng.integers(0, rooms, 2)]
    start[row : row + width + 1, column : column + width + 1] = True
    return finish(np.where(floor, 0.0, 0.6), start, floor, width * CELL)


def _spanning_tree(rooms: int, rng: np.random.Generator) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of neighbouring rooms that join all rooms without a loop, by a depth-first walk."""
    path = [(int(rng.integers(rooms)), int(rng.integers(rooms)))]
    seen, pairs = set(path), []
    while path:
        row, column = path[-1]
        around = [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
        fresh = [room for room in around if room not in seen and min(room) >= 0 and max(room) < rooms]
        if not fresh:
            path.pop()
            continue
        room = fresh[rng.integers(len(fresh))]
        pairs.append((path[-1], room))
        seen.add(room)
        path.append(room)
    return pairs
