"""Reset banks: configurations from which worlds start, generated, validated by rollout, cached by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodied.sim.samplers.slots import Slots
from embodied.spec.errors import BadInput, Fault


@dataclass(frozen=True)
class ResetBank:
    """Configurations to start from, and where they are valid.

    Attributes:
        rows: complete engine rows [slots, S].
        tags: the kind of each, int64 [slots], as an index into `tag_names`, which go from easy to hard.
        tag_names: names of the kinds.
        signature: of the engine that they belong to.
        hash: of everything that decides what the bank holds.
        difficulty: how far each is from the goal, float64 [slots] in any unit; None: not measured, the tags' order is used.
    """

    rows: Tensor
    tags: Tensor
    tag_names: tuple[str, ...]
    signature: str
    hash: str
    difficulty: Tensor | None = None

    def slots(self, num_worlds: int, seed: int, device: torch.device) -> Slots:
        """The configurations as a sampler for that many worlds sees them."""
        difficulty = self.tags.double() if self.difficulty is None else self.difficulty
        return Slots(num_worlds, self.tags, self.tag_names, difficulty, self.hash, seed, device)

    def check(self, signature: str) -> None:
        """Refuse to serve an engine whose rows have another meaning.

        Raises:
            BadInput: the bank was made by another engine, version or model.
        """
        if signature != self.signature:
            raise BadInput(
                f"reset bank of engine '{self.signature}' cannot serve engine '{signature}': let the bank be generated anew"
            )

    def save(self, path: Path) -> None:
        """Write atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        torch.save({**self.__dict__, "tag_names": list(self.tag_names)}, partial)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> ResetBank:
        """Read what `save` wrote."""
        data = torch.load(path, weights_only=True)
        return cls(data["rows"], data["tags"], tuple(data["tag_names"]), data["signature"], data["hash"], data["difficulty"])


def cache_folder() -> Path:
    """Where banks are kept: $EMBODIED_CACHE, else embodied/ under $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("EMBODIED_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied"


def bank_path(key: str) -> Path:
    """Where the bank of a content hash is kept."""
    return cache_folder() / "banks" / f"{key}.pt"


def content_hash(content: dict[str, Any]) -> str:
    """A hash of everything that decides what a bank holds."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]


def collect_valid(propose: Callable[[int], tuple[Tensor, Tensor]], wanted: int, what: str) -> Tensor:
    """Rows [wanted, S] from a generator of (rows [m, S], valid bool [m]), asked again until there are enough.

    Raises:
        Fault: fewer than a fifth of the proposals are valid.
    """
    rows: list[Tensor] = []
    found, asked = 0, 0
    while found < wanted:
        size = max(16, int(1.1 * (wanted - found)))
        candidates, valid = propose(size)
        good = candidates[valid]
        rows.append(good)
        found += len(good)
        asked += size
        if asked >= 5 * max(wanted, 64) and found < 0.2 * asked:
            raise Fault(f"only {found} of {asked} '{what}' starts settle validly: the cell's geometry leaves them no room")
    return torch.cat(rows)[:wanted]
