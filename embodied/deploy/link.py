"""The runner's end of the wire: one robot, held by us alone.

Every state is given the latest age that it can have: datagrams wait in a buffer while this process does not run, so what
counts is when the buffer was last seen empty, not when the datagram was read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.deploy import wire
from embodied.deploy.wire import Kind, Malformed, State
from embodied.spec.errors import BadInput, Fault
from embodied.spec.robot import ArmSpec, RobotSpec

DEFAULT = "127.0.0.1:47000"
Readings = dict[str, NDArray[np.float32]]


ALIVE = ("tcp_pos", "force")
"""Readings of sensors that have noise: each changes with every sample, or the sensor is stuck, whatever the stamps say."""


@dataclass(frozen=True)
class Arrived:
    """A state, when it can have been true at the earliest, and when each of `ALIVE` last changed [monotonic ns]."""

    state: State
    true_ns: int
    changed_ns: tuple[int, ...]

    def age_us(self, now_ns: int) -> int:
        """How old the readings may be [us]: a value that does not change in a single bit is as old as its last change."""
        return max(0, now_ns - min(self.true_ns, *self.changed_ns)) // 1000

    def stuck(self) -> str:
        """The sensors whose value has not changed with the last state, by name; empty if all have."""
        return ", ".join(name for name, at in zip(ALIVE, self.changed_ns, strict=True) if at < self.true_ns)


class Link:
    """A connection to the robot process at `address`.

    Args:
        address: (host, port); loopback, or with a key.
        key: the shared key, None on loopback.

    Raises:
        BadInput: not loopback and no key.
    """

    def __init__(self, address: tuple[str, int], key: bytes | None = None) -> None:
        wire.check_exposed(address[0], key)
        self._key = key
        self._name = f"{address[0]}:{address[1]}"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.connect(address)
        self._socket.setblocking(False)
        self.dropped: Counter[str] = Counter()
        self.latest: Arrived | None = None
        self.session = 0
        self._hash = wire.NO_SPEC
        self._layout: dict[str, int] = {}
        self._commands: dict[str, int] = {}
        self._order: list[int] | None = None
        self.sequence, self._states = 0, 0
        self._empty_ns = time.monotonic_ns()
        self._replies: dict[int, dict[str, Any]] = {}
        self._request_id = int.from_bytes(os.urandom(3), "little") << 32

    # -- outside of motion: requests that wait for their answer ------------------------------------------------------

    def hello(self, timeout_s: float = 2.0) -> dict[str, Any]:
        """What the robot says of itself: `robot`, `readings`, `commands`, `watchdog_s`, ...

        Raises:
            Fault: nobody answers, or it speaks another version of the wire, or it is no arm.
        """
        answer = self.request("hello", timeout_s=timeout_s)
        if answer["wire"] != wire.VERSION:
            raise Fault(
                f"the robot at {self._name} speaks wire version {answer['wire']}, this is {wire.VERSION}: update the older"
            )
        description: dict[str, Any] = answer["description"]
        self._hash = wire.spec_hash(description)
        self._layout, self._commands = description["readings"], description["commands"]
        robot = RobotSpec.from_dict(description["robot"])
        if not isinstance(robot, ArmSpec):
            raise Fault(f"the robot at {self._name}, '{robot.name}', is no arm: expected one")
        self.robot = robot
        self.status: dict[str, Any] = {name: answer[name] for name in ("status", "reason", "holder")}
        return description

    def acquire(self, name: str, joints: tuple[str, ...]) -> None:
        """Become the only one whom the robot obeys; joint readings then come in the order of `joints`.

        Raises:
            Fault: another holds the robot, or its emergency stop is latched.
        """
        theirs = list(self.robot.joint_names)
        order = [theirs.index(joint) for joint in joints]
        self._order = None if order == list(range(len(order))) else order
        self.session = self.request("acquire", name=name)["session"]
        self._states = 0

    def request(self, verb: str, timeout_s: float = 2.0, **fields: Any) -> dict[str, Any]:
        """Ask, repeating until answered; states that arrive meanwhile are taken in.

        Raises:
            Fault: the robot refuses, or does not answer in time.
        """
        self._request_id += 1
        number = self._request_id
        document = wire.pack_json({"verb": verb, "id": number, "session": self.session, **fields})
        deadline = time.monotonic() + timeout_s
        while number not in self._replies:
            if time.monotonic() >= deadline:
                raise Fault(
                    f"no answer from a robot at {self._name} in {timeout_s:g} s: is it running? (`embodied deploy sim`)"
                )
            self._transmit(wire.pack(Kind.REQUEST, document, self._hash, key=self._key))
            again = min(deadline, time.monotonic() + 0.2)
            while number not in self._replies and time.monotonic() < again:
                self.wait_until(again, number)
        answer = self._replies.pop(number)
        if "error" in answer:
            raise Fault(f"{verb}: {answer['error']}")
        return answer

    def release(self) -> None:
        """Let the robot go; it keeps its pose. A robot that no longer answers has stopped by itself."""
        if self.session:
            with contextlib.suppress(Fault):
                self.request("release", timeout_s=0.5)
            self.session = 0

    def close(self) -> None:
        """Release, and close the socket."""
        self.release()
        self._socket.close()

    # -- in motion ---------------------------------------------------------------------------------------------------

    def send(self, pos: Any, quat: Any, epoch: int, ttl_s: float) -> bool:
        """One command, valid for `ttl_s`; False if the robot's port is gone."""
        self.sequence += 1
        payload = wire.pack_arrays({"target_pos": pos, "target_quat": quat}, self._commands)
        return self._transmit(
            wire.pack(
                Kind.COMMAND,
                payload,
                self._hash,
                self.session,
                epoch,
                ttl_us=int(1e6 * ttl_s),
                sequence=self.sequence,
                key=self._key,
            )
        )

    def wait_until(self, deadline: float, reply: int | None = None) -> None:
        """Take in what arrives until `deadline` (time.monotonic), or until the reply of that number is there."""
        while True:
            rest = deadline - time.monotonic()
            if rest > 0:
                select.select([self._socket], [], [], rest)
            self._drain()
            if rest <= 0 or (reply is not None and reply in self._replies):
                return

    def readings(self) -> Readings:
        """The latest readings as a batch of one, [1, n] each, joints in the order asked for."""
        assert self.latest is not None
        return {name: value[None] for name, value in self.latest.state.readings.items()}

    def _drain(self) -> None:
        while True:
            since = self._empty_ns
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                self._empty_ns = time.monotonic_ns()
                return
            except ConnectionError:  # nobody listens there: silence will tell
                self.dropped["unreachable"] += 1
                self._empty_ns = time.monotonic_ns()
                return
            try:
                packet = wire.unpack(data, self._key)
                if packet.kind == Kind.REPLY:
                    document = wire.unpack_json(packet.payload)
                    if document.get("id") == self._request_id:
                        self._replies[self._request_id] = document
                elif packet.kind == Kind.STATE:
                    self._take(packet, since)
                else:
                    raise Malformed("kind")
            except Malformed as error:
                self.dropped[str(error)] += 1

    def _take(self, packet: wire.Packet, since_ns: int) -> None:
        if packet.spec != self._hash:
            raise Malformed("spec")
        if packet.session != self.session:
            raise Malformed("session")
        if packet.sequence <= self._states:
            raise Malformed("sequence")
        state = wire.unpack_state(packet.payload, self._layout)
        self._states = packet.sequence
        if self._order is not None:
            for name in ("joint_pos", "joint_vel"):
                state.readings[name] = state.readings[name][self._order]
        true_ns = since_ns - 1000 * packet.age_us
        before = self.latest
        changed = (true_ns,) * len(ALIVE)
        if before is not None and before.state.session == state.session:
            pairs = [(state.readings[name], before.state.readings[name]) for name in ALIVE]
            old = before.changed_ns
            changed = tuple(old[i] if np.array_equal(now, then) else true_ns for i, (now, then) in enumerate(pairs))
        self.latest = Arrived(state, true_ns, changed)

    def _transmit(self, data: bytes) -> bool:
        try:
            self._socket.send(data)
        except BlockingIOError:
            self.dropped["not sent"] += 1
        except ConnectionError:
            self.dropped["unreachable"] += 1
            return False
        return True


def connect(robot: str, key_file: str | None) -> Link:
    """A link to the robot process at `host:port`, with the shared key in a file; nothing has been said yet.

    Raises:
        BadInput: no address, no usable key, or an address that needs one.
    """
    return Link(wire.address_of(robot), read_key(key_file))


def read_key(path: str | None) -> bytes | None:
    """The shared key in a file, None if none is given.

    Raises:
        BadInput: it cannot be read, or is shorter than 16 bytes.
    """
    if path is None:
        return None
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise BadInput(f"key_file={path} cannot be read: {error.strerror}") from error
    if len(key) < 16:
        raise BadInput(f"key_file={path} holds {len(key)} bytes: expected at least 16, such as `openssl rand -hex 32` makes")
    return key
