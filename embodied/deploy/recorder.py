"""The recorder: a process of its own that writes the journal, so that a slow disk never makes the robot wait.

`Recorder` is the handle to it in the control process; run as a module, this is the process. What goes over the socket
between them are the journal's frames as they are, and requests to sync; what comes back are lines of text: "ready",
"synced" with the number of bytes that are on the disk, "error" with what the system said.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodied.deploy.frames import HEADER, append_whole, encode
from embodied.deploy.journal import Writer
from embodied.spec.errors import Fault

BUFFER = 1 << 21  # bytes that may wait for the recorder, beside those that the system keeps; the largest record fits
SYNC = HEADER.pack(b"SYNC", 0, 0)
SYNC_S = 1.0
STALL_S = 10.0  # a record that is so long not on the disk: memory cards take seconds, now and then
START_S = 20.0  # an interpreter starts in 0.1 s, on a cold and busy disk in seconds
CLOSE_S = 10.0
END_S = 1.0


class Recorder:
    """Writes a new journal by a process of its own; no call but `commit` and `close` waits for it.

    Args:
        path: the journal to write; its folder exists.
        meta: what is true of the whole journal, as for `Writer`.

    Raises:
        BadInput: as `Writer`: the file exists, or cannot be made.
        Fault: the disk is full, or the process does not start.
    """

    def __init__(self, path: Path, meta: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._pending = bytearray()  # accepted, not yet taken by the system
        self._inbox = b""
        self._ready = False
        self._accepted, self._synced = 0, 0  # bytes
        self._since = 0.0  # when it was last not behind, or got further
        self._failure = ""
        file = Writer(self.path, meta)  # here, so that what is wrong with the path is said at once
        self._socket, theirs = socket.socketpair()
        # what the system keeps outlives a control process that is killed
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._socket.setblocking(False)
        descriptors = theirs.fileno(), file.fileno()
        command = [sys.executable, "-m", "embodied.deploy.recorder", *map(str, descriptors)]
        self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)
        theirs.close()
        file.close()
        try:
            self._wait(START_S, lambda: self._ready, "has not started")
        except BaseException:  # Ctrl-C as well: no recorder process and no empty journal may stay behind
            self._socket.close()
            self._child.kill()
            self._child.wait()
            self.path.unlink()
            raise

    @property
    def pid(self) -> int:
        """The process that writes."""
        return self._child.pid

    def write(self, kind: str, time_ns: int, data: Mapping[str, Any]) -> None:
        """Hand over a record; arguments are those of `embodied.deploy.frames.encode`. Does not wait.

        Raises:
            BadInput: data that cannot be written.
            Fault: the recorder has died, has reported an error, or has not kept up, and this record is not taken. Every
                later call raises it too: the journal has no hole.
        """
        frame = encode(kind, time_ns, data)
        self.poll()
        if len(self._pending) + len(frame) > BUFFER:
            self._stalled()
        if self._accepted == self._synced:
            self._since = time.monotonic()
        self._accepted += len(frame)
        self._pending += frame
        self._send()

    def poll(self) -> None:
        """Raise a Fault if one of `write` is due. Does not wait."""
        if self._failure:
            raise Fault(self._failure)
        self._send()
        self._receive()
        if self._accepted > self._synced and time.monotonic() - self._since > STALL_S:
            self._stalled()

    def commit(self, timeout_s: float) -> None:
        """Return when everything written is on the disk.

        Raises:
            Fault: as `write`, or it is not within `timeout_s`.
        """
        self.poll()
        self._commit(timeout_s)

    def close(self) -> None:
        """Commit and end the recorder.

        Raises:
            Fault: not everything that was written is on the disk, or a record was not taken before.
        """
        if self._socket.fileno() < 0:
            return
        try:
            self._commit(CLOSE_S)
            if self._failure:
                raise Fault(self._failure)
        finally:
            self._socket.close()
            # one that stands still ends when it can: whether all is on the disk is known by now
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)

    def _commit(self, timeout_s: float) -> None:
        if self._synced < self._accepted:
            self._pending += SYNC
        self._wait(timeout_s, lambda: self._synced >= self._accepted, "has not synced")

    def _wait(self, timeout_s: float, done: Callable[[], bool], what: str) -> None:
        """Send and receive until `done`."""
        deadline = time.monotonic() + timeout_s
        poller = select.poll()
        while True:
            self._send()
            self._receive()
            if done():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise Fault(f"{self.path}: its recorder (process {self.pid}) {what} in {timeout_s:g} s")
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._pending else 0))
            poller.poll(1e3 * left)

    def _send(self) -> None:
        while self._pending:
            try:
                sent = self._socket.send(self._pending)
            except BlockingIOError:
                return
            except ConnectionError:
                self._receive()  # raises, and says why
                return
            del self._pending[:sent]

    def _receive(self) -> None:
        """Take in what the recorder says, until there is no more."""
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                code = self._child.poll()
                how = "" if code is None else f", killed by signal {-code}" if code < 0 else f" with exit code {code}"
                self._fail(f"its recorder (process {self.pid}) has ended{how}")
            *lines, self._inbox = (self._inbox + data).split(b"\n")
            for line in lines:
                word, _, rest = line.decode().partition(" ")
                if word == "ready":
                    self._ready = True
                elif word == "synced":
                    self._synced, self._since = int(rest), time.monotonic()
                else:
                    self._fail(f"its recorder cannot write: {rest}; what is on the disk is kept")

    def _stalled(self) -> None:
        self._fail(f"its recorder (process {self.pid}) does not keep up: the disk is too slow or stands still")

    def _fail(self, what: str) -> None:
        self._failure = self._failure or f"{self.path}: {what}"
        raise Fault(self._failure)


class _Parent:
    """The recorder's end of the socket. It tells what happened to a control process that may be gone already."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.pid = link, os.getppid()
        self.poller = select.poll()
        self.poller.register(link, select.POLLIN)

    def say(self, text: str) -> None:
        # where nobody is left to hear it, what it sent before is still to be written
        with contextlib.suppress(ConnectionError):
            self.link.sendall(text.encode() + b"\n")

    def read(self, timeout_s: float) -> bytes | None:
        """What it sent; None if that is nothing within the time; empty when it is gone and all it sent was read."""
        if not self.poller.poll(1e3 * timeout_s):
            # children that it forked may keep its end of the socket open
            return None if os.getppid() == self.pid else b""
        try:
            return self.link.recv(1 << 16)
        except ConnectionResetError:
            return b""


