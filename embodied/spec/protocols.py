"""The contracts between worlds, brains and learning.

N is the number of worlds, always the first axis. Tensors are float32 unless said; masks are bool [N]. Nothing here
has a base class: whatever has these methods fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

Obs = dict[str, Tensor]
"""Observation groups by name, each [N, ...]: `policy`, `critic`, optionally `rgb`."""


Symmetry = Mapping[str, tuple[Tensor, Tensor]]
"""By observation group, and for `action`: which component int64 [D] stands at each place in the mirror, and its sign [D]."""


class Engine(Protocol):
    """Physics of N copies of one MJCF model, nothing else."""

    num_worlds: int
    device: torch.device
    timestep: float
    signature: str
    default_row: Tensor
    """The state row [1, S] of a fresh world, parameters nominal."""

    def bind(self, names: Sequence[str]) -> None:
        """Name the fields that `read` will be asked for, before stepping."""
        ...

    def read(self, name: str) -> Tensor:
        """A float32 copy [N, ...] of a MuJoCo field.

        Position- and velocity-dependent fields and sensors are those of the present state; acceleration-dependent
        ones (force sensors, contact forces) are those of the last substep.
        """
        ...

    def write(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Write a state or control field [N, ...] in the worlds of `mask` (None: all).

        A world whose values are not finite keeps its old ones and raises its `BAD_WRITE` health bit.
        """
        ...

    def step(self, substeps: int) -> None:
        """Advance every world by `substeps` time steps."""
        ...

    def forward(self, mask: Tensor | None = None) -> None:
        """Make the derived fields of the worlds of `mask` follow their state, without advancing time."""
        ...

    def get_state(self) -> Tensor:
        """Complete, opaque state rows [N, S] in the engine's own dtype: restoring one and stepping is bit-exact on CPU."""
        ...

    def set_state(self, rows: Tensor, mask: Tensor | None = None, index: Tensor | None = None) -> None:
        """Restore rows in the worlds of `mask`, clear their health and forward them; touches no other world.

        World i gets `rows[i]`, or `rows[index[i]]` of a table of rows [*, S]: a reset then never gathers N full rows.
        """
        ...

    def parameters(self, name: str) -> Tensor:
        """Per-world values of a model field (mass, friction, gains), live [N, ...]; `commit` makes them effective."""
        ...

    def commit(self, mask: Tensor | None = None) -> None:
        """Make written parameters effective in the worlds of `mask`, derived constants included, and forward them."""
        ...

    def health(self) -> Tensor:
        """int32 [N]: 0 is healthy; bits are named in `embodied.sim.engines.HEALTH_BITS`."""
        ...

    def render(self, camera: str, ids: Sequence[int], width: int, height: int) -> Tensor:
        """Pictures uint8 [n, H, W, 3] of the worlds `ids`; a GL context is made at the first call, never before."""
        ...


class Sampler(Protocol):
    """Chooses which reset configuration each world starts from."""

    def sample(self) -> Tensor:
        """One slot a world, int64 [N]; the caller uses those it needs."""
        ...

    def record(self, slots: Tensor, success: Tensor, valid: Tensor, episode_return: Tensor) -> None:
        """Outcomes of episodes: slots int64 [N], success bool [N], valid bool [N] (False: not recorded), return [N]."""
        ...

    def end_iteration(self) -> int:
        """An iteration's steps are taken and learned from: the moment to exchange with other ranks; every rank calls it.

        Returns:
            Environment steps that the sampler itself took, which count like any others.
        """
        ...

    def metrics(self) -> dict[str, Tensor]:
        """Scalars (0-d tensors) that show what the sampler does, without the `sampler/` prefix."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next: tensors and plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        ...


@runtime_checkable
class ScoringSampler(Protocol):
    """A sampler that wants to know where the critic was wrong."""

    def score(self, slots: Tensor, abs_advantage: Tensor) -> None:
        """|advantage| [T, N] of an iteration's steps, and the slot int64 [T, N] that each belongs to (below 0: none)."""
        ...


@dataclass(frozen=True)
class Trials:
    """What came of one episode in each of M slots: success, valid bool [M], and the environment steps that it took."""

    success: Tensor
    valid: Tensor
    steps: int


@runtime_checkable
class TryingSampler(Protocol):
    """A sampler that tries slots with the present policy."""

    evaluate: Callable[[Tensor, int], Trials] | None
    """Runs one episode in each of the slots int64 [M], with a seed; set by whoever has a policy and worlds to spare."""


