"""Datasets for the tests of `embodied.data`."""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from embodied.data.episodes import Episode, Feature
from embodied.data.lerobot import DatasetWriter

MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where nothing waits for a disk: these tests end processes, not the power."""

OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")
NUMBER = {"shape": [1], "names": None}
FEATURES = {
    "observation.state": Feature("float32", (2,), ("x", "y")),
    "action": Feature("float32", (1,), ("push",)),
    "next.done": Feature("bool", (1,)),
    "cell": Feature("int64", (3,)),
}


@pytest.fixture(name="tmp_path")
def in_memory():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.fixture(name="two")
def by_hand(tmp_path):
    """Two episodes of three and two frames, by hand."""
    first = Episode(
        {
            "observation.state": np.float32([[0, 1], [2, 3], [4, 5]]),
            "action": np.float32([0.5, -0.5, 0.25]),
            "next.done": np.array([False, False, True]),
            "cell": np.int64([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        },
        "push it",
    )
    second = Episode(
        {
            "observation.state": np.float32([[6, 7], [8, 9]]),
            "action": np.float32([1, 0]),
            "next.done": np.array([False, True]),
            "cell": np.int64([[-1, 0, 1], [0, 0, 0]]),
        },
        "pull it back",
    )
    return write(tmp_path / "two", first, second)


def episode(length, seed=0, task="push it"):
    random = np.random.default_rng(seed)
    features = {
        "observation.state": random.normal(size=(length, 2)).astype(np.float32),
        "action": random.normal(size=length).astype(np.float32),
        "next.done": np.arange(length) == length - 1,
        "cell": random.integers(-9, 9, size=(length, 3)),
    }
    return Episode(features, task)


def write(folder, *episodes, fps=10):
    with DatasetWriter(folder, fps, "walker", FEATURES, {"seed": 3}) as writer:
        for each in episodes:
            writer.add(each)
    return folder


def same(found, expected):
    assert found.task == expected.task
    assert list(found.features) == list(expected.features)
    for name, values in expected.features.items():
        assert found.features[name].dtype == values.dtype
        np.testing.assert_array_equal(found.features[name], values)


def change(path, update):
    path.write_text(json.dumps(json.loads(path.read_text()) | update))
