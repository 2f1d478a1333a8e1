import json
import statistics as exact
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from recorded import FEATURES, MEMORY, NUMBER, OWN, by_hand, episode, in_memory, same, write  # noqa: F401  # fixtures

from embodied.data.episodes import Feature, quantiles, statistics
from embodied.data.lerobot import DatasetWriter, read
from embodied.spec.errors import BadInput


def test_the_files_are_those_of_the_layout(two):
    assert sorted(str(path.relative_to(two)) for path in two.rglob("*") if path.is_file()) == [
        "data/chunk-000/file-000.parquet",
        "data/chunk-000/file-001.parquet",
        "meta/embodied.json",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
    ]


def test_info(two):
    assert json.loads((two / "meta/info.json").read_text()) == {
        "codebase_version": "v3.0",
        "robot_type": "walker",
        "total_episodes": 2,
        "total_frames": 5,
        "total_tasks": 2,
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": 10,
        "splits": {"train": "0:2"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": None,
        "features": {
            "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
            "action": {"dtype": "float32", "shape": [1], "names": ["push"]},
            "next.done": {"dtype": "bool", **NUMBER},
            "cell": {"dtype": "int64", "shape": [3], "names": None},
            "timestamp": {"dtype": "float32", **NUMBER},
            "frame_index": {"dtype": "int64", **NUMBER},
            "episode_index": {"dtype": "int64", **NUMBER},
            "index": {"dtype": "int64", **NUMBER},
            "task_index": {"dtype": "int64", **NUMBER},
        },
    }
    assert json.loads((two / "meta/embodied.json").read_text()) == {"seed": 3}


def test_frames(two):
    table = pq.read_table(two / "data/chunk-000/file-001.parquet")
    assert table.schema.names == [*FEATURES, *OWN]
    assert table.schema.types == [
        pa.list_(pa.float32(), 2),
        pa.float32(),
        pa.bool_(),
        pa.list_(pa.int64(), 3),
        pa.float32(),
        *[pa.int64()] * 4,
    ]
    assert table.to_pydict() == {
        "observation.state": [[6, 7], [8, 9]],
        "action": [1, 0],
        "next.done": [False, True],
        "cell": [[-1, 0, 1], [0, 0, 0]],
        "timestamp": [0, float(np.float32(0.1))],
        "frame_index": [0, 1],
        "episode_index": [1, 1],
        "index": [3, 4],
        "task_index": [1, 1],
    }


def test_tasks(two):
    table = pq.read_table(two / "meta/tasks.parquet")
    assert table.schema.names == ["task_index", "task"]
    assert table.schema.types == [pa.int64(), pa.string()]
    assert table.to_pydict() == {"task_index": [0, 1], "task": ["push it", "pull it back"]}
    pandas = table.schema.pandas_metadata
    assert pandas["index_columns"] == ["task"]
    assert [(each["name"], each["field_name"], each["pandas_type"]) for each in pandas["columns"]] == [
        ("task_index", "task_index", "int64"),
        ("task", "task", "unicode"),
    ]


def test_tasks_are_the_index_in_pandas(two):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    table = pandas.read_parquet(two / "meta/tasks.parquet")
    assert table.index.name == "task"
    assert list(table.index) == ["push it", "pull it back"]
    assert dict(table["task_index"]) == {"push it": 0, "pull it back": 1}


def test_episodes(two):
    table = pq.read_table(two / "meta/episodes/chunk-000/file-000.parquet")
    stats = [
        f"stats/{name}/{key}"
        for name in (*FEATURES, *OWN)
        for key in ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
    ]
    plain = [
        "episode_index",
        "tasks",
        "length",
        "data/chunk_index",
        "data/file_index",
        "dataset_from_index",
        "dataset_to_index",
    ]
    assert table.schema.names == [*plain, *stats, "meta/episodes/chunk_index", "meta/episodes/file_index"]
    for field in table.schema:
        if field.name.startswith("stats/"):
            assert field.type == pa.list_(pa.int64() if field.name.endswith("/count") else pa.float64())
        else:
            assert field.type == (pa.list_(pa.string()) if field.name == "tasks" else pa.int64())
    rows = table.to_pylist()
    assert [[row[name] for name in plain] for row in rows] == [
        [0, ["push it"], 3, 0, 0, 0, 3],
        [1, ["pull it back"], 2, 0, 1, 3, 5],
    ]
    assert all(row["meta/episodes/chunk_index"] == row["meta/episodes/file_index"] == 0 for row in rows)
    first = {name.removeprefix("stats/"): value for name, value in rows[0].items()}
    assert first["observation.state/min"] == [0, 1]
    assert first["observation.state/mean"] == [2, 3]
    assert first["observation.state/std"] == pytest.approx([np.sqrt(8 / 3)] * 2, rel=1e-15)
    assert first["next.done/max"] == [1]
    assert first["next.done/mean"] == pytest.approx([1 / 3])
    assert first["cell/q50"] == [4, 5, 6]
    assert first["index/count"] == [3]
    assert rows[1]["stats/index/min"] == [3]


def test_stats(two):
    stats = json.loads((two / "meta/stats.json").read_text())
    assert list(stats) == [*FEATURES, *OWN]
    assert stats["action"]["min"] == [-0.5]
    assert stats["action"]["max"] == [1]
    assert stats["action"]["mean"] == [0.25]
    assert stats["action"]["std"] == pytest.approx([np.sqrt(1.25 / 5)])  # 0.25, -0.75, 0, 0.75, -0.25 from the mean
    assert stats["action"]["count"] == [5]
    assert stats["action"]["q50"] == [0.25]
    assert stats["action"]["q90"] == pytest.approx([0.8])  # 3.6 of 4 intervals along -0.5, 0, 0.25, 0.5, 1
    assert stats["next.done"]["mean"] == [0.4]
    assert stats["cell"]["mean"] == pytest.approx([2.2, 3, 3.8])
    assert all(isinstance(each["count"][0], int) for each in stats.values())


def test_what_is_read_is_what_was_written(two):
    data = read(two)
    assert (data.fps, data.robot_type, data.extra, data.finished, data.unread) == (10, "walker", {"seed": 3}, True, ())
    assert data.features == FEATURES
    assert list(data.starts) == [0, 3, 5]
    assert data.tasks == ("push it", "pull it back")
    assert [each.length for each in data.episodes] == [3, 2]
    assert data.episodes[1].features["cell"].tolist() == [[-1, 0, 1], [0, 0, 0]]
    stored = json.loads((two / "meta/stats.json").read_text())
    for name, found in data.stats.items():
        assert list(found) == ["min", "max", "mean", "std", "count"]
        for key, values in found.items():
            np.testing.assert_allclose(values, stored[name][key], rtol=1e-12)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.sampled_from(["push it", "zieh's zurück", "放下"])), min_size=1, max_size=4))
