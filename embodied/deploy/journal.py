"""The journal of a robot: what happened, append-only, readable up to the last whole record whatever ended it.

A journal is a row of frames (`embodied.deploy.frames`), one a record. The first is of kind "meta" and names the format. Times
are monotonic, of capture. An episode is committed when its "episode_end" is on the disk.

Why not MCAP (tried: mcap 1.6.0 for Python, through its public API, `validate_crcs=True`): its writer's `flush()` makes every
truncation readable, but only a chunk's inside is under a checksum. 44 % of runs of chunks overwritten by zeros (lost pages)
and 5 of the 8 flips of a chunk's opcode left a hole that no error tells of; without chunks 95 % of flips passed. Its readers
that want the footer, rerun's among them, show nothing of a file whose writer was killed; it has no repair and no byte
positions, and remembers every chunk it wrote.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from embodied.deploy.frames import MAGIC, append_whole, decode, encode, read_payload
from embodied.spec.errors import BadInput, Fault

FORMAT = 1


@dataclass(frozen=True)
class Record:
    """One entry: its kind, the monotonic time of capture [ns], and its data (arrays own their memory; tuples are lists)."""

    kind: str
    time_ns: int
    data: dict[str, Any]


@dataclass(frozen=True)
class Repair:
    """What `repair` found: the journal's bytes, records, finished and unfinished episodes that stay, and what it set aside.

    `torn` is the file that holds the `torn_bytes` from the damage on; `torn_records` records in there are intact.
    """

    kept_bytes: int
    records: int
    episodes: int
    incomplete: int
    torn_bytes: int
    torn_records: int
    torn: Path | None


@dataclass
class Episode:
    """An episode: the records from its "episode_start" to its "episode_end", which is None where none was committed."""

    number: int
    start: Record
    end: Record | None = None
    ticks: list[Record] = field(default_factory=list)
    transitions: list[Record] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)


class Writer:
    """Writes a journal that does not exist yet; nothing is left at `path` if that fails. One process writes a journal.

    What `append` and `meta` take is said by `embodied.deploy.frames.encode`.

    Args:
        path: the file to write; its folder exists.
        meta: what is true of the whole journal: policy, robot, options. The format is added.

    Raises:
        BadInput: the file exists, its folder does not or may not be written to, or `meta` cannot be written.
        Fault: the disk is full.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        if "format" in meta:
            raise BadInput("the journal's meta names a format: the journal adds its own, call yours by another name")
        self.path = Path(path)
        self._trouble = f"{self.path} cannot be written, what was recorded before is kept"
        frame = encode("meta", time.monotonic_ns(), {"format": FORMAT, **meta})
        self._fd = _create(self.path)
        try:
            with _faults(self._trouble):
                append_whole(self._fd, frame)
                os.fsync(self._fd)
                _sync_folder(self.path)
        except Fault:
            self.path.unlink()
            os.close(self._fd)
            raise

    def append(self, kind: str, time_ns: int, data: Mapping[str, Any]) -> None:
        """Write a record, whole or not at all, into the system's cache; `sync` makes it survive a power cut.

        Raises:
            BadInput: data that cannot be written.
            Fault: it cannot be written now, as on a full disk.
        """
        frame = encode(kind, time_ns, data)
        with _faults(self._trouble):
            append_whole(self._fd, frame)

    def sync(self) -> None:
        """Return when everything appended is on the disk, or raise a Fault."""
        with _faults(self._trouble):
            os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close."""
        try:
            self.sync()
        finally:
            os.close(self._fd)

    def fileno(self) -> int:
        """The open file's descriptor, which holds the lock that says "being written"."""
        return self._fd


def read(path: Path, strict: bool = True) -> Iterator[Record]:
    """The records in order, the first of kind "meta".

    Args:
        path: the journal. One that is being written may end in half a record: read it with strict=False.
        strict: whether damage is an error; else reading stops there, even if intact records follow: nobody knows what is
            missing between.

    Raises:
        BadInput: no such file, not a journal, or one of another format.
        Fault: if strict: damage, with its first byte and how to repair it, or an empty file.
    """
    path = Path(path)
    with _open(path, "rb") as file:
        scan = _Scan(path, file)
        yield from scan
        end = scan.end
        damaged = file.tell() != end
        if damaged and (strict or end == 0):
            size, intact = _look_beyond(path, file, end)
            if strict:
                raise Fault(
                    f"{path} is damaged at byte {end}: {size - end} bytes cannot be trusted, {intact} intact records among "
                    f"them: `embodied deploy repair journal={path}` sets them aside"
                )
        elif end == 0 and strict:
            raise Fault(f"{path} is empty: its recorder was stopped before the first record, there is nothing to read")


