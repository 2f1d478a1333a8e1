import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import FEATURES, by_hand, change, episode, in_memory, same, write  # noqa: F401  # fixtures

from embodied.data.episodes import Episode, Feature
from embodied.data.lerobot import DatasetWriter, read
from embodied.spec.errors import BadInput, Fault

CHILD = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from recorded import FEATURES, episode
from embodied.data.lerobot import DatasetWriter
"""


def child(code, *arguments):
    command = [sys.executable, "-c", CHILD + code, str(Path(__file__).parent), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_what_was_added_survives_a_kill(tmp_path):
    code = """
writer = DatasetWriter(sys.argv[2], 10, "walker", FEATURES, {"seed": 3})
for i in range(10**6):
    writer.add(episode(200 + i, i))
    print(i, flush=True)
"""
    folder = tmp_path / "killed"
    with child(code, folder) as process:
        for _ in range(9):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        returned = 9 + len(process.stdout.read().splitlines())
    data = read(folder)
    assert not data.finished
    assert returned <= len(data) <= returned + 1  # the last may have been on its way
    for i, found in enumerate(data.episodes):
        same(found, episode(200 + i, i))

    DatasetWriter.open(folder).close()
    mended = read(folder)
    assert mended.finished
    assert len(mended) == len(data)
    assert not list(folder.rglob("*.partial"))
    assert json.loads((folder / "meta/info.json").read_text())["total_episodes"] == len(data)


def test_death_at_any_step_leaves_what_was_added(tmp_path):
    """A process dies in its n-th fsync, for every second n, while it adds two episodes, finishes, goes on and adds a third."""
    code = """
import os
from pathlib import Path
def record(folder, died):
    count = 0
    sync = os.fsync
    def dying(handle):
        nonlocal count
        count += 1
        if count == died:
            os.kill(os.getpid(), 9)
        sync(handle)
    os.fsync = dying
    writer = DatasetWriter(folder, 10, "walker", FEATURES, {})
    for i in range(3):
        if i == 2:
            writer.close()
            writer = DatasetWriter.open(folder)
        writer.add(episode(3 + i, i, f"task {i % 2}"))
        Path(f"{folder}.added").write_text(str(i + 1))
    writer.close()
for n in range(2, 1000, 2):
    pid = os.fork()
    if not pid:
        record(f"{sys.argv[2]}/{n}", n)
        os._exit(0)
    if (status := os.waitpid(pid, 0)[1]) != 9:
        break
