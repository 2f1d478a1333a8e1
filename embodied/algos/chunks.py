"""Chunks of actions that are executed one after another, in each world at its own pace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.spec.protocols import Obs, Policy, Step


@dataclass(frozen=True)
class Decision:
    """What is done in a step.

    action: [N, A] to execute, not clipped.
    due: bool [N], worlds that began a new chunk.
    step: what the policy gave, for all worlds, or for those of `ids` alone.
    """

    action: Tensor
    due: Tensor
    step: Step
    ids: Tensor | None = None


class ChunkQueue:
    """What is left of each world's chunk. A policy is asked where nothing is, or where the episode ended."""

    def __init__(self, policy: Policy, num_worlds: int, action_size: int, device: torch.device) -> None:
        self.policy = policy
        self._every = torch.ones(num_worlds, dtype=torch.bool, device=device)
        self._rows = torch.arange(num_worlds, device=device)
        self._plan = torch.zeros(num_worlds, policy.horizon, action_size, device=device)
        self._at = torch.full((num_worlds,), policy.execute, device=device)

    def next(self, obs: Obs, deterministic: bool = False) -> Decision:
        """The next action of every world, of a new chunk where one is due."""
        if self.policy.execute == 1:
            step = self.policy.act(obs, deterministic=deterministic)
            return Decision(step.action[:, 0], self._every, step)
        due, ids = self._at >= self.policy.execute, None
        if due.device.type == "cpu":
            # only those that need one; elsewhere shapes do not depend on data
            ids = torch.nonzero(due)[:, 0]
            step = self.policy.act({name: x[ids] for name, x in obs.items()}, deterministic=deterministic)
            self._plan.index_copy_(0, ids, step.action)
        else:
            step = self.policy.act(obs, deterministic=deterministic)
            self._plan = torch.where(due[:, None, None], step.action, self._plan)
        at = torch.where(due, 0, self._at)
        self._at = at + 1
        return Decision(self._plan[self._rows, at], due, step, ids)

    def cut(self, mask: Tensor) -> None:
        """Forget the chunks of the worlds of a mask."""
        self._at = torch.where(mask, self.policy.execute, self._at)

    def clear(self) -> None:
        """Forget all chunks."""
        self._at.fill_(self.policy.execute)

    def state_dict(self) -> dict[str, Any]:
        """What is left."""
        return {"plan": self._plan, "at": self._at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._plan, self._at = (state[name].to(self._at.device).clone() for name in ("plan", "at"))
