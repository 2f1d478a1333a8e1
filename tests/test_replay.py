import math
import subprocess
import sys

import numpy as np
import pytest
from rerun_reader import read_recording

from embodied.deploy.journal import Writer, read
from embodied.deploy.replay import replay
from embodied.spec.errors import BadInput, Fault

STEP = 20_000_000  # ns
HALF = np.float32([math.sqrt(0.5), 0, 0, math.sqrt(0.5)])  # a quarter turn about z, wxyz


def tick(number, **changes):
    x = np.float32(number)
    return {
        "tick": number,
        "epoch": 3,
        "state": "auto",
        "age_us": 100 + number,
        "infer_us": 300,
        "late_us": 0.5 * number,
        "readings": {
            "tcp_pos": np.float32([x, 0, 1]),
            "tcp_quat": HALF,
            "a b/c_pos": np.float32([0, 2, 0]),
            "a b/c_quat": np.float32([1, 0, 0, 0]),
            "target_pos": np.float32([x, 5, 1]),
            "target_quat": HALF,
            "joint_pos": np.zeros(7, np.float32),
            "force": np.float32([3 * x, 4 * x, 0]),
            "torque": np.float32([0, 0, -2]),
        },
        "obs": np.zeros(5, np.float32),
        "action": np.zeros(6, np.float32),
        "target_pos": np.float32([x, 0, 2]),
        "target_quat": np.float32([1, 0, 0, 0]),
        "sent_pos": np.float32([x, 0, 3]),
        "sent_quat": HALF,
        "level": 0,
        "reasons": [],
    } | changes


HELD = {"target_pos": None, "target_quat": None, "obs": None, "action": None, "level": 2, "reasons": ["force is not finite"]}


@pytest.fixture
def journal(tmp_path):
    """Two episodes of 4 and 2 ticks, in the second a HOLD; and the time of its meta record [ns]."""
    path = tmp_path / "j"
    writer = Writer(path, {"robot": "none"})
    [meta] = read(path)
    start = meta.time_ns
    entries = [
        ("transition", 0, {"from": "disconnected", "to": "preflight", "reason": "", "epoch": 1}),
        ("episode_start", 1, {"episode": 0, "seed": 5}),
        *(("tick", 2 + i, tick(i)) for i in range(4)),
        ("episode_end", 6, {"episode": 0, "outcome": "success", "success": True, "truncated": False, "steps": 4, "reason": ""}),
        ("event", 7, {"text": "ein Mensch kommt: Größe"}),
        ("episode_start", 8, {"episode": 1, "seed": 6}),
        ("tick", 9, tick(10)),
        ("transition", 10, {"from": "auto", "to": "hold", "reason": "force is not finite", "epoch": 2}),
        ("tick", 10, tick(11, **HELD)),
        (
            "episode_end",
            11,
            {"episode": 1, "outcome": "fault", "success": False, "truncated": True, "steps": 2, "reason": "gone"},
        ),
        ("tick", 12, tick(20)),
    ]
    for kind, at, data in entries:
        writer.append(kind, start + at * STEP, data)
    writer.close()
    return path


def test_a_journal_comes_back_as_a_recording(journal, tmp_path):
    replay(journal, tmp_path / "r.rrd")
    static, timed = read_recording(tmp_path / "r.rrd", STEP)
    frames = {"/world/tcp", "/world/target", "/world/sent", "/world/target_kept", "/world/a\\ b\\/c"}
    trails, logs = (
        {"/world/trails/tcp", "/world/trails/sent"},
        {f"/log/{x}" for x in ("transitions", "guard", "events", "episodes")},
    )
    scalars = {f"/scalars/{name}" for name in ("force", "torque", "age_us", "infer_us", "late_us", "level")}
    assert {entity for entity in timed if not entity.startswith("/__")} == frames | trails | logs | scalars
    for frame in frames:
        assert static[frame]["TransformAxes3D:axis_length"] == [[pytest.approx(0.05)]]

    ticks = [2, 3, 4, 5, 9, 10, 12]
    for frame, y, z in (("tcp", 0, 1), ("sent", 0, 3), ("target_kept", 5, 1)):
        poses = timed[f"/world/{frame}"]
        assert poses["time"] == pytest.approx(ticks)
        assert np.array(poses["Transform3D:translation"])[:, 0].tolist() == [[x, y, z] for x in (0, 1, 2, 3, 10, 11, 20)]
        assert np.array(poses["Transform3D:quaternion"])[:, 0] == pytest.approx(np.tile([0, 0, *[math.sqrt(0.5)] * 2], (7, 1)))
    target = timed["/world/target"]
    assert target["time"] == pytest.approx([2, 3, 4, 5, 9, 12])  # nothing was asked in the HOLD
    assert target["Transform3D:translation"][4] == [[10, 0, 2]]
    assert timed["/world/a\\ b\\/c"]["Transform3D:translation"] == [[[0, 2, 0]]] * 7

    def plotted(name):
        assert timed[f"/scalars/{name}"]["time"] == pytest.approx(ticks)
        return [value for [value] in timed[f"/scalars/{name}"]["Scalars:scalars"]]

    assert plotted("force") == pytest.approx([0, 5, 10, 15, 50, 55, 100])
    assert plotted("torque") == [2] * 7
    assert plotted("age_us") == [100, 101, 102, 103, 110, 111, 120]
    assert plotted("infer_us") == [300] * 7
    assert plotted("late_us") == [0, 0.5, 1, 1.5, 5, 5.5, 10]
    assert plotted("level") == [0, 0, 0, 0, 0, 2, 0]

    for name, z in (("tcp", 1), ("sent", 3)):
        trail = timed[f"/world/trails/{name}"]
        assert trail["time"] == pytest.approx([1, 8])
        assert trail["LineStrips3D:strips"] == [[[[x, 0, z] for x in (0, 1, 2, 3)]], [[[x, 0, z] for x in (10, 11)]]]

    def said(name):
        log = timed[f"/log/{name}"]
        texts, levels = ([row for [row] in log[f"TextLog:{what}"]] for what in ("text", "level"))
        return list(zip(log["time"], texts, levels, strict=True))

    assert said("transitions") == [
        (0, "disconnected -> preflight", "INFO"),
        (10, "auto -> hold: force is not finite", "WARN"),
    ]
    assert said("guard") == [(10, "force is not finite", "WARN"), (12, "none any more", "INFO")]
    assert said("events") == [(7, "ein Mensch kommt: Größe", "INFO")]
    assert said("episodes") == [
        (1, "episode 0 begins", "INFO"),
        (6, "episode 0 ends after 4 steps, success", "INFO"),
        (8, "episode 1 begins", "INFO"),
        (11, "episode 1 ends after 2 steps, fault: gone", "ERROR"),
    ]
    assert {file.name for file in tmp_path.iterdir()} == {"j", "r.rrd"}


