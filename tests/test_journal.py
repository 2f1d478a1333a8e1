import errno
import os
import random
import struct
import subprocess
import sys
import tempfile
import zlib
from datetime import datetime
from enum import Enum
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from embodied.deploy import frames
from embodied.deploy.journal import Writer, episodes, read, repair
from embodied.spec.errors import BadInput, Fault


def run_python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def same(a, b):
    """Equal in type and value, NaN to the bit."""
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return type(b) is float and struct.pack("d", a) == struct.pack("d", b)
    return type(a) is type(b) and a == b


def write(path, *records):
    writer = Writer(path, {"robot": "none"})
    for record in records:
        writer.append(*record)
    writer.close()


def small(path):
    """A journal of two committed episodes and an open one, and where its frames end, by a reader of its own."""
    pos = np.float32([0.5, 0, 1])
    write(
        path,
        ("episode_start", 10, {"episode": 0}),
        ("tick", 11, {"tick": 0, "sent_pos": pos}),
        ("episode_end", 12, {"episode": 0, "outcome": "success"}),
        ("event", 13, {"text": "a pause, ein Größe, 停"}),
        ("episode_start", 14, {"episode": 1}),
        ("transition", 15, {"from": "AUTO", "to": "HOLD", "reason": "", "epoch": 2}),
        ("episode_end", 16, {"episode": 1, "outcome": "fault"}),
        ("episode_start", 17, {"episode": 2}),
        ("tick", 18, {}),
    )
    content = path.read_bytes()
    return content, [end for _, end in by_hand(content)]


def by_hand(content):
    """(record, byte after it) of a whole journal, from the format's description."""
    at = 0
    while at < len(content):
        magic, length, checksum = struct.unpack_from("<4sII", content, at)
        payload = content[at + 12 : at + 12 + length]
        assert magic == b"\xc1EJ1"
        assert zlib.crc32(payload, length) == checksum
        at += 12 + length
        yield msgpack.unpackb(payload), at


def frame(payload):
    return struct.pack("<4sII", b"\xc1EJ1", len(payload), zlib.crc32(payload, len(payload))) + payload


# what is written is read


numbers = st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(endianness="?"), hnp.floating_dtypes(endianness="?"))
arrays = hnp.arrays(
    st.one_of(numbers, hnp.complex_number_dtypes()), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(),
    st.binary(),
    arrays,
    arrays.map(np.transpose),
)
values = st.recursive(leaves, lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)), max_leaves=12)
records = st.tuples(st.text(), st.integers(-(2**63), 2**63 - 1), st.dictionaries(st.text(), values))


@settings(deadline=None, max_examples=40)
@given(st.lists(records, max_size=5))
def test_what_is_written_is_read(written):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "j"
        write(path, *written)
        meta, *got = read(path)
    assert (meta.kind, meta.data) == ("meta", {"format": 1, "robot": "none"})
    assert len(got) == len(written)
    for (kind, time_ns, data), record in zip(written, got, strict=True):
        assert (record.kind, record.time_ns) == (kind, time_ns)
        assert same(data, record.data)


def test_the_file_is_as_described(tmp_path):
    write(tmp_path / "j", ("tick", 7, {"x": np.arange(6, dtype="<i2").reshape(2, 3)[:, ::2], "y": np.float64(2.5), "z": ()}))
    [(meta, _), (tick, _)] = by_hand((tmp_path / "j").read_bytes())
    assert meta[0] == "meta"
    assert meta[2] == {"format": 1, "robot": "none"}
    array = msgpack.ExtType(1, b"<i2 2,2\n" + struct.pack("<4h", 0, 2, 3, 5))
    assert tick == ["tick", 7, {"x": array, "y": 2.5, "z": []}]


def test_arrays_that_were_read_can_be_written_to(tmp_path):
    write(tmp_path / "j", ("tick", 0, {"x": np.zeros(3)}))
    x = list(read(tmp_path / "j"))[1].data["x"]
    x += 1
    assert x.flags.aligned
    assert x.tolist() == [1, 1, 1]


