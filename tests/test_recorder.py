import contextlib
import inspect
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from embodied.deploy import frames, recorder
from embodied.deploy.journal import Writer, episodes, read, repair
from embodied.deploy.recorder import Recorder
from embodied.spec.errors import BadInput, Fault

TICKS = 7


def tick(episode, number):
    """What a tick holds, large once an episode: a kill is then likely to find it half written."""
    rng = random.Random(1000 * episode + number)
    return {"tick": number, "data": rng.randbytes(300_000 if number == 3 else 500)}


def record_episode(record, number):
    record.write("episode_start", 0, {"episode": number})
    for i in range(TICKS):
        record.write("tick", i, tick(number, i))
    record.write("episode_end", TICKS, {"episode": number})
    record.commit(30)


# not imported by it: numpy and pytest would be most of its time
PARENT = f"""
import itertools, random, sys
from embodied.deploy.recorder import Recorder

TICKS = {TICKS}

{inspect.getsource(tick)}

{inspect.getsource(record_episode)}

record = Recorder(sys.argv[1], {{}})
print(record.pid, flush=True)
for number in itertools.count():
    record_episode(record, number)
    print(number, flush=True)
"""


def start_parent(path):
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert int(process.stdout.readline()) > 0  # it records
    return process


def end_parent(process):
    """The last episode that it knows to be committed, or -1."""
    said = process.stdout.read()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    # a line is said whole or not at all
    return int(said.split("\n")[-2]) if "\n" in said else -1


def repair_when_ended(path):
    """Repair the journal as soon as its recorder has ended."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return repair(path)
        except BadInput:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def check_episodes(path, committed):
    found = episodes(path)
    assert sum(episode.end is not None for episode in found) >= committed + 1
    for number, episode in enumerate(found):
        assert episode.number == number
        assert episode.end is not None or number == len(found) - 1
        assert len(episode.ticks) == TICKS or episode.end is None
        for i, record in enumerate(episode.ticks):
            assert record.data == tick(number, i)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "j"


@pytest.fixture
def record(path):
    record = Recorder(path, {"robot": "none"})
    yield record
    with contextlib.suppress(Fault):
        record.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(record.pid, signal.SIGCONT)
    record._child.wait(60)


# it records


def test_what_is_handed_over_is_on_the_disk(path, record):
    written = [("tick", i, {"x": np.full((2, i % 3), i, np.float32), "text": "Größe 停" * i, "none": {}}) for i in range(200)]
    for entry in written:
        record.write(*entry)
    record.commit(30)
    meta, *got = read(path)
    assert (meta.kind, meta.data) == ("meta", {"format": 1, "robot": "none"})
    for (kind, time_ns, data), result in zip(written, got, strict=True):
        assert (result.kind, result.time_ns, result.data["text"]) == (kind, time_ns, data["text"])
        assert result.data["x"].dtype == np.float32
        assert result.data["x"].tolist() == data["x"].tolist()
    record.write("event", 0, {})
    record.close()
    record.close()
    assert len(list(read(path))) == 202


def test_a_commit_of_nothing_returns(record):
    record.commit(30)
    record.commit(0)


def test_the_largest_records_pass(path, record):
    around = len(frames.encode("tick", 0, {"x": bytes(100_000)})) - frames.HEADER.size - 100_000
    data = {"x": bytes(frames.LARGEST - around)}
    for _ in range(3):
        record.write("tick", 0, data)
        record.commit(30)
    with pytest.raises(BadInput, match="at most 1048576"):
        record.write("tick", 0, {"x": bytes(frames.LARGEST - around + 1)})
    record.close()
    assert [item.data for item in read(path)][1:] == [data] * 3


def test_the_process_is_light():
    code = "import sys, embodied.deploy.recorder\nprint(sorted(set(sys.modules) & {'numpy', 'torch', 'mujoco', 'rerun'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_nothing_stays_open(path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for i in range(3):
        record = Recorder(path.with_name(f"{i}"), {})
        record.close()
        with pytest.raises(ProcessLookupError):
            os.kill(record.pid, 0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_two_never_write_one_journal(path, record):
    for other in (Recorder, Writer):
        with pytest.raises(BadInput, match="exists"):
            other(path, {})
    with pytest.raises(BadInput, match="is being written"):
        repair(path)
    record_episode(record, 0)
    record.close()
    check_episodes(path, 0)


def test_what_is_wrong_at_the_start_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for wrong in (tmp_path / "missing" / "j", tmp_path / "file" / "j", "/sys/j"):
        with pytest.raises(BadInput, match="cannot be made"):
            Recorder(wrong, {})
    with pytest.raises(BadInput, match="cannot be written"):
        Recorder(tmp_path / "j", {"a": {1}})
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Fault, match="has ended"):
        Recorder(tmp_path / "j", {})
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


# it is told to sync, and does so by itself


SPY = """
import os, sys
from embodied.deploy import recorder
log = os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)
sync = os.fsync
def fsync(fd):
    sync(fd)
    os.write(log, b"%d " % os.fstat(fd).st_size)
