"""The ground as one height field of one MuJoCo model: worlds differ only in where they stand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodied.sim.tasks.terrains.rough import lattice
from embodied.sim.tasks.terrains.tile import CELL

GROUND = "ground"
_BASE = 0.5  # thickness below the lowest height [m]: MuJoCo's height fields are solids


@dataclass(frozen=True, eq=False)
class Ground:
    """Heights on a grid.

    heights: float32 [H, W] in metres, rows along y, columns along x, `CELL` apart; the first is at `origin` (x, y) [m].
    flat: whether it is level at 0 m throughout, and without end.
    """

    heights: Tensor
    origin: tuple[float, float]
    flat: bool = False

    def to(self, device: torch.device | str) -> Ground:
        """The same ground on `device`."""
        return replace(self, heights=self.heights.to(device))


def plane() -> Ground:
    """A plane."""
    return Ground(torch.zeros(2, 2), (-CELL / 2, -CELL / 2), flat=True)


def rough_ground(height: float, side: float, seed: int) -> Ground:
    """A square with independent heights from 0 to `height` [m] every 0.2 m, joined by straight lines; its middle is the origin.

    Args:
        height: the highest [m].
        side: of the square [m].
        seed: decides the heights.
    """
    samples = round(side / CELL) + 1
    heights = lattice(height, samples, np.random.default_rng(seed)).astype(np.float32)
    corner = -CELL * (samples - 1) / 2
    return Ground(torch.from_numpy(heights), (corner, corner))


def height_at(ground: Ground, xy: Tensor) -> Tensor:
    """Height of the ground [m] under points xy [m], [N, K, 2] -> [N, K], on the ground's device.

    As MuJoCo's height field has it: each cell is two triangles that meet on the line from its lowest to its highest x and y.
    float32 positions err by some 1e-5 m at the edge of a large field, times the slope. Beyond the field its edge goes on.
    """
    rows, columns = ground.heights.shape
    origin = torch.tensor(ground.origin, device=xy.device, dtype=xy.dtype)
    at = (xy - origin) / CELL
    x, y = at[..., 0].clamp(0, columns - 1), at[..., 1].clamp(0, rows - 1)
    column, row = x.floor().clamp(max=columns - 2), y.floor().clamp(max=rows - 2)
    x, y = x - column, y - row
    corner = row.long() * columns + column.long()
    flat = ground.heights.view(-1)
    near, far = flat[corner], flat[corner + columns + 1]
    # the third corner of the triangle that the point is in
    side = flat[torch.where(x > y, corner + 1, corner + columns)]
    larger, smaller = torch.maximum(x, y), torch.minimum(x, y)
    return near + larger * (side - near) + smaller * (far - side)


def add_to(spec: mujoco.MjSpec, ground: Ground) -> str:
    """Add the ground to a model: a height field, or a plane where it is flat.

    It touches nothing by itself: name the pairs of geoms that can meet it, with a `solref` of twice the time step. A sphere
    whose centre sinks below the ground is held there by the sides of MuJoCo's prisms: spheres of 2 cm did so from 3 m/s at
    MuJoCo's default of 0.02 s, and not up to 4 m/s at 0.01 s (5 ms steps).

    Returns:
        The name of the geom.
    """
    look = {"name": GROUND, "contype": 0, "conaffinity": 0, "rgba": [0.55, 0.53, 0.5, 1.0]}
    if ground.flat:
        spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1], **look)
        return GROUND
    heights = ground.heights.cpu().numpy()
    rows, columns = heights.shape
    # MuJoCo scales heights to [0, 1] and back by the size
    spec.add_hfield(
        name=GROUND,
        nrow=rows,
        ncol=columns,
        size=[CELL * (columns - 1) / 2, CELL * (rows - 1) / 2, float(np.ptp(heights)), _BASE],
        userdata=heights.ravel(),
    )
    place = [0.0, 0.0, float(heights.min())]
    spec.worldbody.add_geom(type=mujoco.mjtGeom.mjGEOM_HFIELD, hfieldname=GROUND, pos=place, **look)
    return GROUND