def test_ragged_episodes_come_back(shapes):
    episodes = [episode(length, seed, task) for seed, (length, task) in enumerate(shapes)]
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        data = read(write(Path(folder) / "new", *episodes, fps=7))
    assert data.starts.tolist() == [0, *np.cumsum([length for length, _ in shapes]).tolist()]
    for found, expected in zip(data.episodes, episodes, strict=True):
        same(found, expected)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-1e6, 1e6, width=32)))
def test_statistics_are_exact(values):
    """Against the standard library's fractions, which lose nothing."""
    found = statistics(values) | quantiles(values)
    numbers = values.tolist()
    size = max(map(abs, numbers))
    assert found["min"] == [min(numbers)]
    assert found["max"] == [max(numbers)]
    assert found["count"] == [len(numbers)]
    assert found["mean"][0] == pytest.approx(exact.mean(numbers), abs=1e-14 * size)
    assert found["std"][0] == pytest.approx(exact.pstdev(numbers), abs=1e-14 * size)
    if len(numbers) > 1:
        cuts = exact.quantiles(numbers, n=100, method="inclusive")
        for key, at in (("q01", 1), ("q10", 10), ("q50", 50), ("q90", 90), ("q99", 99)):
            assert found[key][0] == pytest.approx(cuts[at - 1], abs=1e-13 * size)


def test_statistics_of_vectors_are_double():
    n = 1001
    ramp = np.arange(n)[:, None] * [1, -2]
    found = statistics((ramp + 2**24 - 4000).astype(np.float32))  # single precision has no room for their sum
    assert found["mean"].tolist() == [2**24 - 4000 + 500, 2**24 - 4000 - 1000]
    np.testing.assert_allclose(found["std"], np.sqrt((n * n - 1) / 12) * np.array([1, 2]), rtol=1e-12)


