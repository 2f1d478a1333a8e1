"""What must hold of datasets and of episodes that join them: each check raises BadInput, in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.data.episodes import Episode, Feature
from embodied.data.files import INFO, NUMBERS, OWN, STATS, TASKS, WRITTEN, Frames
from embodied.spec.errors import BadInput, nearest

VERSION = "v3.0"

LATE = 1e-4
"""How far a timestamp may be from its frame [s]: LeRobot's `tolerance_s`."""

SINGLE = 1e-3
"""How far mean and deviation may be off, as a part of the largest number: LeRobot computes them in single precision, when it
adds to a dataset, and loses that much of a deviation that is small beside the mean.
"""


def features(given: Mapping[str, Feature]) -> None:
    """Features of a new dataset."""
    if not given:
        raise BadInput("a dataset without features: expected at least one, such as 'observation.state' and 'action'")
    for name, feature in given.items():
        if not name or "/" in name or "image" in name or name in (*OWN, "task"):
            taken = ", ".join((*OWN, "task"))
            raise BadInput(f"feature '{name}': expected a name without '/' and 'image', which LeRobot reads, and not {taken}")
        if feature.dtype not in WRITTEN:
            raise BadInput(f"feature '{name}': dtype '{feature.dtype}': {nearest(feature.dtype, WRITTEN)}")
        if len(feature.shape) != 1 or feature.shape[0] < 1:
            raise BadInput(f"feature '{name}': shape {feature.shape}: expected one number above 0: reshape it to a vector")
        named = feature.names
        listed = isinstance(named, list | tuple) and all(isinstance(each, str) for each in named)
        if named is not None and not (listed and len(named) == feature.shape[0]):
            raise BadInput(f"feature '{name}': names {named}: expected {feature.shape[0]} words, or None")


def episode(where: str, features: Mapping[str, Feature], given: Episode) -> None:
    """An episode that is to join a dataset with those features."""
    if not isinstance(given.task, str) or not given.task.strip():
        raise BadInput(f"{where}: task {given.task!r}: expected what is to be done, in words")
    for name in given.features.keys() - features.keys():
        raise BadInput(f"{where}: '{name}' is no feature of the dataset: {nearest(name, features)}")
    lengths = {}
    for name, feature in features.items():
        values = given.features.get(name)
        if not isinstance(values, np.ndarray):
            raise BadInput(f"{where}: '{name}' is {type(values).__name__}: expected an array of {feature.dtype}")
        if values.dtype != np.dtype(feature.dtype):
            raise BadInput(f"{where}: '{name}' is {values.dtype}: expected {feature.dtype}: convert it")
        if values.ndim < 1 or values.shape[1:] != feature.frame:
            raise BadInput(f"{where}: '{name}' has shape {list(values.shape)}: expected {['T', *feature.frame]}")
        if not np.isfinite(values).all():
            raise BadInput(
                f"{where}: '{name}' has numbers that are not finite: expected none: leave the episode out or mend it"
            )
        lengths[name] = len(values)
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise BadInput(f"{where}: lengths {lengths}: expected as many frames of each, and at least one")


def described(folder: Path, info: dict[str, Any]) -> dict[str, Feature]:
    """The features that `info.json` describes."""
    if info.get("codebase_version") != VERSION:
        raise BadInput(
            f"{folder} is of version {info.get('codebase_version')}: expected {VERSION}: "
            "LeRobot's convert_dataset_v21_to_v30 makes it of v2.1"
        )
    try:
        found = {
            name: Feature(each["dtype"], tuple(int(n) for n in each["shape"]), _frozen(each.get("names")))
            for name, each in info["features"].items()
        }
        good = info["fps"] > 0 and all(isinstance(info[f"total_{of}"], int) for of in ("episodes", "frames", "tasks"))
        str(info["data_path"]).format(chunk_index=0, file_index=0)
    except (AttributeError, KeyError, LookupError, TypeError, ValueError) as error:
        raise BadInput(f"{folder / INFO} lacks or garbles something: {error!r}: restore it from a copy") from None
    for name, own in OWN.items():
        if found.get(name, own).shape != own.shape or found.get(name, own).dtype not in NUMBERS:
            good = False
    if not good or not OWN.keys() <= found.keys():
        raise BadInput(
            f"{folder / INFO}: expected fps above 0, whole totals and features {', '.join(OWN)}: restore it from a copy"
        )
    return found


