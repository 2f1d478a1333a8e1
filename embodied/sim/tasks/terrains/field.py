"""All tiles of a task on one map, which is one height field of one MuJoCo model: worlds differ only in where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.sim.tasks.terrains.kinds import KINDS, LEVELS, make_tile
from embodied.sim.tasks.terrains.tile import CELL, SAMPLES, SIDE, VOID
from embodied.spec.errors import BadInput, nearest

GROUND = "ground"
BORDER = 40
"""Cells of floor at `VOID` round all tiles."""
_BASE = 0.5  # thickness below the lowest height [m]: MuJoCo's height fields are solids


@dataclass(frozen=True, eq=False)
class Spots:
    """Places of every tile, in one list: xy [m] float32 [S, 2]; those of tile t are xy[first[t] : first[t + 1]]."""

    xy: Tensor
    first: Tensor


@dataclass(frozen=True, eq=False)
class TerrainMap:
    """Tiles of `kinds` x `levels` x `variants` side by side, and the deep border round them.

    heights: float32 [H, W] in metres, rows along y, columns along x, `cell` [m] apart; the first is at `origin` (x, y) [m].
        The world's origin is the middle of the map. Ground to walk on is at 0 m or above, all else at `VOID`.
    tiles: float32 [kinds, levels, variants, 2], the middle of each tile [m].
    measures: float32 [kinds, levels, variants], how hard each tile is, as `KINDS[kind].measure` says.
    starts, goals: where a robot can start, and be sent to. Tile t = (kind * levels + level) * variants + variant, by index.
    """

    kinds: tuple[str, ...]
    levels: tuple[int, ...]
    variants: int
    heights: Tensor
    cell: float
    origin: tuple[float, float]
    tiles: Tensor
    measures: Tensor
    starts: Spots
    goals: Spots

    @property
    def flat(self) -> bool:
        """Whether the map is level throughout, without border or moats."""
        return self.kinds == ("flat",)

    def to(self, device: torch.device | str) -> TerrainMap:
        """The same map, its tensors on `device`."""
        starts, goals = (Spots(spots.xy.to(device), spots.first.to(device)) for spots in (self.starts, self.goals))
        moved = {name: getattr(self, name).to(device) for name in ("heights", "tiles", "measures")}
        return replace(self, **moved, starts=starts, goals=goals)


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
    if tuple(kinds) == ("flat",):
        heights[:] = 0
    return TerrainMap(
        tuple(kinds),
        tuple(levels),
        variants,
        torch.from_numpy(heights),
        CELL,
        origin,
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


def height_at(terrain: TerrainMap, xy: Tensor) -> Tensor:
    """Height of the ground [m] under points xy [m], [N, K, 2] -> [N, K], on the map's device.

    As MuJoCo's height field has it: each cell is two triangles that meet on the line from its lowest to its highest x and y.
    float32 positions err by some 1e-5 m at the edge of a large map, times the slope. Beyond the map its edge goes on.
    """
    rows, columns = terrain.heights.shape
    origin = torch.tensor(terrain.origin, device=xy.device, dtype=xy.dtype)
    at = (xy - origin) / terrain.cell
    x, y = at[..., 0].clamp(0, columns - 1), at[..., 1].clamp(0, rows - 1)
    column, row = x.floor().clamp(max=columns - 2), y.floor().clamp(max=rows - 2)
    x, y = x - column, y - row
    corner = row.long() * columns + column.long()
    flat = terrain.heights.view(-1)
    near, far = flat[corner], flat[corner + columns + 1]
    # the third corner of the triangle that the point is in
    side = flat[torch.where(x > y, corner + 1, corner + columns)]
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    return near + larger * (side - near) + smaller * (far - side)


def add_to(spec: mujoco.MjSpec, terrain: TerrainMap) -> str:
    """Add the ground to a model: a height field, or a plane for a flat map.

    It touches nothing by itself: name the pairs of geoms that can meet it, with a `solref` of twice the time step. A sphere
    whose centre sinks below the ground is held there by the sides of MuJoCo's prisms: spheres of 2 cm did so from 3 m/s at
    MuJoCo's default of 0.02 s, and not up to 4 m/s at 0.01 s (5 ms steps).

    Returns:
        The name of the geom.
    """
    look = {"name": GROUND, "contype": 0, "conaffinity": 0, "rgba": [0.55, 0.53, 0.5, 1.0]}
    if terrain.flat:
        spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], **look)
        return GROUND
    heights = terrain.heights.cpu().numpy()
    rows, columns = heights.shape
    # MuJoCo scales heights to [0, 1] and back by the size
    spec.add_hfield(
        name=GROUND,
        nrow=rows,
        ncol=columns,
        size=[terrain.cell * (columns - 1) / 2, terrain.cell * (rows - 1) / 2, float(np.ptp(heights)), _BASE],
        userdata=heights.ravel(),
    )
    place = [0.0, 0.0, float(heights.min())]
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname=GROUND, pos=place, **look)
    return GROUND


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
    start, goal = (_draw(spots, tile, terrain.cell, generator) for spots in (terrain.starts, terrain.goals))
    variant, column = tile % terrain.variants, tile // terrain.variants
    return Pairs(start, goal, column // levels, column % levels, variant)


def _draw(spots: Spots, tile: Tensor, cell: float, generator: torch.Generator) -> Tensor:
    """One place of each `tile` [n], anywhere within half a cell of it."""
    first, last = spots.first[tile], spots.first[tile + 1]
    pick = first + (torch.rand(len(tile), generator=generator, dtype=torch.float64) * (last - first)).long()
    return spots.xy[pick] + cell * (torch.rand(len(tile), 2, generator=generator) - 0.5)
