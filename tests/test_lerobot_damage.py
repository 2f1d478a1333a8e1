import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import by_hand, change, in_memory, write  # noqa: F401  # fixtures

from embodied.data.lerobot import read
from embodied.spec.errors import BadInput


def refused(folder, *words):
    with pytest.raises(BadInput) as caught:
        read(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert text.count(": ") >= 1
    for word in words:
        assert word in text, text


def table(path, **columns):
    """Change columns of a file; None takes one away."""
    old = pq.read_table(path)
    for name, values in columns.items():
        at = old.schema.get_field_index(name)
        if values is None:
            old = old.remove_column(at)
        else:
            old = old.set_column(at, name, pa.array(values) if isinstance(values, list) else values)
    pq.write_table(old, path)


FIRST, SECOND = "data/chunk-000/file-000.parquet", "data/chunk-000/file-001.parquet"
ROWS = "meta/episodes/chunk-000/file-000.parquet"


def info(**update):
    return lambda folder: change(folder / "meta/info.json", update)


def frames(path, **columns):
    return lambda folder: table(folder / path, **columns)


def flip(folder):
    """A bit of the states."""
    content = bytearray((folder / FIRST).read_bytes())
    at = content.index(np.float32([0, 1, 2, 3, 4, 5]).tobytes()[8:])
    content[at + 2] ^= 1
    (folder / FIRST).write_bytes(content)


def stats_of(name, **values):
    def damage(folder):
        path = folder / "meta/stats.json"
        stats = json.loads(path.read_text())
        stats[name] |= values
        path.write_text(json.dumps(stats))

    return damage


DAMAGES = {
    "no folder": (lambda folder: shutil.rmtree(folder), "has no meta/info.json"),
    "another version": (info(codebase_version="v2.1"), "v2.1", "v3.0"),
    "json cut": (lambda folder: (folder / "meta/info.json").write_text('{"a": '), "info.json cannot be read"),
    "json list": (lambda folder: (folder / "meta/info.json").write_text("[]"), "expected an object"),
    "no features": (info(features=None), "info.json lacks"),
    "no rate": (info(fps=0), "fps above 0"),
    "other rate": (info(fps=20), "timestamp", "frame 1 of episode 0", "20"),
    "episodes counted wrong": (info(total_episodes=3), "total_episodes is 3", "hold 2"),
    "frames counted wrong": (info(total_frames=4), "total_frames is 4", "hold 5"),
    "tasks counted wrong": (info(total_tasks=1), "total_tasks is 1", "hold 2"),
    "last file lost": (lambda folder: (folder / SECOND).unlink(), "file-001.parquet is missing", "episode 1"),
    "first file lost": (lambda folder: (folder / FIRST).unlink(), "file-000.parquet is missing"),
    "both lost": (lambda folder: shutil.rmtree(folder / "data"), "file-000.parquet is missing"),
    "rows lost": (lambda folder: (folder / ROWS).unlink(), "lists 0 episodes", "has 2"),
    "rows doubled": (lambda folder: shutil.copy(folder / ROWS, (folder / ROWS).with_name("file-001.parquet")), "twice"),
    "file cut": (lambda folder: os.truncate(folder / FIRST, 300), "file-000.parquet cannot be read"),
    "bit flipped": (flip, "file-000.parquet cannot be read"),
    "tasks lost": (lambda folder: (folder / "meta/tasks.parquet").unlink(), "tasks.parquet cannot be read"),
    "task without words": (frames("meta/tasks.parquet", task=None), "tasks.parquet", "a task_index and a task"),
    "task twice": (frames("meta/tasks.parquet", task_index=[0, 0]), "tasks.parquet", "a task_index and a task"),
    "statistics lost": (lambda folder: (folder / "meta/stats.json").unlink(), "no meta/stats.json"),
    "mean wrong": (stats_of("action", mean=[0.26]), "mean of 'action'"),
    "most wrong": (stats_of("action", max=[1.0001]), "max of 'action'"),
    "count wrong": (stats_of("index", count=[6]), "count of 'index'"),
    "statistic lost": (stats_of("cell", std=[]), "std of 'cell'"),
    "not a number": (frames(FIRST, action=pa.array([0, np.nan, 0], pa.float32())), "'action'", "frame 1 of episode 0"),
    "nothing": (frames(FIRST, action=pa.array([0, None, 0], pa.float32())), "'action' lacks 1 values"),
    "another type": (frames(FIRST, action=[0.5, -0.5, 0.25]), "'action' is double", "float32"),
    "another width": (frames(FIRST, cell=[[1, 2]] * 3), "'cell'", "3"),
    "ragged": (frames(FIRST, cell=[[1, 2, 3], [1], [1, 2, 3, 4, 5]]), "'cell'", "3"),
    "no vector": (frames(FIRST, cell=[1, 2, 3]), "'cell' is int64", "shape [3]"),
    "column lost": (frames(FIRST, action=None), "file-000.parquet has no column 'action'"),
    "frames shifted": (frames(SECOND, index=[4, 5]), "file-001.parquet has frames 4 to 5", "expected 3"),
    "episodes skipped": (frames(SECOND, episode_index=[2, 2]), "'episode_index'", "out of order"),
    "frame skipped": (frames(SECOND, frame_index=[0, 2]), "'frame_index' is 2 in frame 1 of episode 1"),
    "late": (frames(SECOND, timestamp=pa.array([0, 0.1003], pa.float32())), "'timestamp'", "episode 1"),
    "two tasks": (frames(SECOND, task_index=[1, 0]), "'task_index' is 0 in frame 1 of episode 1", "one task"),
    "unknown task": (frames(SECOND, task_index=[2, 2]), "'task_index' is 2", "which has 2"),
    "other task": (frames(SECOND, task_index=[0, 0]), "'tasks' of episode 1"),
    "length wrong": (frames(ROWS, length=[3, 3]), "'length' of episode 1 is 3", "say 2"),
    "from wrong": (frames(ROWS, dataset_from_index=[0, 2]), "'dataset_from_index' of episode 1 is 2", "say 3"),
    "row column lost": (frames(ROWS, dataset_to_index=None), "no column 'dataset_to_index'"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_dataset_is_refused_in_one_line(two, name):
    damage, *words = DAMAGES[name]
    read(two)
    damage(two)
    refused(two, *words)


def test_a_dataset_without_episodes_says_so(tmp_path):
    write(tmp_path / "none")
    refused(tmp_path / "none", "holds no episodes")
