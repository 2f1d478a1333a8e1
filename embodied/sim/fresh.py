"""Fresh starts: an environment for evaluation whose worlds never start from the training bank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.sim.env import Task, WorldsEnv
from embodied.sim.resets import ResetBank
from embodied.sim.samplers.fixed import Fixed
from embodied.spec.protocols import Engine, Obs


class FreshStarts(WorldsEnv):
    """World i starts from the i-th of N starts that are generated anew, on this engine, at every `reset`."""

    def __init__(self, engine: Engine, task: Task, randomise: bool, warn: Callable[[str], None] | None = None) -> None:
        count = engine.num_worlds
        rows = engine.default_row.expand(count, -1)
        bank = ResetBank(rows, torch.zeros(count, dtype=torch.int64), ("fresh",), engine.signature, "fresh")
        super().__init__(engine, task, Fixed(count, engine.device), bank, randomise, stagger=False, warn=warn)

    def reset(self, seed: int) -> Obs:
        """Generate the starts that `seed` decides, and start from them."""
        self._rows = self.task.fresh_starts(self.engine, torch.Generator().manual_seed(seed))
        return super().reset(seed)

    def scripted(self) -> Tensor:
        """What the task's script would do now [N, A], of a task that has one."""
        return self.task.script(self.engine, self._state)  # type: ignore[attr-defined]  # few tasks have one
