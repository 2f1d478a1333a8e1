"""Ground for legged robots: 13 kinds in 10 levels, all on one map."""

from __future__ import annotations

from embodied.sim.tasks.terrains.field import GROUND, Pairs, TerrainMap, add_to, height_at, make_map, sample_pairs
from embodied.sim.tasks.terrains.kinds import KINDS, LEVELS
from embodied.sim.tasks.terrains.tile import VOID

__all__ = ["GROUND", "KINDS", "LEVELS", "VOID", "Pairs", "TerrainMap", "add_to", "height_at", "make_map", "sample_pairs"]
