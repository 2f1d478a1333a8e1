"""One square tile of terrain: its grid, its layout, and where a robot can stand in it.

Every kind keeps to one layout, so that one rule tells a fallen robot in all of them: ground that is meant to be walked on
lies at 0 m or above, everything else lies at `VOID`. A moat at `VOID` runs round every tile.

Most tiles are crossed from the middle outwards: a level platform, the obstacle as a square ring round it, and a level ring
on which the goals lie. Which way a robot turns, the obstacle is the same. A ring at r means max(|x|, |y|) = r.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CELL = 0.05
"""Distance between neighbouring heights [m]: what is vertical elsewhere rises within one cell here."""
SAMPLES = 160
"""Heights along a side."""
SIDE = SAMPLES * CELL
"""Side of a tile [m], as legged_gym's (Rudin et al., arXiv 2109.11978)."""
VOID = -1.0
"""Floor of everything that is not ground [m]: deeper than the 0.43 m leg of a Go1."""
APART = 2.0
"""Least horizontal distance between a start and a goal of the same tile [m]."""
REACH = 0.25
"""Half side of the square of level ground round a start or goal [m]: a Go1's feet stand 0.19 m before and 0.13 m beside it."""

# in cells
PLATFORM = 20
RING = 56
EDGE = 72

_TOLERANCE = 1e-4  # of level ground [m]

AXIS = np.arange(SAMPLES) - SAMPLES // 2
ROWS, COLUMNS = np.meshgrid(AXIS, AXIS, indexing="ij")
"""Place of each height in cells from the tile's middle: rows along y, columns along x."""
RADIUS = np.maximum(np.abs(ROWS), np.abs(COLUMNS))
OBSTACLE = (RADIUS > PLATFORM) & (RADIUS < RING)
"""The square ring between the platform in the middle and the ring of goals, bool [SAMPLES, SAMPLES]."""


@dataclass(frozen=True, eq=False)
class Tile:
    """Ground of `SIDE` by `SIDE` metres, its middle at the origin.

    heights: float32 [SAMPLES, SAMPLES] in metres, rows along y, columns along x, `CELL` apart; the first is at -SIDE / 2.
    start, goal: bool, same shape, where a robot may start, and what it may be sent to. The ground is level within `REACH`
        of each, and every goal is at least `APART` from every start.
    measure: how hard the obstacle is, in the unit that its kind names.
    """

    heights: np.ndarray
    start: np.ndarray
    goal: np.ndarray
    measure: float


Build = Callable[[float, np.random.Generator], Tile]
"""Makes a tile from a level's share of the difficulty, 0 to 1, and a generator for all that is left to chance."""


def ramp(share: float, first: float, last: float) -> float:
    """From `first` at share 0 to `last` at share 1."""
    return first + (last - first) * share


def cells(share: float, first: float, last: float) -> int:
    """The same of a length [m], as a whole number of cells."""
    return round(ramp(share, first, last) / CELL)


def level_ground(heights: np.ndarray) -> np.ndarray:
    """Where ground is level within `REACH` on every side and not at `VOID`, bool like `heights`."""
    reach = round(REACH / CELL)
    padded = np.pad(heights, reach, constant_values=VOID)
    highest = lowest = padded
    for axis in (0, 1):
        highest = np.lib.stride_tricks.sliding_window_view(highest, 2 * reach + 1, axis).max(-1)
        lowest = np.lib.stride_tricks.sliding_window_view(lowest, 2 * reach + 1, axis).min(-1)
    return (highest - lowest < _TOLERANCE) & (lowest > VOID / 2)


def finish(heights: np.ndarray, start: np.ndarray, goal: np.ndarray, measure: float) -> Tile:
    """The tile of these heights behind its moat; `start` and `goal` are the regions to look for safe ground in."""
    heights = np.where(RADIUS > EDGE, VOID, heights).astype(np.float32)
    level = level_ground(heights)
    start = start & level
    return Tile(heights, start, goal & level & ~_near(start), measure)


def crossing(heights: np.ndarray, measure: float) -> Tile:
    """A tile that is crossed from the platform in the middle, over the obstacle, to the ring."""
    return finish(heights, RADIUS <= PLATFORM, RADIUS >= RING, measure)


def _near(start: np.ndarray) -> np.ndarray:
    """Where any start is nearer than `APART`, and half a cell on either side, for positions drawn between heights."""
    radius = APART / CELL + 2**0.5
    near = np.zeros_like(start)
    for row in np.flatnonzero(start.any(1)):
        columns = np.flatnonzero(start[row])
        half = np.sqrt(np.maximum(radius**2 - (AXIS - AXIS[row]) ** 2, 0))
        reached = np.abs(np.arange(SAMPLES)[:, None] - columns[None]).min(1)
        near |= (reached[None] <= half[:, None]) & (np.abs(AXIS - AXIS[row]) <= radius)[:, None]
    return near
