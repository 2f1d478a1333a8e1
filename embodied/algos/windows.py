"""Moments of recorded episodes, each with what was done from then on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.data.episodes import Dataset
from embodied.spec.errors import BadInput
from embodied.spec.protocols import Obs

STATE, ACTION, SUCCESS = "observation.state", "action", "next.success"


def check_folder(option: str, folder: str) -> None:
    """Refuse what is no folder, before anything is built.

    Raises:
        BadInput: see there.
    """
    if not folder or not Path(folder).is_dir():
        what = f"algo.{option}={folder} is no folder" if folder else f"algo.{option}= is missing"
        raise BadInput(f"{what}: expected a dataset, e.g. of embodied collect checkpoint=<run> episodes=30 out=data/demos")


@dataclass(frozen=True)
class Windows:
    """Frames of the episodes that are used, one episode after the other.

    state: what was seen [F, D]; action: what was done [F, A]; left: frames from each one to its episode's end, itself included,
    int64 [F]; digest: SHA-256 of all of it; source: the option and folder that they came from, for messages.
    """

    state: Tensor
    action: Tensor
    left: Tensor
    horizon: int
    digest: str
    source: str

    @classmethod
    def of(cls, data: Dataset, horizon: int, only_success: bool, device: torch.device, option: str) -> Windows:
        """Of a dataset; `only_success` leaves out episodes whose last frame is none; `option` named it.

        Raises:
            BadInput: a column is missing, or no episode is left.
        """
        wanted = (STATE, ACTION, *((SUCCESS,) if only_success else ()))
        if missing := [name for name in wanted if name not in data.columns]:
            hint = "; algo.only_success=false uses all episodes" if SUCCESS in missing else ""
            raise BadInput(f"{data.folder} has no {' and no '.join(missing)}: it has {', '.join(data.columns)}{hint}")
        spans = list(zip(data.starts[:-1].tolist(), data.starts[1:].tolist(), strict=True))
        kept = [(a, b) for a, b in spans if not only_success or bool(data.columns[SUCCESS][b - 1])]
        if not kept:
            raise BadInput(f"{data.folder}: none of {len(spans)} episodes succeeded; algo.only_success=false uses all")
        arrays = [np.concatenate([data.columns[name][a:b] for a, b in kept]) for name in (STATE, ACTION)]
        left = np.concatenate([np.arange(b - a, 0, -1) for a, b in kept])
        digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in (*arrays, left))).hexdigest()
        state, action = (torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(device) for x in arrays)
        return cls(state, action, torch.from_numpy(left).to(device), horizon, digest, f"{option}={data.folder}")

    def check(self, obs_size: int, action_size: int) -> None:
        """Refuse data of another policy's observations or actions.

        Raises:
            BadInput: see there.
        """
        found, wanted = (self.state.shape[1], self.action.shape[1]), (obs_size, action_size)
        if found != wanted:
            raise BadInput(
                f"{self.source} has observations of {found[0]} numbers and actions of {found[1]}, the task's policy sees "
                f"{wanted[0]} and commands {wanted[1]}: collect it with the task and options that are trained"
            )

    def check_same(self, digest: str) -> None:
        """Refuse to go on with other data.

        Raises:
            BadInput: see there.
        """
        if digest != self.digest:
            raise BadInput(f"{self.source} has changed since: a resumed run needs the data that it began with")

    def draw(self, count: int, generator: torch.Generator) -> tuple[Obs, Tensor, Tensor]:
        """Random moments: observations, what was done from then on [M, H, A], and bool [M, H], before the episode's end."""
        return self.at(torch.randint(len(self.state), (count,), generator=generator, device=self.state.device))

    def at(self, frame: Tensor) -> tuple[Obs, Tensor, Tensor]:
        """The moments int64 [M], as `draw` gives them; the frames are a ring."""
        ahead = torch.arange(self.horizon, device=frame.device)
        mask = ahead < self.left[frame, None]
        action = self.action[(frame[:, None] + ahead) % len(self.action)]
        return {"policy": self.state[frame]}, action, mask