def test_one_episode_alone(journal, tmp_path):
    replay(journal, tmp_path / "r.rrd", episode=1)
    _, timed = read_recording(tmp_path / "r.rrd", STEP)
    assert timed["/world/tcp"]["time"] == pytest.approx([9, 10])
    assert timed["/world/trails/sent"]["LineStrips3D:strips"] == [[[[10, 0, 3], [11, 0, 3]]]]
    assert timed["/log/transitions"]["TextLog:text"] == [["auto -> hold: force is not finite"]]
    assert "/log/events" not in timed
    with pytest.raises(BadInput, match=r"has no episode 7: it has 0, 1"):
        replay(journal, tmp_path / "other.rrd", episode=7)
    assert not (tmp_path / "other.rrd").exists()


def test_an_empty_episode_and_an_empty_journal(tmp_path):
    writer = Writer(tmp_path / "j", {})
    replay(tmp_path / "j", tmp_path / "empty.rrd")
    assert set(read_recording(tmp_path / "empty.rrd", STEP)[0]) == {"/world", "/__properties"}
    with pytest.raises(BadInput, match="has no episode 0: it has none"):
        replay(tmp_path / "j", tmp_path / "r.rrd", episode=0)
    [meta] = read(tmp_path / "j")
    writer.append("episode_start", meta.time_ns, {"episode": 0})
    replay(tmp_path / "j", tmp_path / "r.rrd", episode=0)
    assert read_recording(tmp_path / "r.rrd", STEP)[1]["/world/trails/tcp"]["LineStrips3D:strips"] == [[]]
    writer.close()


def test_what_cannot_be_shown_is_said(journal, tmp_path):
    out = tmp_path / "r.rrd"
    with pytest.raises(BadInput, match="not a folder"):
        replay(journal, tmp_path / "none" / "r.rrd")
    with pytest.raises(BadInput, match="cannot be opened"):
        replay(tmp_path / "none", out)
    with pytest.raises(Fault, match="cannot be written"):
        replay(journal, "/sys/r.rrd")
    content = journal.read_bytes()
    journal.write_bytes(content[:-1])
    with pytest.raises(Fault, match="damaged at byte"):
        replay(journal, out)
    for name, data, says in (
        ("short", tick(0, sent_pos=np.zeros(2)), "'tick' at 9 ns is not as the runner writes it: ValueError"),
        ("missing", {"tick": 0}, "'tick' at 9 ns is not as the runner writes it: KeyError: 'readings'"),
    ):
        writer = Writer(tmp_path / name, {})
        writer.append("tick", 9, data)
        writer.close()
        with pytest.raises(Fault, match=says):
            replay(tmp_path / name, out)
    assert not out.exists()


def test_a_full_disk_leaves_no_recording(journal, tmp_path):
    code = "import resource, sys\nfrom embodied.deploy.replay import replay\nfrom embodied.spec.errors import Fault\n"
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n"
    code += "try:\n    replay(sys.argv[1], sys.argv[2])\nexcept Fault as fault:\n    print('Fault:', fault)\n"
    command = [sys.executable, "-c", code, str(journal), str(tmp_path / "r.rrd")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Fault:" in done.stdout, done.stderr
    assert "cannot be written" in done.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["j"]


def test_importing_loads_no_rerun():
    code = (
        "import sys, embodied.deploy.replay\nprint(sorted(set(sys.modules) & {'torch', 'mujoco', 'rerun', 'embodied.report'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
