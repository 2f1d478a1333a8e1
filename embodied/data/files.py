"""The files of a LeRobot dataset v3.0: what they are called, how they get on the disk, how they are loaded.

The layout is that of huggingface/lerobot, in files of `src/lerobot/datasets` at these commits: paths, `info.json` and its
defaults of `utils.py` (0d383d09), columns and types of `dataset_metadata.py` (000c716d), `dataset_writer.py` (006ca66a) and
`feature_utils.py` (034693f7), how files are found and loaded of `io_utils.py` (073c4dbd):

    meta/info.json                            version, totals, rate, features
    meta/stats.json                           statistics of each feature over all frames
    meta/tasks.parquet                        tasks in words: the index of a pandas table, in the order of `task_index`
    meta/episodes/chunk-000/file-000.parquet  a row an episode: length, place, statistics
    data/chunk-000/file-000.parquet           a row a frame
    meta/embodied.json                        ours: what the writer was given as `extra`
    meta/recording                            ours: there until the writer is closed

A feature of shape (1,) is a plain column there, one of shape (n,) a column of lists of fixed size n. The files need no metadata
of the library `datasets`: LeRobot gives it the features of `info.json`, and columns are matched by name. It loads all of
`data/*/*.parquet` in the order of their names, whatever `meta/episodes` says of files; so do we.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from embodied.data.episodes import Feature
from embodied.spec.errors import BadInput, Fault

CHUNK = 1000
"""Files in a folder."""

PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA, EPISODES = f"data/{PLACE}.parquet", f"meta/episodes/{PLACE}.parquet"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
EXTRA, RECORDING = "meta/embodied.json", "meta/recording"

OWN = {
    "timestamp": Feature("float32", (1,)),
    "frame_index": Feature("int64", (1,)),
    "episode_index": Feature("int64", (1,)),
    "index": Feature("int64", (1,)),
    "task_index": Feature("int64", (1,)),
}
"""LeRobot's own columns: seconds and frames within the episode, the episode, the frame within the dataset, the task."""

WRITTEN = ("float32", "int64", "bool")
NUMBERS = (*WRITTEN, "float16", "float64", "int8", "int16", "int32", "uint8", "uint16", "uint32", "uint64")

_PANDAS_TEXT = {"pandas_type": "unicode", "numpy_type": "object"}
_PANDAS = {
    "index_columns": ["task"],
    "column_indexes": [{"name": None, "field_name": None, **_PANDAS_TEXT, "metadata": {"encoding": "UTF-8"}}],
    "columns": [
        {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64", "metadata": None},
        {"name": "task", "field_name": "task", **_PANDAS_TEXT, "metadata": None},
    ],
    "creator": {"library": "pyarrow", "version": pa.__version__},
    "pandas_version": "2.3.0",
}
"""Says to pandas that `task` is the index (pandas, Developer: storing DataFrame objects in Apache Parquet format)."""


@dataclass(frozen=True)
class Frames:
    """All frames on the disk: columns [F, ...]; starts [E + 1] of episodes; the file of each; columns not asked for."""

    columns: dict[str, NDArray[Any]]
    starts: NDArray[np.int64]
    paths: list[Path]
    others: tuple[str, ...]


@contextlib.contextmanager
def faults(what: str) -> Iterator[None]:
    """Turn what can go wrong with files into a Fault that starts with `what`."""
    try:
        yield
    except (OSError, pa.ArrowException, BadInput) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise Fault(f"{what}: {why}") from error


def sync(folder: Path) -> None:
    """Make new names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; it is on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync(path.parent)
    sync(path.parent.parent)


def parquet(table: pa.Table) -> bytes:
    """A table as a file, compressed as LeRobot does, with checksums."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="snappy", write_page_checksum=True)
    return sink.getvalue()


def pretty(data: Mapping[str, Any]) -> bytes:
    """Plain data as JSON.

    Raises:
        TypeError, ValueError: JSON cannot hold it.
    """
    return json.dumps(data, indent=4, ensure_ascii=False, allow_nan=False).encode()


def place(number: int) -> dict[str, int]:
    """Where the file with this number is."""
    return {"chunk_index": number // CHUNK, "file_index": number % CHUNK}


def number(path: Path) -> int:
    """The inverse of `place`, of a path."""
    found = re.fullmatch(r"chunk-(\d+)/file-(\d+)\.parquet", f"{path.parent.name}/{path.name}")
    if found is None:
        raise BadInput(f"{path} is not called as LeRobot calls its files: expected {DATA.format(**place(0))} and so on")
    return int(found[1]) * CHUNK + int(found[2])


def data_files(folder: Path) -> list[Path]:
    """The files that hold frames, in their order."""
    return sorted((folder / "data").glob("*/*.parquet"))


def column(values: NDArray[Any], feature: Feature) -> pa.Array:
    """The column of an array [T, ...]."""
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, feature.shape[0]) if feature.frame else flat


def tasks_table(tasks: list[str]) -> pa.Table:
    """What pandas makes of a table of `task_index` with the index `task`."""
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(_PANDAS)})


def load_json(folder: Path, name: str) -> dict[str, Any]:
    """A file of plain data."""
    try:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"{folder} has no {name}: give the folder of a LeRobot dataset of version v3.0") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder / name} cannot be read: {error}: restore it from a copy") from None
    if not isinstance(data, dict):
        raise BadInput(f"{folder / name} holds {type(data).__name__}: expected an object: restore it from a copy")
    return data


