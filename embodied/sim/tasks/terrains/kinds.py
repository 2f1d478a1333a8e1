"""The 13 kinds of terrain, each in 10 levels.

Ranges follow legged_gym (slopes to 0.4, steps 0.05 to 0.23 m, blocks from 0.05 m, stones that shrink), where it has the
kind; the others are scaled to a Go1, which steps about 0.15 m high and jumps about 0.6 m far. The choice of kinds is that
of the SGS benchmark: slopes, stairs and floating islands are one kind each, in two forms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.sim.tasks.terrains import rough, sparse
from embodied.sim.tasks.terrains.tile import Build, Tile

LEVELS = 10


@dataclass(frozen=True)
class Kind:
    """A kind of terrain.

    measure: the length or ratio that makes it hard; it grows with the level, or shrinks where `shrinks` says so.
    forms: how its tiles are made; the variants of a level take them in turn, from one that the seed chooses.
    """

    measure: str
    forms: tuple[Build, ...]
    shrinks: bool = False


KINDS = {
    "flat": Kind("distance of the goals from the middle, 2.4 to 3.1 m", (rough.flat,)),
    "slopes": Kind("slope, 0.04 to 0.4, up or down", (rough.slope_up, rough.slope_down)),
    "rough": Kind("greatest difference of height, 0.02 to 0.15 m", (rough.rough,)),
    "stairs": Kind("height of a step, 0.05 to 0.23 m, up or down", (rough.stairs_up, rough.stairs_down)),
    "boxes": Kind("height of a block, 0.05 to 0.20 m", (rough.boxes,)),
    "gaps": Kind("width of a gap, 0.10 to 0.55 m", (sparse.gaps,)),
    "pits": Kind("depth of a pit, 0.05 to 0.35 m", (rough.pits,)),
    "stepping_stones": Kind("side of a stone, 0.60 to 0.15 m", (sparse.stepping_stones,), shrinks=True),
    "balance_beams": Kind("width of a beam, 0.60 to 0.15 m", (sparse.balance_beams,), shrinks=True),
    "radiating_beams": Kind("width of a beam, 0.60 to 0.15 m", (sparse.radiating_beams,), shrinks=True),
    "maze": Kind("width of a corridor, 1.5 to 0.6 m", (rough.maze,), shrinks=True),
    "contoured": Kind("steepest slope, 0.1 to 0.6", (rough.contoured,)),
    "floating_islands": Kind("gap between islands, 0.10 to 0.55 m", (sparse.floating_stones, sparse.jump_boxes)),
}
"""By name, in the order in which reports list them."""


def make_tile(kind: str, level: int, variant: int, seed: int) -> Tile:
    """A tile of its own: it does not depend on which others a map holds."""
    forms, number = KINDS[kind].forms, list(KINDS).index(kind)
    turn = int(np.random.default_rng([seed, number, level]).integers(len(forms)))
    rng = np.random.default_rng([seed, number, level, variant])
    return forms[(turn + variant) % len(forms)](level / (LEVELS - 1), rng)