class VecEnv(Protocol):
    """N worlds as a learning problem, with same-step autoreset."""

    num_worlds: int
    device: torch.device
    action_size: int
    obs_sizes: dict[str, int]
    max_episode_steps: int
    mirror: Symmetry | None

    def reset(self, seed: int) -> Obs:
        """Start every world; the seed decides everything that follows."""
        ...

    def step(self, action: Tensor) -> tuple[Obs, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Take action [N, A] in [-1, 1] (clipped here) and return obs, reward [N], terminated [N], truncated [N], info.

        `info` holds `final_obs` (dense copy of the true last observation; equals obs where nothing ended), the masks
        `success`, `failure`, `invalid` [N], and `episode`: `ended` bool [N] (complete episodes of the policy's doing),
        `return` [N], `length` int64 [N].
        """
        ...

    def restart(self, group: int) -> Obs:
        """Cut all episodes, which record nothing, and start every world anew.

        Until the next call the worlds of a group, `group` neighbours, begin every episode at the same configuration.
        """
        ...

    def end_iteration(self, advantage: Tensor | None) -> int:
        """The last T steps are learned from: `advantage` [T, N] of them, if the learner has it. Every rank calls it.

        Returns:
            Environment steps taken beside those of `step`, which count like any others.
        """
        ...

    def metrics(self) -> dict[str, Tensor]:
        """Scalars (0-d tensors) with their full names: `sampler/*`, `health/*`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next: tensors and plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Obs:
        """Restore, and return the present observation."""
        ...


@dataclass(frozen=True)
class Step:
    """What a policy did: action [N, H, A] (H = 1 for step policies), log_prob [N], what scores it again, its memory."""

    action: Tensor
    log_prob: Tensor
    trace: Any
    carry: Any = None


@dataclass(frozen=True)
class Score:
    """What a policy thinks of recorded actions: log_prob [N], entropy [N], other terms by name."""

    log_prob: Tensor
    entropy: Tensor
    extras: dict[str, Tensor]


class Policy(Protocol):
    """A brain. With unchanged weights `evaluate(obs, act(obs).trace)` returns the recorded log_prob exactly."""

    horizon: int
    """H, actions in a chunk."""
    execute: int
    """How many of them are executed before it is asked again, unless the episode ends."""
    trace_like: dict[str, Tensor]
    """A trace of one world, in shape and dtype."""
    generator: torch.Generator

    def seed(self, seed: int) -> None:
        """Start the stream of its noise anew: another generator."""
        ...

    def begin_at(self, action: float) -> None:
        """Let all components of its first actions be about that number."""
        ...

    def act(self, obs: Obs, carry: Any = None, deterministic: bool = False) -> Step:
        """Sample an action, or take the most likely one."""
        ...

    def evaluate(self, obs: Obs, trace: Any, carry: Any = None, starts: Tensor | None = None) -> Score:
        """Score recorded actions; `starts` bool marks episode beginnings, for recurrence."""
        ...

    def imitate(self, obs: Obs, action: Tensor, mask: Tensor) -> Tensor:
        """Loss of doing otherwise than action [M, H, A], where mask bool [M, H]."""
        ...

    def take_statistics(self, obs: Obs, action: Tensor) -> None:
        """Normalise by demonstrations from now on: observations [M, D], actions [M, A]."""
        ...

    def update_normaliser(self, obs: Obs, mask: Tensor) -> None:
        """Take in the observations [M, D] where mask bool [M]."""
        ...

    # of every torch module

    def to(self, device: torch.device | str) -> Self:
        """Move it."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What is learned."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that it is."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Restore it."""
        ...


class Learner(Protocol):
    """Learns from a stream of transitions. The trainer calls act, observe `steps_per_iteration` times, then update.

    A learner that computes advantages keeps those of its last update as `advantage` [T, N]; the others lack the attribute.
    One that compares episodes of like beginnings has `group`, for which the trainer restarts the worlds before each iteration.
    """

    steps_per_iteration: int

    def act(self, obs: Obs) -> Tensor:
        """Action [N, A] to execute, and remember what is needed to learn from it."""
        ...

    def observe(self, obs: Obs, reward: Tensor, terminated: Tensor, truncated: Tensor, info: Mapping[str, Any]) -> None:
        """The consequence of the last `act`: the arguments are what `VecEnv.step` returned."""
        ...

    def update(self) -> dict[str, Tensor]:
        """Learn from what was observed since the last update; scalars (0-d tensors, still on the device) by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what comes next: tensors and plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        ...