print(n, status, flush=True)
"""
    with child(code, tmp_path) as process:
        steps, status = map(int, process.stdout.read().split())
    assert steps > 30
    assert status == 0  # the last lived
    seen = set()
    for n in range(2, steps + 1, 2):
        folder = tmp_path / str(n)
        added = int((tmp_path / f"{n}.added").read_text()) if (tmp_path / f"{n}.added").exists() else 0
        try:
            data = read(folder)
        except BadInput as error:
            assert added == 0, (n, error)
            continue
        assert added <= len(data) <= added + 1, n
        for i, found in enumerate(data.episodes):
            same(found, episode(3 + i, i, f"task {i % 2}"))
        seen.add((len(data), data.finished))
        DatasetWriter.open(folder).close()
        mended = read(folder)
        assert mended.finished
        assert mended.tasks == data.tasks
    assert {(1, False), (2, False), (2, True), (3, False), (3, True)} <= seen


def test_a_full_disk_is_a_fault_and_the_episode_may_be_added_again(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = DatasetWriter(tmp_path / "full", 10, "walker", FEATURES, {})
    writer.add(episode(3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(Fault, match=r"^episode 1 of .*full was not written, add it again .*: File too large$"):
            writer.add(episode(500, 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read(tmp_path / "full")) == 1
    writer.add(episode(500, 1))
    writer.close()
    same(read(tmp_path / "full").episodes[1], episode(500, 1))


def test_closing_what_was_damaged_is_a_fault(tmp_path):
    writer = DatasetWriter(tmp_path / "bad", 10, "walker", FEATURES, {})
    writer.add(episode(3))
    (tmp_path / "bad/data/chunk-000/file-000.parquet").write_bytes(b"PAR1")
    with pytest.raises(Fault, match=r"bad was not finished.*file-000\.parquet cannot be read"):
        writer.close()
    writer.close()


def test_a_dataset_is_gone_on_with(two):
    with DatasetWriter.open(two) as writer:
        writer.add(episode(4, 7, "push it"))
        assert len(read(two)) == 3
        with pytest.raises(BadInput, match="close its other writer first"):
            DatasetWriter.open(two)
    data = read(two)
    assert data.tasks == ("push it", "pull it back", "push it")
    same(data.episodes[2], episode(4, 7))
    assert data.finished
    with pytest.raises(BadInput, match="was closed"):
        writer.add(episode(4))


def test_a_folder_of_files_that_is_full_is_followed_by_another(two):
    (two / "meta/recording").touch()
    files = two / "data/chunk-000"
    (files / "file-001.parquet").rename(files / "file-999.parquet")
    with DatasetWriter.open(two) as writer:
        writer.add(episode(4))
    assert (two / "data/chunk-001/file-000.parquet").exists()
    rows = pq.read_table(two / "meta/episodes/chunk-000/file-000.parquet")
    assert rows["data/chunk_index"].to_pylist() == [0, 0, 1]
    assert rows["data/file_index"].to_pylist() == [0, 999, 0]
    assert len(read(two)) == 3


def test_files_that_lerobot_added_are_kept(two):
    """It puts several episodes into a file, adds a file of rows, and computes in single precision."""
    tables = [pq.read_table(two / f"data/chunk-000/file-00{i}.parquet") for i in (0, 1)]
    parts = []
    for number, table in enumerate(tables):
        shift = {"episode_index": 2 + number, "index": 5 + 3 * number}
        columns = table.to_pydict() | {
            "episode_index": [shift["episode_index"]] * len(table),
            "index": list(range(shift["index"], shift["index"] + len(table))),
        }
        parts.append(pa.table(columns, schema=table.schema))
    pq.write_table(pa.concat_tables(parts), two / "data/chunk-000/file-002.parquet")
    rows = pq.read_table(two / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    rows |= {"episode_index": [2, 3], "dataset_from_index": [5, 8], "dataset_to_index": [8, 10], "data/file_index": [2, 2]}
    pq.write_table(pa.table(rows), two / "meta/episodes/chunk-000/file-001.parquet")
    change(two / "meta/info.json", {"total_episodes": 4, "total_frames": 10})
    stats = json.loads((two / "meta/stats.json").read_text())
    for name, key in (("episode_index", 3), ("index", 9)):
        stats[name] |= {"max": [key], "mean": [key / 2], "std": [np.sqrt((key * key + 2 * key) / 12)]}
    stats["episode_index"] |= {
        "mean": [1.4],
        "std": [float(np.sqrt(np.mean(np.square([0, 0, 0, 1, 1, 2, 2, 2, 3, 3])) - 1.96))],
    }
    for each in stats.values():
        each["count"] = [10]
        each["std"] = [float(np.float32(x)) for x in each["std"]]
    (two / "meta/stats.json").write_text(json.dumps(stats))
    assert [each.length for each in read(two).episodes] == [3, 2, 3, 2]
    with DatasetWriter.open(two) as writer:
        writer.add(episode(4))
    assert [each.length for each in read(two).episodes] == [3, 2, 3, 2, 4]
    assert (two / "data/chunk-000/file-003.parquet").exists()
    assert not (two / "meta/episodes/chunk-000/file-001.parquet").exists()


def with_(**update):
    return lambda: Episode(episode(3).features | update, "push it")


BAD_EPISODES = {
    "without one": (lambda: Episode({"action": np.float32([0])}, "push it"), "'observation.state'"),
    "with another": (with_(actions=np.float32([0])), "'actions' is no feature.*did you mean 'action'"),
    "another type": (with_(action=np.zeros(3)), "'action' is float64: expected float32"),
    "another shape": (with_(action=np.zeros((3, 1), np.float32)), r"'action' has shape \[3, 1\]: expected \['T'\]"),
    "no array": (with_(action=[0.0] * 3), "'action' is list"),
    "not finite": (with_(action=np.float32([0, np.inf, 0])), "'action' has numbers that are not finite"),
    "other length": (with_(action=np.zeros(2, np.float32)), "lengths .*'action': 2"),
    "no frames": (lambda: episode(0), "at least one"),
    "no task": (lambda: episode(3, task=" "), "in words"),
}


@pytest.mark.parametrize("name", BAD_EPISODES)
def test_an_episode_that_does_not_fit_is_refused_and_nothing_written(tmp_path, name):
    make, words = BAD_EPISODES[name]
    writer = DatasetWriter(tmp_path / "new", 10, "walker", FEATURES, {})
    with pytest.raises(BadInput, match=words) as caught:
        writer.add(make())
    assert "\n" not in str(caught.value)
    assert re.match(r"episode 0 of .*new: ", str(caught.value))
    assert not list((tmp_path / "new").rglob("*.parquet"))
    writer.close()


BAD_WRITERS = {
    "rate": ({"fps": 12.5}, "fps=12.5"),
    "no rate": ({"fps": 0}, "fps=0"),
    "nothing": ({"features": {}}, "without features"),
    "slash": ({"features": {"a/b": Feature("float32", (1,))}}, "a/b"),
    "pictures": ({"features": {"observation.image": Feature("float32", (1,))}}, "image"),
    "taken": ({"features": {"index": Feature("int64", (1,))}}, "index"),
    "type": ({"features": {"a": Feature("float64", (1,))}}, "did you mean 'float32'"),
    "matrix": ({"features": {"a": Feature("float32", (2, 2))}}, "reshape it"),
    "empty": ({"features": {"a": Feature("float32", (0,))}}, "above 0"),
    "names": ({"features": {"a": Feature("float32", (2,), ("x",))}}, "expected 2 words"),
    "extra": ({"extra": {"a": np.zeros(2)}}, "not plain data"),
    "not a number": ({"extra": {"a": float("nan")}}, "not plain data"),
}


@pytest.mark.parametrize("name", BAD_WRITERS)
def test_a_dataset_that_cannot_be_is_not_begun(tmp_path, name):
    update, words = BAD_WRITERS[name]
    given_ = {"folder": tmp_path / "new", "fps": 10, "robot_type": "walker", "features": FEATURES, "extra": {}}
    with pytest.raises(BadInput, match=words) as caught:
        DatasetWriter(**given_ | update)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(BadInput, match="exists: a dataset is never written over"):
        write(tmp_path)
    with pytest.raises(BadInput, match="cannot be made: Not a directory"):
        write(tmp_path / "mine" / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