def repair(path: Path) -> Repair:
    """Move everything from the first damage on into `<path>.torn` (`.torn.1` and so on if that exists); deletes nothing.

    The journal is cut only when its torn end is safe under its new name: whenever this is killed, every byte is somewhere.

    Raises:
        BadInput: no such file, not a journal, of another format, or still being written.
        Fault: no room for the copy, or a disk that fails; the journal is then as it was.
    """
    path = Path(path)
    with _open(path, "r+b") as file:
        _lock(path, file.fileno())
        scan = _Scan(path, file)
        kinds = Counter(record.kind for record in scan)
        kept = scan.end
        size, intact = _look_beyond(path, file, kept)
        torn = None
        if kept < size:
            with _faults(f"{path}: its torn end of {size - kept} bytes cannot be moved, nothing is lost"):
                torn = _set_aside(path, file, kept)
                file.truncate(kept)
                os.fsync(file.fileno())
    ends = kinds["episode_end"]
    return Repair(kept, kinds.total(), ends, kinds["episode_start"] - ends, size - kept, intact, torn)


def episodes(path: Path, strict: bool = True) -> list[Episode]:
    """The episodes in order; those whose `end` is not None are committed. Arguments and errors are those of `read`.

    Raises:
        Fault: also where an end has no start, or either has no number.
    """
    found: list[Episode] = []
    current: Episode | None = None
    for record in read(path, strict):
        match record.kind:
            case "episode_start":
                current = Episode(_number(path, record), record)
                found.append(current)
            case "episode_end":
                number = _number(path, record)
                if current is None or current.number != number:
                    running = "none is running" if current is None else f"episode {current.number} is running"
                    raise Fault(f"{path}: episode {number} ends but {running}: its recorder has a fault, the journal is kept")
                current.end, current = record, None
            case "tick" | "transition" | "event" if current is not None:
                {"tick": current.ticks, "transition": current.transitions, "event": current.events}[record.kind].append(record)
    return found


class _Scan:
    """Iterates the intact records from the file's beginning; `end` is the byte after the last one.

    The file's position is then `end` too, unless there is damage.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file, self.end = path, file, 0

    def __iter__(self) -> Iterator[Record]:
        while (payload := read_payload(self.file)) is not None:
            record = _decode(self.path, self.end, payload)
            if self.end == 0:
                _check_meta(self.path, record)
            self.end = self.file.tell()
            yield record


def _look_beyond(path: Path, file: IO[bytes], start: int) -> tuple[int, int]:
    """The file's size and the number of intact frames beyond byte `start`, found by their magic."""
    size = os.fstat(file.fileno()).st_size
    count = 0
    if start < size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            at = content.find(MAGIC, start)
            while at >= 0:
                file.seek(at)
                intact = read_payload(file) is not None
                count += intact
                at = content.find(MAGIC, file.tell() if intact else at + 1)
            if start == 0 and not count and not MAGIC.startswith(content[: len(MAGIC)]):
                raise BadInput(f"{path} is not a journal: give the path of one")
    return size, count


def _set_aside(path: Path, file: IO[bytes], start: int) -> Path:
    """Copy the bytes from `start` on to a new file, safely on the disk before it has its name."""
    partial = path.with_name(path.name + ".torn.partial")
    try:
        with partial.open("wb") as copy:
            file.seek(start)
            shutil.copyfileobj(file, copy)
            copy.flush()
            os.fsync(copy.fileno())
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    names = itertools.chain([".torn"], (f".torn.{i}" for i in itertools.count(1)))
    torn = next(name for ending in names if not (name := path.with_name(path.name + ending)).exists())
    partial.rename(torn)
    _sync_folder(path)
    return torn


@contextlib.contextmanager
def _faults(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Fault(f"{what}: {error.strerror}") from error


def _open(path: Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise BadInput(f"{path} cannot be opened: {error.strerror}: give the path of a journal") from None


def _create(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise BadInput(f"{path} exists: a journal is never written over or continued, choose another path") from None
    except OSError as error:
        raise BadInput(f"{path} cannot be made: {error.strerror}: choose a folder that exists and may be written to") from None
    _lock(path, fd)
    return fd


def _lock(path: Path, fd: int) -> None:
    """Hold the journal until the descriptor is closed, by whoever has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BadInput(f"{path} is being written: stop its runner first") from None


def _sync_folder(path: Path) -> None:
    """Make a new name survive a power cut."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_meta(path: Path, record: Record) -> None:
    if record.kind != "meta":
        raise BadInput(f"{path} is not a whole journal: it begins with a record of kind '{record.kind}', not 'meta'")
    if record.data.get("format") != FORMAT:
        raise BadInput(
            f"{path} has format {record.data.get('format')}, expected {FORMAT}: read it with the version that wrote it"
        )


def _decode(path: Path, at: int, payload: bytes) -> Record:
    try:
        return Record(*decode(payload))
    except ValueError as error:
        raise Fault(
            f"{path}: the record at byte {at} is whole but not understood: {error}: did `embodied` write it?"
        ) from error


def _number(path: Path, record: Record) -> int:
    number = record.data.get("episode")
    if not isinstance(number, int):
        raise Fault(f"{path}: a record of kind '{record.kind}' has no episode number: its recorder has a fault")
    return number
