"""Storage of the transitions between two updates of an on-policy learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.algos.chunks import Decision
from embodied.spec.errors import Fault
from embodied.spec.protocols import Obs


class Rollout:
    """T steps of N worlds, preallocated; filled by `begin` and `finish` in turn, without a host read.

    Where a step is not valid (a numerical fault in its world) every number of a full rollout is 0, so that a NaN there reaches
    neither a loss nor its gradient nor a statistic, whatever the mask is later multiplied or selected with.

    Attributes:
        step: how many steps are complete.
        pending: an action was stored whose outcome is not known yet.
        obs: the groups [T, N, D] acted on.
        decided: bool [T, N], a new chunk of actions was begun; `trace` ([T, N, ...] by name) and log_prob [T, N] are of it, and
            hold anything elsewhere.
        value: V of the observation acted on [T, N].
        reward, next_value: of the outcome [T, N]; next_value is V of the true next observation.
        terminated, ended, valid: bool [T, N]; `ended` includes truncated and invalid.
    """

    def __init__(
        self,
        num_steps: int,
        num_worlds: int,
        obs_sizes: Mapping[str, int],
        trace_like: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(num_steps, num_worlds, *shape, dtype=dtype, device=device)

        self.num_steps = num_steps
        self.step = 0
        self.pending = False
        self.obs = {group: empty(size) for group, size in obs_sizes.items()}
        self.trace = {name: empty(*like.shape, dtype=like.dtype) for name, like in trace_like.items()}
        self.decided = empty(dtype=torch.bool)
        self.log_prob = empty()
        self.value = empty()
        self.reward = empty()
        self.next_value = empty()
        self.terminated = empty(dtype=torch.bool)
        self.ended = empty(dtype=torch.bool)
        self.valid = empty(dtype=torch.bool)

    @property
    def full(self) -> bool:
        """All T steps are complete."""
        return self.step == self.num_steps

    def begin(self, obs: Obs, decision: Decision, value: Tensor) -> None:
        """Copy what is acted on with its value [N], and what was decided.

        Raises:
            RuntimeError: the rollout is full, or the outcome of the last action was not stored.
        """
        if self.full or self.pending:
            raise RuntimeError("act, observe, ... until the rollout is full, then update: this act is out of turn")
        for group, storage in self.obs.items():
            storage[self.step].copy_(obs[group])
        kept = {"log_prob": self.log_prob} | self.trace
        for name, x in ({"log_prob": decision.step.log_prob} | decision.step.trace).items():
            if decision.ids is None:
                kept[name][self.step].copy_(x)
            else:
                kept[name][self.step].index_copy_(0, decision.ids, x)
        self.decided[self.step].copy_(decision.due)
        self.value[self.step].copy_(value)
        self.pending = True

    def finish(self, reward: Tensor, next_value: Tensor, terminated: Tensor, ended: Tensor, valid: Tensor) -> None:
        """Copy what came of it, each [N]; `next_value` is V of the true next observation.

        Raises:
            RuntimeError: no action was stored.
        """
        if not self.pending:
            raise RuntimeError("observe without an act before it")
        t = self.step
        self.reward[t].copy_(reward)
        self.next_value[t].copy_(next_value)
        self.terminated[t].copy_(terminated)
        self.ended[t].copy_(ended)
        self.valid[t].copy_(valid)
        self.step += 1
        self.pending = False
        if self.full:
            self._blank()

    def _blank(self) -> None:
        """Put noughts where a step is not valid."""
        if self.valid.device.type == "cpu" and bool(self.valid.all()):
            return
        invalid = ~self.valid
        for storage in (self.log_prob, self.value, self.reward, self.next_value, *self.trace.values(), *self.obs.values()):
            storage.masked_fill_(invalid.view(*invalid.shape, *[1] * (storage.ndim - 2)), 0)

    def check(self, advantage: Tensor) -> None:
        """Refuse a rollout that is not finite, naming the first cause; `advantage` [T, N] came of it.

        Raises:
            Fault: see there.
        """
        causes = {
            **{f"observation group '{name}'": x for name, x in self.obs.items()},
            "the reward": self.reward,
            **{f"the policy's {name}": x for name, x in self.trace.items()},
            "the log-probability of the action": self.log_prob,
            "the critic's value": self.value,
            "the critic's value of the final observation": self.next_value,
            "the advantage": advantage,
        }
        # extremes carry NaN and inf along, and are far cheaper than isfinite of every element
        extremes = torch.stack([torch.stack(x.aminmax()).double() for x in causes.values()])
        finite = extremes.isfinite().all(-1).tolist()
        for (cause, x), good in zip(causes.items(), finite, strict=True):
            if not good:
                step, world = (~x.isfinite()).nonzero()[0, :2].tolist()
                raise Fault(
                    f"{cause} is not finite, first at step {step} of the rollout in world {world}; "
                    "nothing was learned from it and the weights are unchanged"
                )

    def clear(self) -> None:
        """Forget all steps; the storage is kept."""
        self.step = 0

    def _tensors(self) -> dict[str, Tensor]:
        names = ("decided", "log_prob", "value", "reward", "next_value", "terminated", "ended", "valid")
        parts = {"obs": self.obs, "trace": self.trace}
        named = {f"{part}/{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
        return named | {name: getattr(self, name) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """The steps stored so far, a pending one included: next to nothing between an update and the next act."""
        rows = self.step + self.pending
        # cloned, because saving a view would save all that lies behind it
        tensors = {name: x[:rows].clone() for name, x in self._tensors().items()}
        return {"step": self.step, "pending": self.pending, "tensors": tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.step, self.pending = state["step"], state["pending"]
        for name, x in self._tensors().items():
            x[: self.step + self.pending].copy_(state["tensors"][name])
