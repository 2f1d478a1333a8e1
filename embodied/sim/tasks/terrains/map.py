"""All tiles of a task on one map, which is one ground."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied.sim.tasks.terrains.ground import Ground
from embodied.sim.tasks.terrains.kinds import KINDS, LEVELS, make_tile
from embodied.sim.tasks.terrains.tile import CELL, SAMPLES, SIDE, VOID
from embodied.spec.errors import BadInput, nearest

BORDER = 40
"""Cells of floor at `VOID` round all tiles."""


@dataclass(frozen=True, eq=False)
class Spots:
    """Places of every tile, in one list: xy [m] float32 [S, 2]; those of tile t are xy[first[t] : first[t + 1]]."""

    xy: Tensor
    first: Tensor


@dataclass(frozen=True, eq=False)
class TerrainMap:
    """Tiles of `kinds` x `levels` x `variants` side by side, and the deep border round them.

    ground: its middle is the world's origin. What can be walked on is at 0 m or above, all else at `VOID`. A map of flat
        tiles alone is level throughout, without border or moats.
    tiles: float32 [kinds, levels, variants, 2], the middle of each tile [m].
    measures: float32 [kinds, levels, variants], how hard each tile is, as `KINDS[kind].measure` says.
    starts, goals: where a robot can start, and be sent to. Tile t = (kind * levels + level) * variants + variant, by index.
    """

    kinds: tuple[str, ...]
    levels: tuple[int, ...]
    variants: int
    ground: Ground
    tiles: Tensor
    measures: Tensor
    starts: Spots
    goals: Spots


def make_map(kinds: Sequence[str], levels: Sequence[int], variants: int, seed: int) -> TerrainMap:
    """The map of these kinds and levels, `variants` tiles of each; the same arguments give the same map.

    A tile depends on the seed, its kind, its level and its variant, not on what else is on the map.

    Raises:
        BadInput: an unknown or repeated kind or level, or none; no variants; a negative seed.
    """
    _check(kinds, levels, variants, seed)
    shape = (len(kinds), len(levels) * variants)
    heights = np.full((shape[0] * SAMPLES + 2 * BORDER + 1, shape[1] * SAMPLES + 2 * BORDER + 1), VOID, np.float32)
    origin = (-CELL * (heights.shape[1] - 1) / 2, -CELL * (heights.shape[0] - 1) / 2)
    tiles, middles = [], []
    for row, kind in enumerate(kinds):
        for column in range(shape[1]):
            tile = make_tile(kind, levels[column // variants], column % variants, seed)
            corner = BORDER + SAMPLES * np.array([column, row])
            heights[corner[1] : corner[1] + SAMPLES, corner[0] : corner[0] + SAMPLES] = tile.heights
            tiles.append(tile)
            middles.append(origin + CELL * (corner + SAMPLES // 2))
    flat = tuple(kinds) == ("flat",)
    if flat:
        heights[:] = 0
    return TerrainMap(
        tuple(kinds),
        tuple(levels),
        variants,
        Ground(torch.from_numpy(heights), origin, flat),
        torch.tensor(np.array(middles), dtype=torch.float32).reshape(*shape[:1], len(levels), variants, 2),
        torch.tensor([tile.measure for tile in tiles]).reshape(len(kinds), len(levels), variants),
        _spots([(tile.start, middle) for tile, middle in zip(tiles, middles, strict=True)]),
        _spots([(tile.goal, middle) for tile, middle in zip(tiles, middles, strict=True)]),
    )


def _check(kinds: Sequence[str], levels: Sequence[int], variants: int, seed: int) -> None:
    for kind in kinds:
        if kind not in KINDS:
            raise BadInput(f"terrain '{kind}' is unknown: {nearest(kind, KINDS)}")
    if not kinds or len(set(kinds)) < len(kinds):
        raise BadInput(f"terrain kinds {list(kinds)}: expected at least one, each once")
    if not levels or len(set(levels)) < len(levels) or not all(0 <= level < LEVELS for level in levels):
        raise BadInput(f"terrain levels {list(levels)}: expected at least one of 0 to {LEVELS - 1}, each once")
    if variants < 1 or seed < 0:
        raise BadInput(f"terrain variants={variants}, seed={seed}: expected at least 1 variant and a seed of 0 or more")


def _spots(places: list[tuple[np.ndarray, np.ndarray]]) -> Spots:
    """The places of each tile: a mask and the tile's middle [m]."""
    found = [np.argwhere(mask)[:, ::-1] * CELL - SIDE / 2 + middle for mask, middle in places]
    first = np.concatenate([[0], np.cumsum([len(xy) for xy in found])])
    return Spots(torch.tensor(np.concatenate(found), dtype=torch.float32), torch.from_numpy(first))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Starts and goals of the same tile, xy [m] float32 [n, 2]; its kind, level and variant by index in the map, int64 [n]."""

    start: Tensor
    goal: Tensor
    kind: Tensor
    level: Tensor
    variant: Tensor


def sample_pairs(terrain: TerrainMap, count: int, generator: torch.Generator) -> Pairs:
    """Draw starts and goals, `count` in all, each tile as often as any other (once more for the first, if it does not divide).

    Both lie on level ground, at least `APART` from each other, in the same tile. Pair i is of tile i modulo the number of
    tiles: the first `kinds * levels * variants` pairs visit every tile. `terrain` and `generator` are on the CPU.
    """
    levels = len(terrain.levels)
    tile = torch.arange(count) % (len(terrain.kinds) * levels * terrain.variants)
    start, goal = (_draw(spots, tile, generator) for spots in (terrain.starts, terrain.goals))
    variant, column = tile % terrain.variants, tile // terrain.variants
    return Pairs(start, goal, column // levels, column % levels, variant)


def _draw(spots: Spots, tile: Tensor, generator: torch.Generator) -> Tensor:
    """One place of each `tile` [n], anywhere within half a cell of it."""
    first, last = spots.first[tile], spots.first[tile + 1]
    pick = first + (torch.rand(len(tile), generator=generator, dtype=torch.float64) * (last - first)).long()
    return spots.xy[pick] + CELL * (torch.rand(len(tile), 2, generator=generator) - 0.5)