def _frozen(names: Any) -> Any:
    return tuple(names) if isinstance(names, list) else names


def own(folder: Path, fps: float, frames: Frames, words: list[str]) -> tuple[str, ...]:
    """Check LeRobot's own columns; the task of each episode."""
    starts, own = frames.starts, frames.columns
    since = np.arange(starts[-1]) - np.repeat(starts[:-1], np.diff(starts))
    seconds = own["timestamp"].astype(np.float64)
    late = np.abs(seconds - since / fps) > LATE + np.spacing(seconds.astype(np.float32))
    for name, wrong, expected in (
        ("frame_index", own["frame_index"] != since, "0, 1, ... in each episode"),
        ("timestamp", late, f"frame_index / fps, fps being {fps}"),
        ("task_index", own["task_index"] != np.repeat(own["task_index"][starts[:-1]], np.diff(starts)), "one task an episode"),
        ("task_index", ~np.isin(own["task_index"], np.arange(len(words))), f"a row of {TASKS}, which has {len(words)}"),
    ):
        if wrong.any():
            at = int(np.argmax(wrong))
            episode = int(np.searchsorted(starts, at, side="right")) - 1
            raise BadInput(
                f"{folder}: '{name}' is {own[name][at]} in frame {at - starts[episode]} of episode {episode}: "
                f"expected {expected}: restore it from a copy"
            )
    return tuple(words[i] for i in own["task_index"][starts[:-1]])


def rows(folder: Path, listed: dict[int, dict[str, Any]], starts: NDArray[np.int64], tasks: tuple[str, ...]) -> None:
    """What `meta/episodes` says, against the frames."""
    if list(listed) != list(range(len(tasks))):
        raise BadInput(
            f"{folder}/meta/episodes lists {len(listed)} episodes, {folder}/data has {len(tasks)}: restore what is missing"
        )
    for episode, (first, end, task) in enumerate(zip(starts[:-1], starts[1:], tasks, strict=True)):
        found = listed[episode]
        expected = {"length": end - first, "dataset_from_index": first, "dataset_to_index": end, "tasks": [task]}
        for key, value in expected.items():
            if found.get(key, value) != value:
                raise BadInput(
                    f"{folder}/meta/episodes says that '{key}' of episode {episode} is {found[key]}: its frames say {value}: "
                    "restore it from a copy"
                )


def totals(folder: Path, info: dict[str, Any], episodes: int, frames: int, tasks: int) -> None:
    """What `info.json` counts, against what is there."""
    for key, value in {"total_episodes": episodes, "total_frames": frames, "total_tasks": tasks}.items():
        if info[key] != value:
            raise BadInput(f"{folder / INFO}: {key} is {info[key]}: its files hold {value}: restore what is missing")


def stats(folder: Path, computed: dict[str, dict[str, NDArray[Any]]], stored: dict[str, Any]) -> None:
    """What `stats.json` says, apart from quantiles, against statistics of the frames."""
    for name, found in computed.items():
        size = np.maximum(np.abs(found["min"]), np.abs(found["max"])).max()
        for key, value in found.items():
            kept = np.asarray(stored.get(name, {}).get(key, ()), dtype=np.float64)
            margin = SINGLE * size if key in ("mean", "std") else 0.0
            if kept.shape != value.shape or not (np.abs(kept - value) <= margin).all():
                raise BadInput(
                    f"{folder / STATS}: {key} of '{name}' is not that of the frames: expected {value.tolist()}: "
                    "restore what was changed"
                )