def load_tasks(folder: Path) -> list[str]:
    """Tasks in words, by `task_index`."""
    names = ("task", "__index_level_0__")  # the second where pandas had no name for the index
    table, _ = _load_table(folder / TASKS, ("task_index",), names)
    words: list[Any] = next((table[name].to_pylist() for name in names if name in table.column_names), [])
    known = dict(zip(table["task_index"].to_pylist(), words, strict=False))
    if sorted(known) != list(range(table.num_rows)) or not all(isinstance(task, str) for task in words):
        raise BadInput(f"{folder / TASKS} does not give each of its rows a task_index and a task: restore it from a copy")
    return [known[i] for i in range(len(known))]


def load_rows(folder: Path) -> dict[int, dict[str, Any]]:
    """What `meta/episodes` says of each episode, apart from statistics, by `episode_index`."""
    needed = ("episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index")
    paths = sorted((folder / "meta/episodes").glob("*/*.parquet"))
    rows = [row for path in paths for row in _load_table(path, needed, ("tasks",))[0].to_pylist()]
    listed = {int(row["episode_index"]): row for row in sorted(rows, key=lambda row: int(row["episode_index"]))}
    if len(listed) != len(rows):
        raise BadInput(
            f"{folder}/meta/episodes lists episodes twice: {len(rows)} rows of {len(listed)}: restore it from a copy"
        )
    return listed


def load_frames(folder: Path, features: Mapping[str, Feature]) -> Frames:
    """All frames of a dataset, each column as its feature says, without a gap.

    Raises:
        BadInput: something is missing, out of place, not finite, or of another type or shape.
    """
    files = data_files(folder)
    parts: list[dict[str, NDArray[Any]]] = []
    others: dict[str, None] = {}
    count = 0
    for path in files:
        table, more = _load_table(path, tuple(features))
        part = {name: _values(f"{path}: '{name}'", table[name], feature) for name, feature in features.items()}
        at = part["index"]
        if len(at) and not np.array_equal(at, np.arange(count, count + len(at))):
            raise BadInput(
                f"{path} has frames {at[0]} to {at[-1]}: expected {count} and on, without a gap: restore what is missing"
            )
        count += len(at)
        parts.append(part)
        others |= dict.fromkeys(more)
    if not count:
        raise BadInput(f"{folder} holds no episodes: give the folder of a dataset that has some")
    columns = {name: np.concatenate([part[name] for part in parts]) for name in features}
    episode = columns["episode_index"]
    turns = np.flatnonzero(np.diff(episode, prepend=-1))
    if not np.array_equal(episode[turns], np.arange(len(turns))):
        raise BadInput(f"{folder}: episodes are out of order in 'episode_index': expected 0, 1, ...: restore it from a copy")
    ends = np.cumsum([len(part["index"]) for part in parts])
    paths = [files[i] for i in np.searchsorted(ends, turns, side="right")]
    starts = np.append(turns, count).astype(np.int64)
    for name, values in columns.items():
        _check_finite(f"{folder}: '{name}'", values, starts)
    return Frames(columns, starts, paths, tuple(others))


def _check_finite(where: str, values: NDArray[Any], starts: NDArray[np.int64]) -> None:
    bad = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))
    if len(bad):
        at = int(np.searchsorted(starts, bad[0], side="right")) - 1
        raise BadInput(
            f"{where} is not finite in {len(bad)} frames, the first: frame {bad[0] - starts[at]} of episode {at}: "
            "leave such episodes out"
        )


def _load_table(path: Path, needed: tuple[str, ...], wanted: tuple[str, ...] = ()) -> tuple[pa.Table, tuple[str, ...]]:
    """Those columns of a file that are needed, or wanted and there, and the names of its others."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            there = file.schema_arrow.names
            names = [name for name in (*needed, *wanted) if name in there]
            missing = [name for name in needed if name not in there]
            table = None if missing else file.read(columns=names).select(names)
    except (OSError, pa.ArrowException) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        raise BadInput(f"{path} cannot be read: {why}: restore it from a copy") from None
    if table is None:
        raise BadInput(f"{path} has no column '{missing[0]}': {INFO} or the layout wants it: restore it from a copy")
    for name in names:
        if table[name].null_count:
            raise BadInput(f"{path}: '{name}' lacks {table[name].null_count} values: restore it from a copy")
    return table, tuple(name for name in there if name not in names)


def _values(where: str, values: pa.ChunkedArray, feature: Feature) -> NDArray[Any]:
    """A column as an array [F, ...]."""
    array = pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], values.type)
    plain = feature.shape == (1,) and not _is_list(array.type)
    for size in () if plain else feature.shape:
        if not _is_list(array.type):
            raise BadInput(f"{where} is {values.type}: {INFO} says shape {list(feature.shape)}: restore it from a copy")
        if pc.any(pc.not_equal(pc.list_value_length(array), size)).as_py():
            raise BadInput(f"{where} has rows of other lengths than {size}, which {INFO} says: restore it from a copy")
        array = array.flatten()
    if array.type != pa.from_numpy_dtype(np.dtype(feature.dtype)):
        raise BadInput(f"{where} is {values.type}: {INFO} says {feature.dtype}: restore it from a copy")
    if array.null_count:
        raise BadInput(f"{where} lacks {array.null_count} numbers: restore it from a copy")
    return np.asarray(array.to_numpy(zero_copy_only=False)).reshape(len(values), *feature.frame)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))
