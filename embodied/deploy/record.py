"""What a runner works with: something that answers, something that records, and what came of an episode."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


class Brain(Protocol):
    """What answers observations; see `embodied.deploy.brain.Brain`."""

    late: int

    def ask(self, obs: Any) -> None:
        """Send an observation [1, D]."""
        ...

    def answer(self, deadline: float) -> tuple[Any, int] | None:
        """The action and the microseconds it took, None if it is not there by `deadline`."""
        ...


class Journal(Protocol):
    """What records; see `embodied.deploy.recorder.Recorder`."""

    def write(self, kind: str, time_ns: int, data: dict[str, Any]) -> None:
        """Record, without waiting; Fault if that is no longer possible."""
        ...

    def commit(self, timeout_s: float) -> None:
        """Wait until all of it is on disk."""
        ...


@dataclass(frozen=True)
class Episode:
    """What came of one: outcome is `success`, `timeout`, `stopped` or `fault`; `truth` is the simulator's own account."""

    number: int
    seed: int
    outcome: str
    success: bool
    truncated: bool
    steps: int
    holds: dict[str, int]
    clamped: int
    reason: str = ""
    truth: dict[str, Any] = field(default_factory=dict)
