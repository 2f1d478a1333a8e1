"""Kinds with holes: a foot must find the ground that there is. All holes go down to `VOID`."""

from __future__ import annotations

import numpy as np

from embodied.sim.tasks.terrains.tile import (
    CELL,
    COLUMNS,
    OBSTACLE,
    PLATFORM,
    RADIUS,
    RING,
    ROWS,
    SAMPLES,
    VOID,
    Tile,
    cells,
    crossing,
    finish,
    ramp,
)

_BANK = 30  # cells from the middle to the ends of balance beams


def gaps(share: float, rng: np.random.Generator) -> Tile:
    """Two gaps round the platform, with ground to land on between them."""
    width = cells(share, 0.10, 0.55)
    first = PLATFORM + int(rng.integers(0, 4))
    inner = (first < RADIUS) & (first + width > RADIUS)
    outer = (RING - width < RADIUS) & (RADIUS < RING)
    return crossing(np.where(inner | outer, VOID, 0.0), width * CELL)


def _bricks(size: tuple[int, int], gap: int, rng: np.random.Generator) -> np.ndarray:
    """Courses of bricks with sides of `size` (least, greatest) cells, `gap` cells apart: int [SAMPLES, SAMPLES], 0 is gap."""
    labels = np.zeros((SAMPLES, SAMPLES), int)
    # the first brick may be missing: that is outside of the obstacle ring
    label, low = 0, int(rng.integers(size[0] + gap))
    while low < SAMPLES:
        high = low + int(rng.integers(size[0], size[1] + 1))
        left = int(rng.integers(size[0] + gap))
        while left < SAMPLES:
            right = left + int(rng.integers(size[0], size[1] + 1))
            label += 1
            labels[low : high + 1, left : right + 1] = label
            left = right + gap
        low = high + gap
    return labels if rng.integers(2) else labels.T


def stepping_stones(share: float, rng: np.random.Generator) -> Tile:
    """Square stones, 0.60 to 0.15 m wide, 0.10 to 0.20 m apart."""
    side, gap = cells(share, 0.60, 0.15), cells(share, 0.10, 0.20)
    stones = _bricks((side, side), gap, rng) > 0
    return crossing(np.where(OBSTACLE & ~stones, VOID, 0.0), side * CELL)


def floating_stones(share: float, rng: np.random.Generator) -> Tile:
    """Level islands of 0.6 to 1.0 m, to jump between."""
    gap = cells(share, 0.10, 0.55)
    islands = _bricks((12, 20), gap, rng) > 0
    return crossing(np.where(OBSTACLE & ~islands, VOID, 0.0), gap * CELL)


def jump_boxes(share: float, rng: np.random.Generator) -> Tile:
    """Islands of 0.6 to 1.0 m at different heights (up to 0.05 to 0.23 m), with the gaps of the level ones."""
    gap, height = cells(share, 0.10, 0.55), ramp(share, 0.05, 0.23)
    islands = _bricks((12, 20), gap, rng)
    tops = height * rng.integers(0, 3, islands.max() + 1) / 2
    return crossing(np.where(OBSTACLE, np.where(islands > 0, tops[islands], VOID), 0.0), gap * CELL)


def balance_beams(share: float, rng: np.random.Generator) -> Tile:
    """Three parallel beams, 3 m long, from a bank on one side to the one across."""
    width = cells(share, 0.60, 0.15)
    beams = np.zeros((SAMPLES, SAMPLES), bool)
    for band in range(-66, 66, 44):
        low = band + int(rng.integers(0, 44 - width - 4))
        beams |= (low <= ROWS) & (low + width >= ROWS)
    heights = np.where((np.abs(COLUMNS) < _BANK) & ~beams, VOID, 0.0)
    start, goal = COLUMNS <= -_BANK, COLUMNS >= _BANK
    turns = int(rng.integers(4))
    return finish(np.rot90(heights, turns), np.rot90(start, turns), np.rot90(goal, turns), width * CELL)


def radiating_beams(share: float, rng: np.random.Generator) -> Tile:
    """Eight beams from the platform outwards, at random angles."""
    width = ramp(share, 0.60, 0.15)
    beams = np.zeros((SAMPLES, SAMPLES), bool)
    for angle in np.radians(45 * np.arange(8) + rng.uniform(-12, 12, 8) + rng.uniform(0, 45)):
        along = COLUMNS * np.cos(angle) + ROWS * np.sin(angle)
        across = COLUMNS * np.sin(angle) - ROWS * np.cos(angle)
        beams |= (along > 0) & (np.abs(across) * CELL <= width / 2)
    return crossing(np.where(OBSTACLE & ~beams, VOID, 0.0), width)