os.fsync = fsync
sys.exit(recorder.main(int(sys.argv[1]), int(sys.argv[2])))
"""


@contextlib.contextmanager
def child(file, code, *arguments):
    """The recorder's process by itself: our end of its socket."""
    ours, theirs = socket.socketpair()
    fds = theirs.fileno(), file
    process = subprocess.Popen([sys.executable, *code, *map(str, fds), *map(str, arguments)], pass_fds=fds)
    theirs.close()
    ours.settimeout(60)
    try:
        assert ours.recv(6) == b"ready\n"
        yield ours, process
    finally:
        ours.close()
        process.wait(60)


def test_it_syncs_every_second_if_there_is_something(tmp_path):
    writer = Writer(tmp_path / "j", {})
    base = (tmp_path / "j").stat().st_size
    log = tmp_path / "log"
    log.touch()
    with child(writer.fileno(), ("-c", SPY), log) as (link, process):
        frame = frames.encode("event", 0, {})
        link.sendall(frame)
        said = b"synced %d\n" % len(frame)
        assert link.recv(100) == said  # by itself
        assert log.read_text() == f"{base + len(frame)} "
        time.sleep(2.5)
        assert log.read_text() == f"{base + len(frame)} "  # there was nothing
        link.sendall(frame[:5])
        link.sendall(frame[5:] + recorder.SYNC)
        assert link.recv(100) == b"synced %d\n" % (2 * len(frame))
        assert log.read_text().split()[1:] == [f"{base + 2 * len(frame)}"]
        link.sendall(frame + frame[:-1])  # the last is never finished
    assert process.returncode == 0
    assert log.read_text().split()[2:] == [f"{base + 3 * len(frame)}"]
    writer.close()
    assert len(list(read(tmp_path / "j"))) == 4


# kills


def test_a_control_process_killed_at_any_moment_loses_nothing(tmp_path):
    rng = random.Random(0)
    for run in range(30):
        path = tmp_path / f"{run}"
        process = start_parent(path)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        committed = end_parent(process)
        done = repair_when_ended(path)
        assert done.torn is None  # the recorder goes on to the end of what it was sent
        check_episodes(path, committed)


def test_all_killed_at_any_moment_keeps_what_was_committed(tmp_path):
    rng = random.Random(1)
    for run in range(15):
        path = tmp_path / f"{run}"
        process = start_parent(path)
        time.sleep(rng.uniform(0, 0.1))
        os.killpg(process.pid, signal.SIGKILL)
        committed = end_parent(process)
        done = repair_when_ended(path)
        assert done.torn_records == 0
        check_episodes(path, committed)


