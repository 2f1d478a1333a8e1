"""Episodes and datasets in memory: numbers by name, frame by frame, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}


@dataclass(frozen=True)
class Feature:
    """What a frame has under one name: numbers of `dtype`, in `shape`, that may have `names` (plain data, or None).

    Shape (1,) is a single number, for LeRobot loads it as one: its arrays are [T].
    """

    dtype: str
    shape: tuple[int, ...]
    names: Any = None

    @property
    def frame(self) -> tuple[int, ...]:
        """Shape of a frame's array: () of a single number."""
        return () if self.shape == (1,) else self.shape


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode: arrays [T, ...] by LeRobot's names, and its task in words.

    `observation.state` and further `observation.*`, and `action`, which was chosen from them; of what came after it
    `next.reward`, `next.done`, `next.success`.
    """

    features: dict[str, NDArray[Any]]
    task: str

    @property
    def length(self) -> int:
        """Frames T."""
        return len(next(iter(self.features.values())))


@dataclass(frozen=True, eq=False)
class Dataset:
    """All frames of a dataset, one episode after the other.

    Attributes:
        fps: frames a second.
        features: what each of `columns` is.
        columns: arrays [F, ...] of all F frames.
        starts: [E + 1], where each of the E episodes starts, and F.
        tasks: the task of each episode.
        stats: `statistics` of each feature and of LeRobot's own columns, over all frames.
        extra: what `meta/embodied.json` says; None: it was not written by us.
        unread: features and columns that it has and that are not here: pictures, texts, columns that no feature describes.
        finished: whether its writer was closed; if not, the episodes are those that were safe on the disk.
    """

    folder: Path
    fps: float
    robot_type: str | None
    features: dict[str, Feature]
    columns: dict[str, NDArray[Any]]
    starts: NDArray[np.int64]
    tasks: tuple[str, ...]
    stats: dict[str, dict[str, NDArray[Any]]]
    extra: dict[str, Any] | None
    unread: tuple[str, ...]
    finished: bool

    def __len__(self) -> int:
        """Episodes E."""
        return len(self.tasks)

    @property
    def episodes(self) -> list[Episode]:
        """The episodes; their arrays are views of `columns`."""
        spans = zip(self.starts[:-1], self.starts[1:], self.tasks, strict=True)
        return [Episode({name: column[a:b] for name, column in self.columns.items()}, task) for a, b, task in spans]


def statistics(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Of the frames of `values` [F, ...]: `min`, `max`, `mean`, `std` (of a population: divided by F), computed in double
    precision, arrays [...], of single numbers [1]; and `count` [1], F.
    """
    x = _double(values)
    return {"min": x.min(0), "max": x.max(0), "mean": x.mean(0), "std": x.std(0), "count": np.array([len(x)])}


def quantiles(values: NDArray[Any]) -> dict[str, NDArray[np.float64]]:
    """Quantiles `q01`, `q10`, `q50`, `q90`, `q99` of `values` [F, ...], shaped as `statistics`, interpolated between frames.

    LeRobot reads them off histograms, and averages those of episodes: its own differ a little.
    """
    return dict(zip(QUANTILES, np.quantile(_double(values), list(QUANTILES.values()), axis=0), strict=True))


def _double(values: NDArray[Any]) -> NDArray[np.float64]:
    x = np.asarray(values, dtype=np.float64)
    return x[:, None] if x.ndim == 1 else x