def lerobot_writes(folder, tasks_name="task", with_tasks=True):
    """A dataset as LeRobot leaves one: episodes of 2, 1, 3 frames in two files, columns that we do not know."""
    lengths, file_of = [2, 1, 3], [0, 0, 1]
    starts = [0, 2, 3, 6]
    state = np.arange(12, dtype=np.float32).reshape(6, 2)
    columns = {
        "observation.state": pa.array(state.tolist(), pa.list_(pa.float32())),
        "action": pa.array([[x] for x in (1.0, 2, 3, 4, 5, 6)], pa.list_(pa.float64(), 1)),
        "observation.map": pa.array([[[i, i], [0, 1], [2, 3]] for i in range(6)], pa.list_(pa.list_(pa.int32()))),
        "observation.images.top": pa.array([{"bytes": b"png", "path": None}] * 6),
        "note": pa.array(["a"] * 6),
        "timestamp": pa.array([0, 0.1, 0, 0, 0.1, 0.2], pa.float32()),
        "frame_index": pa.array([0, 1, 0, 0, 1, 2]),
        "episode_index": pa.array([0, 0, 1, 2, 2, 2]),
        "index": pa.array(range(6)),
        "task_index": pa.array([1, 1, 0, 1, 1, 1]),
        "forgotten": pa.array([0.0] * 6),
    }
    table = pa.table(columns)
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta/episodes/chunk-000").mkdir(parents=True)
    with pq.ParquetWriter(folder / "data/chunk-000/file-000.parquet", table.schema) as file:
        file.write_table(table.slice(0, 2))
        file.write_table(table.slice(2, 1))
    pq.write_table(table.slice(3), folder / "data/chunk-000/file-001.parquet")
    words = ["lift", "press"]
    rows = {
        "episode_index": [0, 1, 2],
        "tasks": [["press"], ["lift"], ["press"]],
        "length": lengths,
        "data/chunk_index": [0, 0, 0],
        "data/file_index": file_of,
        "dataset_from_index": starts[:-1],
        "dataset_to_index": starts[1:],
        "stats/action/min": [[0.0]] * 3,
        "videos/observation.images.side/from_timestamp": [0.0] * 3,
    }
    if not with_tasks:
        del rows["tasks"]
    pq.write_table(pa.table(rows), folder / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [1, 0], tasks_name: words[::-1]}), folder / "meta/tasks.parquet")
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": {"motors": ["a", "b"]}, "fps": 10},
        "action": {"dtype": "float64", **NUMBER},
        "observation.map": {"dtype": "int32", "shape": [3, 2], "names": None},
        "observation.images.top": {"dtype": "image", "shape": [4, 4, 3], "names": None},
        "observation.images.side": {"dtype": "video", "shape": [4, 4, 3], "names": None},
        "note": {"dtype": "string", **NUMBER},
        **{name: {"dtype": "float32" if name == "timestamp" else "int64", **NUMBER} for name in OWN},
    }
    info = {"codebase_version": "v3.0", "fps": 10.0, "total_episodes": 3, "total_frames": 6, "total_tasks": 2}
    info |= {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet", "features": features, "tools": []}
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/stats.json").write_text(json.dumps({"action": {"mean": [77]}}))
    return folder


@pytest.mark.parametrize("tasks", [("task", True), ("__index_level_0__", True), ("task", False)])
def test_lerobots_own_layout_is_read(tmp_path, tasks):
    """Tasks without the name of their index, and rows without tasks, are found on the hub (lerobot issues 2467, 4519)."""
    data = read(lerobot_writes(tmp_path, *tasks))
    assert data.features == {
        "observation.state": Feature("float32", (2,), {"motors": ["a", "b"]}),
        "action": Feature("float64", (1,)),
        "observation.map": Feature("int32", (3, 2)),
    }
    assert data.tasks == ("press", "lift", "press")
    assert [each.length for each in data.episodes] == [2, 1, 3]
    last = data.episodes[2].features
    assert last["observation.state"].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert last["action"].tolist() == [4, 5, 6]
    assert last["observation.map"][2].tolist() == [[5, 5], [0, 1], [2, 3]]
    assert data.stats["action"]["mean"] == [3.5]
    assert (data.extra, data.robot_type, data.finished) == (None, None, True)
    assert set(data.unread) == {"observation.images.top", "observation.images.side", "note", "forgotten"}


def test_rows_may_name_the_wrong_file(tmp_path):
    """As those of lerobot/libero do; LeRobot goes by the frames' index, too."""
    lerobot_writes(tmp_path)
    path = tmp_path / "meta/episodes/chunk-000/file-000.parquet"
    rows = pq.read_table(path).to_pydict() | {"data/file_index": [0, 0, 0]}
    pq.write_table(pa.table(rows), path)
    assert read(tmp_path).episodes[2].features["action"].tolist() == [4, 5, 6]


def test_no_foreign_dataset_is_gone_on_with(tmp_path, two):
    (two / "meta/embodied.json").unlink()
    for folder in (two, lerobot_writes(tmp_path / "foreign")):
        with pytest.raises(BadInput, match="not ours alone"):
            DatasetWriter.open(folder)
        assert read(folder).finished


def test_lerobot_loads_it(two):
    pytest.importorskip("lerobot", reason="lerobot is not installed")
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    data = LeRobotDataset("local/two", root=two)
    assert (len(data), data.num_episodes, data.fps) == (5, 2, 10)
    frame = data[4]
    assert frame["observation.state"].tolist() == [8, 9]
    assert frame["action"].tolist() == 0
    assert frame["task"] == "pull it back"
