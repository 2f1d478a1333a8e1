"""Ground for legged robots: 13 kinds in 10 levels, all on one map."""

from __future__ import annotations

from embodied.sim.tasks.terrains.ground import GROUND, Ground, add_to, height_at, plane, rough_ground
from embodied.sim.tasks.terrains.kinds import KINDS, LEVELS
from embodied.sim.tasks.terrains.map import Pairs, TerrainMap, make_map, sample_pairs
from embodied.sim.tasks.terrains.tile import VOID

__all__ = [
    "GROUND",
    "KINDS",
    "LEVELS",
    "VOID",
    "Ground",
    "Pairs",
    "TerrainMap",
    "add_to",
    "height_at",
    "make_map",
    "plane",
    "rough_ground",
    "sample_pairs",
]