def test_numpy_scalars_become_numbers(tmp_path):
    data = {"a": np.float32(0.1), "b": np.int64(-3), "c": np.bool_(True), "d": np.uint8(255)}
    write(tmp_path / "j", ("tick", np.int64(4), data))
    record = list(read(tmp_path / "j"))[1]
    assert same(record.data, {"a": float(np.float32(0.1)), "b": -3, "c": True, "d": 255})
    assert same(record.time_ns, 4)


class Colour(Enum):
    RED = "red"


def endless():
    data = {}
    data["a"] = data
    return data


def deep(levels):
    data = {}
    for _ in range(levels):
        data = {"a": data}
    return data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"a": {1, 2}}, "of type set"),
        ({"a": datetime(2026, 1, 1)}, "of type datetime"),
        ({"a": Colour.RED}, "of type Colour"),
        ({"a": np.array([None])}, "ndarray of object"),
        ({"a": np.array(["x"])}, "ndarray of <U1"),
        ({"a": np.zeros(2, [("x", "f4")])}, "ndarray of "),
        ({"a": np.array(["2026-01-01"], "M8[D]")}, "ndarray of datetime64"),
        ({"a": np.ma.masked_array([1.0, 2.0], [True, False])}, "MaskedArray of float64"),
        ({"a": 2**64}, "18446744073709551616 has more than 64 bits"),
        ({"a": -(2**63) - 1}, "more than 64 bits"),
        ({"a": "\ud800"}, "surrogates"),
        ({1: 2}, "key 1 is int"),
        ({"a": [{"b": ({(1, 2): 3},)}]}, r"key \(1, 2\) is tuple"),
        ({"a": msgpack.ExtType(5, b"")}, "extension type"),
        ({"a": msgpack.ExtType(1, b"f")}, "extension type"),
        ({"a": b"x" * 2**20}, "at most 1048576"),
        (endless(), "recursion"),
        (deep(1100), "recursion"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, data, says):
    writer = Writer(tmp_path / "j", {})
    with pytest.raises(BadInput, match=f"kind 'tick' .*{says}"):
        writer.append("tick", 0, data)
    writer.append("event", 0, deep(400))
    writer.close()
    assert [record.kind for record in read(tmp_path / "j")] == ["meta", "event"]


# beginnings


def test_a_journal_is_never_written_over(tmp_path):
    path = tmp_path / "j"
    first = Writer(path, {})
    with pytest.raises(BadInput, match=r"exists.*choose another path"):
        Writer(path, {})
    first.append("event", 0, {"text": "still here"})
    first.close()
    with pytest.raises(BadInput, match="exists"):
        Writer(path, {})
    assert [record.kind for record in read(path)] == ["meta", "event"]


@pytest.mark.parametrize("path", ["missing/j", "file/j", "/sys/j"])
def test_a_journal_that_cannot_be_made_is_refused(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="choose a folder that exists and may be written to"):
        Writer(tmp_path / path, {})


def test_a_meta_that_cannot_be_written_leaves_no_file(tmp_path):
    for meta in ({"a": {1}}, {"format": 3}):
        with pytest.raises(BadInput):
            Writer(tmp_path / "j", meta)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_journal_is_said(tmp_path):
    path = tmp_path / "j"
    for content, says in [
        (b"seed: 3\nout: null\n", "not a journal"),
        (bytes(5000), "not a journal"),
        (frame(msgpack.packb(["tick", 0, {}])), "begins with a record of kind 'tick'"),
        (frame(msgpack.packb(["meta", 0, {"format": 2}])), "has format 2, expected 1"),
        (frame(msgpack.packb(["meta", 0, {}])), "has format None"),
    ]:
        path.write_bytes(content)
        for what in (lambda: list(read(path)), lambda: list(read(path, strict=False)), lambda: repair(path)):
            with pytest.raises(BadInput, match=says):
                what()
        assert path.read_bytes() == content
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match="cannot be opened"):
            list(read(wrong))
        with pytest.raises(BadInput, match="cannot be opened"):
            repair(wrong)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "payload", [b"\xc1", msgpack.packb([1]), msgpack.packb(3), msgpack.packb(["a", 0, msgpack.ExtType(2, b"")])]
)
def test_a_whole_frame_of_something_else_is_said(tmp_path, payload):
    write(tmp_path / "j")
    size = (tmp_path / "j").stat().st_size
    with (tmp_path / "j").open("ab") as file:
        file.write(frame(payload))
    with pytest.raises(Fault, match=f"byte {size} is whole but not understood"):
        list(read(tmp_path / "j"))


