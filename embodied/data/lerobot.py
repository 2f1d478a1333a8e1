"""Datasets of episodes on disk, in LeRobot's format v3.0: written by us, read from anywhere.

State only: no pictures yet. `embodied.data.files` has the layout. Each episode that is added becomes a file of its own in
`data`, which is there whole or not at all when the process or the power goes. Data files are the truth: what `meta` says beyond
features and tasks follows from them, and is written by `close`. Until then LeRobot does not see new episodes; `read` does.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from embodied.data import checks, files
from embodied.data.episodes import Dataset, Episode, Feature, quantiles, statistics
from embodied.spec.errors import BadInput

ROWS = 1000
"""Episodes in a file of `meta/episodes`."""


class DatasetWriter:
    """Writes a dataset. An episode that `add` has returned for is on the disk, whatever happens then. A context manager.

    Args:
        folder: where; it must not exist.
        fps: frames a second, a whole number as LeRobot has it.
        robot_type: the robot's name.
        features: what each episode has, by LeRobot's names: vectors of float32, int64 or bool.
        extra: plain data about the dataset: policy specification, meaning of the actions, seeds, hash of the weights.

    Raises:
        BadInput: something of it cannot be.
    """

    def __init__(
        self, folder: Path | str, fps: int, robot_type: str, features: Mapping[str, Feature], extra: Mapping[str, Any]
    ) -> None:
        folder = Path(folder)
        if not isinstance(fps, int) or isinstance(fps, bool) or fps < 1:
            raise BadInput(f"fps={fps!r}: expected a whole number above 0, LeRobot has no other")
        checks.features(features)
        info = {
            "codebase_version": checks.VERSION,
            "fps": fps,
            "features": {name: asdict(feature) for name, feature in (dict(features) | files.OWN).items()},
            "total_episodes": 0,
            "total_frames": 0,
            "total_tasks": 0,
            "chunks_size": files.CHUNK,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "data_path": files.DATA,
            "video_path": None,
            "robot_type": robot_type,
            "splits": {},
        }
        try:
            header, about = files.pretty(info), files.pretty(extra)
        except (TypeError, ValueError) as error:
            raise BadInput(f"what {folder} is to say of itself is not plain data: {error}: give what JSON can hold") from None
        try:
            folder.mkdir(parents=True)
            (folder / "data").mkdir()
            files.replace(folder / files.EXTRA, about)
            files.replace(folder / files.INFO, header)
            files.sync(folder.parent)
            self._begin(_hold(folder), folder, info, dict(features), [])
        except FileExistsError:
            raise BadInput(f"{folder} exists: a dataset is never written over: choose another folder, or open it") from None
        except OSError as error:
            raise BadInput(f"{folder} cannot be made: {error.strerror}: choose a folder that may be written to") from None

    @classmethod
    def open(cls, folder: Path | str) -> DatasetWriter:
        """Go on with a dataset of ours, finished or cut off; closing it at once mends one that was cut off.

        Raises:
            BadInput: it is damaged, not ours, or being written.
        """
        hold = _hold(Path(folder))
        try:
            data = read(folder)
            if data.extra is None or data.unread:
                raise BadInput(f"{folder} is not ours alone: only what embodied wrote can be gone on with: write a new one")
            writer = cls.__new__(cls)
            info, tasks = files.load_json(data.folder, files.INFO), files.load_tasks(data.folder)
            writer._begin(hold, data.folder, info, data.features, tasks)
            writer._episodes, writer._frames = len(data), int(data.starts[-1])
            writer._files = 1 + max(map(files.number, files.data_files(data.folder)))
        except BaseException:
            os.close(hold)
            raise
        return writer

    def _begin(self, hold: int, folder: Path, info: dict[str, Any], features: dict[str, Feature], tasks: list[str]) -> None:
        self._hold, self._folder, self._info, self._features, self._tasks = hold, folder, info, features, tasks
        self._episodes = self._frames = self._files = 0
        (folder / files.RECORDING).touch()
        files.sync(folder / "meta")

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add(self, episode: Episode) -> None:
        """Append an episode.

        Raises:
            BadInput: it is not what the dataset was made for.
            Fault: it could not be written; adding it again writes it anew.
        """
        if self._hold < 0:
            raise BadInput(f"{self._folder} was closed: open it to add more")
        where = f"episode {self._episodes} of {self._folder}"
        checks.episode(where, self._features, episode)
        with files.faults(f"{where} was not written, add it again when this is mended"):
            if episode.task not in self._tasks:
                tasks = [*self._tasks, episode.task]
                files.replace(self._folder / files.TASKS, files.parquet(files.tasks_table(tasks)))  # before frames name it
                self._tasks = tasks
            columns = {name: files.column(episode.features[name], feature) for name, feature in self._features.items()}
            table = pa.table(columns | {name: pa.array(values) for name, values in self._own(episode).items()})
            files.replace(self._folder / files.DATA.format(**files.place(self._files)), files.parquet(table))
        self._episodes, self._frames, self._files = self._episodes + 1, self._frames + episode.length, self._files + 1

    def _own(self, episode: Episode) -> dict[str, NDArray[Any]]:
        """LeRobot's own columns for the next episode."""
        frames = np.arange(episode.length)
        return {
            "timestamp": (frames / self._info["fps"]).astype(np.float32),
            "frame_index": frames,
            "episode_index": np.full_like(frames, self._episodes),
            "index": self._frames + frames,
            "task_index": np.full_like(frames, self._tasks.index(episode.task)),
        }

    def close(self) -> None:
        """Read back what is on the disk and write what `meta` says of it. May be called again.

        Raises:
            Fault: that failed; the episodes are as they were, and `open` goes on with them.
        """
        if self._hold < 0:
            return
        hold, self._hold = self._hold, -1
        try:
            with files.faults(f"{self._folder} was not finished, open and close it when this is mended"):
                if files.data_files(self._folder):
                    self._finish()
                (self._folder / files.RECORDING).unlink()
                files.sync(self._folder / "meta")
        finally:
            os.close(hold)

    def _finish(self) -> None:
        folder, tasks = self._folder, files.load_tasks(self._folder)
        frames = files.load_frames(folder, self._features | files.OWN)
        count = len(frames.paths)
        written = set()
        for first in range(0, count, ROWS):
            path = folder / files.EPISODES.format(**files.place(first // ROWS))
            written.add(path)
            files.replace(path, files.parquet(_rows(frames, tasks, first, min(first + ROWS, count))))
        for stale in {*(folder / "meta/episodes").glob("*/*.parquet"), *folder.rglob("*.partial")} - written:
            stale.unlink()
        stats = {name: statistics(values) | quantiles(values) for name, values in frames.columns.items()}
        lists = {name: {key: numbers.tolist() for key, numbers in found.items()} for name, found in stats.items()}
        files.replace(folder / files.STATS, files.pretty(lists))
        totals = {"total_episodes": count, "total_frames": int(frames.starts[-1]), "total_tasks": len(tasks)}
        files.replace(folder / files.INFO, files.pretty(self._info | totals | {"splits": {"train": f"0:{count}"}}))


def _hold(folder: Path) -> int:
    """Keep other writers out, until the handle is closed, by whoever has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadInput(f"{folder} cannot be opened: {error.strerror}: give the folder of a dataset") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise BadInput(f"{folder} cannot be written: {error.strerror}: close its other writer first") from None
    return handle


def _rows(frames: files.Frames, tasks: list[str], first: int, end: int) -> pa.Table:
    """What `meta/episodes` says of episodes `first` to `end`, in LeRobot's order."""
    starts = frames.starts[first : end + 1]
    spans = list(pairwise(starts))
    columns = {
        "episode_index": np.arange(first, end),
        "tasks": [[tasks[i]] for i in frames.columns["task_index"][starts[:-1]]],
        "length": np.diff(starts),
        **_places("data", [files.number(path) for path in frames.paths[first:end]]),
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
    }
    for name, values in frames.columns.items():
        stats = [statistics(values[a:b]) | quantiles(values[a:b]) for a, b in spans]
        columns |= {f"stats/{name}/{key}": _lists(np.stack([found[key] for found in stats])) for key in stats[0]}
    return pa.table(columns | _places("meta/episodes", [first // ROWS] * len(spans)))


def _places(of: str, numbers: list[int]) -> dict[str, NDArray[np.int64]]:
    places = [files.place(number) for number in numbers]
    return {f"{of}/{key}": np.array([place[key] for place in places]) for key in places[0]}


def _lists(rows: NDArray[Any]) -> pa.Array:
    """A list of numbers for each row [E, D]."""
    return pa.ListArray.from_arrays(np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int32), rows.reshape(-1))


def read(folder: Path | str) -> Dataset:
    """Read a dataset of version v3.0, whoever wrote it, and check that its parts agree.

    Statistics are computed anew. Stored ones are compared where we wrote them; LeRobot's own may be of samples.

    Raises:
        BadInput: it is no such dataset, or it is damaged.
    """
    folder = Path(folder)
    info = files.load_json(folder, files.INFO)
    described = checks.described(folder, info)
    finished = not (folder / files.RECORDING).exists()
    listed = files.load_rows(folder) if finished else {}
    for row in listed.values():
        path = folder / str(info["data_path"]).format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
        if not path.exists():
            raise BadInput(f"{path} is missing: episode {row['episode_index']} is in it: restore it from a copy")
    numbers = {name: feature for name, feature in described.items() if feature.dtype in files.NUMBERS}
    frames = files.load_frames(folder, numbers)
    words = files.load_tasks(folder)
    tasks = checks.own(folder, info["fps"], frames, words)
    if finished:
        checks.totals(folder, info, len(tasks), int(frames.starts[-1]), len(words))
        checks.rows(folder, listed, frames.starts, tasks)
    stats = {name: statistics(values) for name, values in frames.columns.items()}
    extra = files.load_json(folder, files.EXTRA) if (folder / files.EXTRA).exists() else None
    if finished and extra is not None:
        checks.stats(folder, stats, files.load_json(folder, files.STATS))
    features = {name: feature for name, feature in numbers.items() if name not in files.OWN}
    unread = dict.fromkeys([*(name for name in described if name not in numbers), *frames.others])
    columns = {name: frames.columns[name] for name in features}
    robot = info.get("robot_type")
    return Dataset(folder, info["fps"], robot, features, columns, frames.starts, tasks, stats, extra, tuple(unread), finished)