def test_a_recorder_killed_at_any_moment_is_a_fault(tmp_path):
    rng = random.Random(2)
    for run in range(10):
        path = tmp_path / f"{run}"
        record, committed = Recorder(path, {}), -1
        timer = threading.Timer(rng.uniform(0, 0.1), os.kill, (record.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(Fault, match="has ended") as error:
            while True:
                record_episode(record, committed + 1)
                committed += 1
        for call, arguments in ((record.poll, ()), (record.write, ("event", 0, {})), (record.commit, (1,)), (record.close, ())):
            with pytest.raises(Fault) as again:
                call(*arguments)
            assert str(again.value) == str(error.value)
        timer.join()
        repair_when_ended(path)
        check_episodes(path, committed)


def test_an_idle_recorder_that_dies_is_found(record):
    record.poll()
    os.kill(record.pid, signal.SIGKILL)
    record._child.wait(60)
    with pytest.raises(Fault, match=r"has ended, killed by signal 9"):
        record.poll()


def test_signals_to_the_group_do_not_stop_it(path, record):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(record.pid, number)
    record_episode(record, 0)
    record.close()
    check_episodes(path, 0)


FORKS = """
import os, sys, time
from embodied.deploy.recorder import Recorder
record = Recorder(sys.argv[1], {})
if os.fork() == 0:  # keeps the socket open
    time.sleep(600)
    os._exit(0)
record.write("event", 0, {"text": "the last"})
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_of_a_killed_control_process_does_not_keep_it(path):
    process = subprocess.Popen([sys.executable, "-c", FORKS, str(path)], start_new_session=True)
    try:
        assert process.wait(60) == -signal.SIGKILL
        assert repair_when_ended(path).torn is None
        assert [item.data.get("text") for item in read(path)][1:] == ["the last"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)


# disks that are full or stand still


def test_a_full_disk_is_a_fault(path, record):
    record_episode(record, 0)
    room = path.stat().st_size + 5000
    resource.prlimit(record.pid, resource.RLIMIT_FSIZE, (room, room))
    written = 0
    with pytest.raises(Fault, match="cannot write: File too large; what is on the disk is kept"):
        while True:
            record.write("event", written, {"text": "x" * 100})
            written += 1
            time.sleep(0.001)
    with pytest.raises(Fault, match="File too large"):
        record.close()
    assert repair_when_ended(path).torn is None
    assert path.stat().st_size <= room
    check_episodes(path, 0)
    events = [item.time_ns for item in read(path) if item.kind == "event"]
    assert events == list(range(len(events)))
    assert 0 < len(events) <= written


def test_no_space_is_reported_by_name():
    file = os.open("/dev/full", os.O_RDWR)
    with child(file, ("-m", "embodied.deploy.recorder")) as (link, process):
        link.sendall(frames.encode("event", 0, {}))
        assert link.recv(100) == b"error No space left on device\n"
        assert link.recv(100) == b""
    os.close(file)
    assert process.returncode == 1


def test_a_recorder_that_stands_still_is_a_fault_and_loses_nothing(path, record):
    os.kill(record.pid, signal.SIGSTOP)
    with pytest.raises(Fault, match=r"has not synced in 0\.1 s"):
        record.write("event", 0, {"text": ""})
        record.commit(0.1)
    taken = 1
    with pytest.raises(Fault, match="does not keep up"):
        while True:
            record.write("event", taken, {"text": "x" * 10_000})
            taken += 1
    with pytest.raises(Fault, match="does not keep up"):  # no record follows one that was not taken
        record.write("event", taken, {})
    os.kill(record.pid, signal.SIGCONT)
    with pytest.raises(Fault, match="does not keep up"):
        record.close()
    assert taken > 200
    assert [item.time_ns for item in read(path)][1:] == list(range(taken))


def test_records_that_do_not_reach_the_disk_are_a_fault(path, record, monkeypatch):
    monkeypatch.setattr(recorder, "STALL_S", 0.05)
    time.sleep(0.1)
    record.poll()  # nothing is due
    os.kill(record.pid, signal.SIGSTOP)
    record.write("event", 0, {})
    time.sleep(0.1)
    with pytest.raises(Fault, match="does not keep up"):
        record.poll()
    os.kill(record.pid, signal.SIGCONT)
    with pytest.raises(Fault, match="does not keep up"):
        record.close()
    assert len(list(read(path))) == 2