# damage


def check(path, content, kept, intact):
    """A damaged journal `content`, of which `kept` bytes are to stay and `intact` records are beyond, is read and repaired."""
    whole = [record for record, _ in by_hand(content[:kept])]
    path.write_bytes(content)
    if kept == len(content):
        if kept:
            list(read(path))
    else:
        with pytest.raises(Fault, match=rf"damaged at byte {kept}: {len(content) - kept} bytes .* {intact} intact .* repair"):
            list(read(path))
    assert [record.kind for record in read(path, strict=False)] == [kind for kind, _, _ in whole]

    ends = sum(kind == "episode_end" for kind, _, _ in whole)
    starts = sum(kind == "episode_start" for kind, _, _ in whole)
    done = repair(path)
    assert (done.kept_bytes, done.records, done.episodes, done.incomplete) == (kept, len(whole), ends, starts - ends)
    assert (done.torn_bytes, done.torn_records) == (len(content) - kept, intact)
    assert path.read_bytes() == content[:kept]
    assert (done.torn.read_bytes() if done.torn else b"") == content[kept:]
    if kept:
        assert sum(episode.end is not None for episode in episodes(path)) == ends
    else:
        with pytest.raises(Fault, match="empty"):
            list(read(path))
    if done.torn:
        done.torn.unlink()
    path.unlink()


def test_truncated_at_every_byte(tmp_path):
    content, ends = small(tmp_path / "whole")
    for size in range(len(content) + 1):
        check(tmp_path / "j", content[:size], max((end for end in ends if end <= size), default=0), 0)


def test_every_flipped_bit_is_found(tmp_path):
    content, ends = small(tmp_path / "whole")
    path = tmp_path / "j"
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        index = sum(end <= bit // 8 for end in ends)
        kept = ends[index - 1] if index else 0
        got = []
        with pytest.raises(Fault, match=rf"damaged at byte {kept}: .* {len(ends) - index - 1} intact"):
            got.extend(read(path))
        assert sum(1 for _ in read(path, strict=False)) == index


def test_zeros_are_found_wherever_they_are(tmp_path):
    # what a file system may leave after a power cut: bytes that were never written, read as zeros
    content, ends = small(tmp_path / "whole")
    for size in range(4, len(content)):
        lost = content[:size] + bytes(len(content) - size)
        check(tmp_path / "j", lost, max((end for end in ends if lost[:end] == content[:end]), default=0), 0)
    for more in (1, 11, 12, 13, 4096):
        check(tmp_path / "j", content + bytes(more), len(content), 0)


def test_lost_records_in_the_middle_are_found(tmp_path):
    content, ends = small(tmp_path / "whole")
    for first in range(len(ends) - 1):
        for last in range(first + 1, len(ends)):
            a, b = ends[first], ends[last]
            check(tmp_path / "j", content[:a] + bytes(b - a) + content[b:], a, len(ends) - last - 1)


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False))
def test_random_damage_loses_nothing_before_it(rng):
    with tempfile.TemporaryDirectory() as folder:
        content, ends = small(Path(folder) / "whole")
        damaged, hurt = bytearray(content), set()
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(4, len(content))
            for i in range(at, min(at + rng.choice((1, 1, 8, 100)), len(content))):
                damaged[i] = rng.randrange(256)
                if damaged[i] != content[i]:
                    hurt.add(sum(end <= i for end in ends))
        kept = [0, *ends][min(hurt)] if hurt else len(content)
        check(Path(folder) / "j", bytes(damaged), kept, len(ends) - min(hurt) - len(hurt) if hurt else 0)