class _Journal:
    """The journal's open file, and how many of the bytes taken are written and on the disk."""

    def __init__(self, fd: int, parent: _Parent) -> None:
        self.fd, self.parent = fd, parent
        self.written, self.synced = 0, 0

    def take(self, buffer: bytearray) -> None:
        """Write the whole frames at the buffer's beginning and do what requests among them ask; they are taken off."""
        while len(buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(buffer)[1]
            if len(buffer) < end:
                return
            if buffer.startswith(SYNC):
                self.sync()
            else:
                append_whole(self.fd, buffer[:end])
                self.written += end
            del buffer[:end]

    def sync(self) -> None:
        """Bring everything to the disk and say so, if there is anything."""
        if self.synced < self.written:
            os.fsync(self.fd)
            self.synced = self.written
            self.parent.say(f"synced {self.synced}")


def _record(parent: _Parent, journal: _Journal) -> None:
    """Write what the parent sends until it is gone; half a frame that it could not finish is not written."""
    buffer = bytearray()
    due = time.monotonic() + SYNC_S
    while (data := parent.read(max(0.0, due - time.monotonic()))) != b"":
        if data:
            buffer += data
            journal.take(buffer)
        if time.monotonic() >= due:
            journal.sync()
            due = time.monotonic() + SYNC_S
    journal.sync()


def main(link: int, file: int) -> int:
    """The recorder's process: descriptors of its socket and of the journal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: it ends when its parent has said its last
    parent = _Parent(socket.socket(fileno=link))
    journal = _Journal(file, parent)
    parent.say("ready")
    try:
        _record(parent, journal)
    except OSError as error:
        parent.say(f"error {error.strerror}")
        with contextlib.suppress(OSError):  # that it cannot has been said
            os.fsync(file)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
