"""Parts to be assembled, each in its own file."""

from __future__ import annotations

from embodied.sim.tasks.parts.bayonet import BAYONET
from embodied.sim.tasks.parts.peg import PEG
from embodied.sim.tasks.parts.rod import ROD

PARTS = {"peg": PEG, "rod": ROD, "bayonet": BAYONET}