def test_a_record_within_a_record_is_not_counted(tmp_path):
    inner = frame(msgpack.packb(["event", 0, {}]))
    write(tmp_path / "whole", ("event", 0, {"text": "hurt"}), ("event", 1, {"data": inner + inner}), ("event", 2, {}))
    content = (tmp_path / "whole").read_bytes()
    [start, *_] = [end for _, end in by_hand(content)]
    check(tmp_path / "j", content.replace(b"hurt", b"HURT"), start, 2)


def test_a_length_beyond_the_largest_is_damage(tmp_path):
    write(tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    check(tmp_path / "j", content + frame(msgpack.packb(["event", 0, {"data": bytes(frames.LARGEST)}])), len(content), 0)


def test_torn_files_are_numbered(tmp_path):
    path = tmp_path / "j"
    write(path)
    for name in ("j.torn", "j.torn.1", "j.torn.2"):
        with path.open("ab") as file:
            file.write(name.encode())
        assert repair(path).torn == tmp_path / name
    assert repair(path).torn is None
    for name in ("j.torn", "j.torn.1", "j.torn.2"):
        assert (tmp_path / name).read_bytes() == name.encode()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_journal_that_is_written_is_not_repaired(tmp_path):
    path = tmp_path / "j"
    writer = Writer(path, {})
    writer.append("event", 0, {"text": "x"})
    assert len(list(read(path))) == 2  # nothing waits in the process
    with pytest.raises(BadInput, match="is being written: stop its runner first"):
        repair(path)
    writer.close()
    assert repair(path).records == 2


KILLED = """
import os, signal, sys
from pathlib import Path
from embodied.deploy import journal

path, content, left = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes(), 0

def trace(frame, event, _):
    global left
    if frame.f_code.co_name not in ("repair", "_set_aside", "_sync_folder", "copyfileobj"):
        return None
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

for lines in range(1000):
    path.write_bytes(content)
    child = os.fork()
    if child == 0:
        left = lines
        sys.settrace(trace)
        journal.repair(path)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = [file.read_bytes() for file in path.parent.glob(path.name + ".torn*")]
    assert path.read_bytes() == content or any(path.read_bytes() + torn == content for torn in found), lines
    journal.repair(path)
    if code == 0:
        break
    assert code == -signal.SIGKILL
print(lines)
"""


def test_a_repair_killed_at_any_line_loses_nothing(tmp_path):
    content, ends = small(tmp_path / "whole")
    (tmp_path / "j").write_bytes(content[:-1])
    done = run_python(KILLED, tmp_path / "j")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30  # kills
    assert (tmp_path / "j").read_bytes() == content[: ends[-2]]
    assert {file.read_bytes() for file in tmp_path.glob("j.torn*")} == {content[ends[-2] : -1]}


# disks that are full


LIMITED = """
import resource, sys
from pathlib import Path
from embodied.deploy import journal
from embodied.spec.errors import Fault

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""


def test_a_full_disk_leaves_whole_records(tmp_path):
    code = (
        LIMITED
        + """
path = Path(sys.argv[1])
writer = journal.Writer(path, {})
limit(1000)
count = 0
try:
    while True:
        writer.append("event", count, {"text": "x" * count})
        count += 1
except Fault as error:
    print(count, error)
assert len(list(journal.read(path))) == 1 + count
limit(resource.RLIM_INFINITY)
writer.append("event", count, {"text": "there is room again"})
writer.close()
"""
    )
    done = run_python(code, tmp_path / "j")
    assert done.returncode == 0, done.stderr
    count, says = done.stdout.split(" ", 1)
    assert "File too large" in says
    assert "what was recorded before is kept" in says
    *before, last = list(read(tmp_path / "j"))[1:]
    assert [record.data["text"] for record in before] == ["x" * i for i in range(int(count))]
    assert last.data["text"] == "there is room again"


def test_a_disk_full_from_the_beginning_leaves_no_file(tmp_path):
    code = LIMITED + "limit(10)\ntry:\n    journal.Writer(Path(sys.argv[1]), {})\nexcept Fault as error:\n    print(error)\n"
    assert "cannot be written" in run_python(code, tmp_path / "j").stdout
    assert list(tmp_path.iterdir()) == []


def test_no_space_is_an_error():
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError) as error:
            frames.append_whole(fd, b"x")
        assert error.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_a_repair_without_room_changes_nothing(tmp_path):
    content, _ = small(tmp_path / "j")
    content += random.Random(0).randbytes(50_000)
    (tmp_path / "j").write_bytes(content)
    code = LIMITED + "limit(20_000)\ntry:\n    journal.repair(Path(sys.argv[1]))\nexcept Fault as error:\n    print(error)\n"
    assert "50000 bytes cannot be moved, nothing is lost: File too large" in run_python(code, tmp_path / "j").stdout
    assert (tmp_path / "j").read_bytes() == content
    assert list(tmp_path.iterdir()) == [tmp_path / "j"]


# episodes


def test_episodes_have_what_happened_in_them(tmp_path):
    small(tmp_path / "j")
    first, second, third = episodes(tmp_path / "j")
    assert [episode.number for episode in (first, second, third)] == [0, 1, 2]
    assert [episode.start.time_ns for episode in (first, second, third)] == [10, 14, 17]
    assert first.end.data == {"episode": 0, "outcome": "success"}
    assert [tick.time_ns for tick in first.ticks] == [11]
    assert first.ticks[0].data["sent_pos"].tolist() == [0.5, 0, 1]
    assert [record.time_ns for record in second.transitions] == [15]
    assert [len(episode.events) for episode in (first, second, third)] == [0, 0, 0]  # it was between them
    assert third.end is None
    assert [tick.time_ns for tick in third.ticks] == [18]


def test_an_episode_that_never_ended_stays_open(tmp_path):
    write(
        tmp_path / "j",
        ("episode_start", 0, {"episode": 0}),
        ("event", 1, {"text": "in it"}),
        ("episode_start", 2, {"episode": 1}),
        ("episode_end", 3, {"episode": 1}),
    )
    assert [(episode.end is None, len(episode.events)) for episode in episodes(tmp_path / "j")] == [(True, 1), (False, 0)]
    assert (repair(tmp_path / "j").episodes, repair(tmp_path / "j").incomplete) == (1, 1)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([("episode_end", 0, {"episode": 4})], "episode 4 ends but none is running"),
        ([("episode_start", 0, {"episode": 3}), ("episode_end", 0, {"episode": 4})], "episode 4 ends but episode 3 is running"),
        ([("episode_start", 0, {})], "'episode_start' has no episode number"),
    ],
)
def test_episodes_that_make_no_sense_are_said(tmp_path, entries, says):
    write(tmp_path / "j", *entries)
    with pytest.raises(Fault, match=says):
        episodes(tmp_path / "j")


def test_episodes_of_a_torn_journal(tmp_path):
    content, ends = small(tmp_path / "j")
    (tmp_path / "j").write_bytes(content[: ends[6] + 5])
    with pytest.raises(Fault, match=f"damaged at byte {ends[6]}"):
        episodes(tmp_path / "j")
    assert [episode.end is not None for episode in episodes(tmp_path / "j", strict=False)] == [True, False]


def test_importing_loads_nothing_heavy():
    code = "import sys, embodied.deploy.journal\nprint(sorted(set(sys.modules) & {'numpy', 'torch', 'mujoco', 'rerun'}))"
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stderr
