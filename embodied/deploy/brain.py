"""The policy's own process: a policy that crashes, hangs or crawls must not take the control process with it."""

from __future__ import annotations

import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embodied.spec.errors import Fault

_HEAD = struct.Struct("<QI")  # number of the request, microseconds that the policy took
READY = b"ready"
_DIED = "the policy's process has died: see its message above; start the runner again"


class Brain:
    """A policy in a child process, asked with a number so that a late answer is never taken for a new one.

    Args:
        policy: an exported ONNX file.
        priority: real-time priority to ask for; 0: none.
        start_s: how long it may take to be ready.

    Raises:
        Fault: the child does not become ready.
    """

    def __init__(self, policy: Path, priority: int = 0, start_s: float = 30.0) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "embodied.deploy.brain", str(policy), str(theirs.fileno()), str(priority)]
        self._child = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self.pid = self._child.pid
        self.late = 0
        self._asked = 0
        ready = select.select([self._ours], [], [], start_s)[0] and self._ours.recv(64)
        if ready != READY:
            self.close()
            raise Fault(f"the policy's process did not become ready in {start_s:g} s: look at its message above")
        self._ours.setblocking(False)

    def ask(self, obs: NDArray[np.float32]) -> None:
        """Send an observation [1, D]. A full buffer (a policy that reads nothing) shows as a missing answer."""
        self._asked += 1
        try:
            self._ours.send(_HEAD.pack(self._asked, 0) + obs.astype("<f4").tobytes())
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise Fault(_DIED) from error

    def answer(self, deadline: float) -> tuple[NDArray[np.float32], int] | None:
        """The action [1, n] for the last question and the microseconds it took; None if it is not there by `deadline`."""
        while True:
            rest = deadline - time.monotonic()
            if not select.select([self._ours], [], [], max(rest, 0.0))[0]:
                return None
            try:
                data = self._ours.recv(65536)
            except ConnectionError:
                data = b""
            if not data:
                raise Fault(_DIED)
            number, took_us = _HEAD.unpack_from(data)
            if number == self._asked:
                return np.frombuffer(data[_HEAD.size :], "<f4").astype(np.float32)[None], took_us
            self.late += 1

    def close(self) -> None:
        """End the child."""
        self._ours.close()
        self._child.terminate()
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main(argv: list[str]) -> int:
    """The child: answers observations until the other end is closed."""
    from embodied.deploy.artifact import PolicyArtifact
    from embodied.deploy.pace import realtime

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the runner ends this process in its time
    policy = PolicyArtifact.load(Path(argv[0]))
    with socket.socket(fileno=int(argv[1])) as theirs:
        policy.act(np.zeros((1, policy.spec.obs_size), np.float32))  # the first inference allocates
        if int(argv[2]):
            realtime(int(argv[2]))
        theirs.send(READY)
        while data := theirs.recv(65536):
            began = time.perf_counter_ns()
            number, _ = _HEAD.unpack_from(data)
            action = policy.act(np.frombuffer(data[_HEAD.size :], "<f4").astype(np.float32)[None])
            took_us = (time.perf_counter_ns() - began) // 1000
            theirs.send(_HEAD.pack(number, took_us) + action.astype("<f4").tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
