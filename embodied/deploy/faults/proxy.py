"""A line between a runner and a robot process that can be made bad: drops, delays, repeats, damages, holds back, rewrites.

Both ends are on loopback. What a bad cable or switch would do is drawn from a seed, by a generator for each direction; what a
broken sensor would say is written into states, whose checksum is then right. Every fault is in force from one moment on the
monotonic clock to another, and what it did is counted.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from embodied.deploy import wire
from embodied.deploy.pace import realtime
from embodied.deploy.wire import Kind, Malformed, Packet, State

Address = tuple[str, int]
Rewrite = Callable[[State], State]
IDLE_S = 0.2  # longest sleep of the thread; a wake-up ends it
PRIORITY = 15  # where it may be had: between a robot's and a runner's, as a network card would be served


@dataclass(frozen=True)
class Line:
    """What is done to the datagrams of one direction.

    Attributes:
        drop: probability of being lost.
        delay_s: shortest and longest delay [s], drawn uniformly for each: what is delayed by more is overtaken.
        duplicate: probability of arriving twice, the second time after another delay.
        corrupt: probability that one byte is changed to another value.
        hold: nothing passes; all of it follows at once when the fault ends.
        repeat: what arrives is the last one from before the fault: "whole" datagram, or its "payload" under a new header.
        rewrite: what a state says instead; the checksum is made right again.
        requests: whether requests and replies suffer too.
    """

    drop: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    duplicate: float = 0.0
    corrupt: float = 0.0
    hold: bool = False
    repeat: str = ""
    rewrite: Rewrite | None = None
    requests: bool = False


CLEAN = Line()


class _Direction:
    """One direction: its fault, its chance, what it remembers."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.line = rng, CLEAN
        self.last: bytes | None = None
        self.held: list[tuple[socket.socket, Address | None, bytes]] = []


class Proxy:
    """Passes datagrams between whoever sends to `port` and `robot`, in a thread of its own. A context manager.

    Args:
        robot: address of the robot process.
        seed: of everything drawn.
        key: the shared key, where there is one: rewriting needs it.
    """

    def __init__(self, robot: Address, seed: int = 0, key: bytes | None = None) -> None:
        self._robot, self._key = robot, key
        self._front = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._front.bind(("127.0.0.1", 0))
        self._front.setblocking(False)
        self.port: int = self._front.getsockname()[1]
        self.counts: Counter[str] = Counter()
        """What was done: `up dropped`, `down delayed`, ..."""
        self.description: dict[str, Any] = {}
        """What the robot said of itself, when it was first asked."""
        up, down = np.random.default_rng(seed).spawn(2)
        self._up, self._down = _Direction(up), _Direction(down)
        self._backs: dict[Address, socket.socket] = {}  # towards the robot, one for each that talks to it
        self._clients: dict[socket.socket, Address] = {}
        self._queue: list[tuple[float, int, socket.socket, Address | None, bytes]] = []
        self._order = itertools.count()
        self._poke, self._poked = socket.socketpair()
        self._lock = threading.Lock()
        self._seen = threading.Condition()
        self._state: State | None = None
        self._running = True
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._wake()
        self._thread.join()
        for one in (self._front, self._poke, self._poked, *self._backs.values()):
            one.close()

    def inject(self, up: Line = CLEAN, down: Line = CLEAN) -> int:
        """From now on `up` is done to what the robot sends and `down` to what it is sent; the moment [monotonic ns].

        What is held back is let go where the new line does not hold.
        """
        with self._lock:
            self._up.line, self._down.line = up, down
            now = time.monotonic_ns()
            for direction in (self._up, self._down):
                if not direction.line.hold:
                    for where in direction.held:
                        heapq.heappush(self._queue, (0.0, next(self._order), *where))
                    direction.held.clear()
        self._wake()
        return now

    def clear(self) -> int:
        """End every fault; the moment [monotonic ns]."""
        return self.inject()

    def await_state(self, condition: Callable[[State], bool], timeout_s: float) -> bool:
        """Wait for a state of the robot that meets the condition, as it was sent; whether one came in time."""
        deadline = time.monotonic() + timeout_s
        with self._seen:
            while True:
                rest = deadline - time.monotonic()
                if rest <= 0 or not self._seen.wait(rest):
                    return False
                assert self._state is not None
                if condition(self._state):
                    return True

    # -- the thread --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        realtime(PRIORITY)  # of this thread; without it the line is as slow as the machine is busy
        while self._running:
            with self._lock:
                rest = self._queue[0][0] - time.monotonic() if self._queue else IDLE_S
            sources = [self._front, self._poked, *self._clients]
            ready = select.select(sources, [], [], min(max(rest, 0.0), IDLE_S))[0]
            with self._lock:
                for source in ready:
                    self._take(source)
                self._deliver()

    def _take(self, source: socket.socket) -> None:
        """Everything that has arrived at a socket."""
        while True:
            try:
                data, address = source.recvfrom(65536)
            except BlockingIOError:
                return
            except ConnectionError:  # the robot's port is gone: the runner will see that nothing comes
                self.counts["unreachable"] += 1
                continue
            if source is self._poked:
                return
            if source is self._front:
                self._pass("down", self._down, data, self._back(address), None)
            else:
                self._pass("up", self._up, data, self._front, self._clients[source])

    def _back(self, client: Address) -> socket.socket:
        if client not in self._backs:
            back = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            back.connect(self._robot)
            back.setblocking(False)
            self._backs[client], self._clients[back] = back, client
        return self._backs[client]

    def _pass(self, name: str, way: _Direction, data: bytes, to: socket.socket, address: Address | None) -> None:
        """Decide what becomes of a datagram."""
        try:
            packet = wire.unpack(data, self._key)
        except Malformed:
            packet = None
        if packet is not None and name == "up":
            self._look(packet)
        stream = packet is not None and packet.kind in (Kind.STATE, Kind.COMMAND)
        line = way.line
        if not stream and not line.requests:
            line = CLEAN  # though in its turn: what was sent before it arrives before it
        if packet is not None and stream:
            data = self._altered(name, way, packet, data)
        if line.hold:
            self.counts[f"{name} held"] += 1
            way.held.append((to, address, data))
            return
        if line.drop and way.rng.random() < line.drop:
            self.counts[f"{name} dropped"] += 1
            return
        if line.corrupt and way.rng.random() < line.corrupt:
            self.counts[f"{name} corrupted"] += 1
            data = _damaged(data, way.rng)
        copies = 1
        if line.duplicate and way.rng.random() < line.duplicate:
            self.counts[f"{name} duplicated"] += 1
            copies = 2
        for _ in range(copies):
            delay = way.rng.uniform(*line.delay_s)
            if delay > 0:
                self.counts[f"{name} delayed"] += 1
            heapq.heappush(self._queue, (time.monotonic() + delay, next(self._order), to, address, data))

    def _altered(self, name: str, way: _Direction, packet: Packet, data: bytes) -> bytes:
        """A state or command as the fault makes it say; what it said before the fault is remembered."""
        line = way.line
        if line.repeat and way.last is not None:
            self.counts[f"{name} repeated"] += 1
            if line.repeat == "whole":
                return way.last
            return self._packed(packet, wire.unpack(way.last, self._key).payload)
        if line.rewrite is not None and packet.kind == Kind.STATE and self.description:
            layout = self.description["readings"]
            state = wire.unpack_state(packet.payload, layout)
            changed = line.rewrite(state)
            if changed is state:
                return data
            self.counts[f"{name} rewritten"] += 1
            return self._packed(packet, wire.pack_state(changed, layout))
        way.last = data
        return data

    def _packed(self, packet: Packet, payload: bytes) -> bytes:
        header = {name: getattr(packet, name) for name in ("spec", "session", "epoch", "age_us", "ttl_us", "sequence")}
        return wire.pack(packet.kind, payload, key=self._key, **header)

    def _look(self, packet: Packet) -> None:
        """Learn the layout of states from the robot's own description, and show states to whoever waits for one."""
        if packet.kind == Kind.REPLY and not self.description:
            self.description = wire.unpack_json(packet.payload).get("description", {})
        if packet.kind == Kind.STATE and self.description:
            with self._seen:
                self._state = wire.unpack_state(packet.payload, self.description["readings"])
                self._seen.notify_all()

    def _deliver(self) -> None:
        while self._queue and self._queue[0][0] <= time.monotonic():
            _, _, to, address, data = heapq.heappop(self._queue)
            self._send(to, address, data)

    def _send(self, to: socket.socket, address: Address | None, data: bytes) -> None:
        try:
            if address is None:
                to.send(data)
            else:
                to.sendto(data, address)
        except (BlockingIOError, ConnectionError):  # a full buffer, or an end that is gone: a network would lose it too
            self.counts["lost"] += 1

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake already
            self._poke.send(b"x")


def _damaged(data: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(len(data)))
    return data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :]


# -- what broken sensors say ---------------------------------------------------------------------------------------------


def setting(reading: str, index: int, value: float) -> Rewrite:
    """One number of a reading is `value`."""

    def rewrite(state: State) -> State:
        values = np.array(state.readings[reading], np.float32)
        values[index] = value
        return _with(state, {reading: values})

    return rewrite


def stuck(reading: str) -> Rewrite:
    """A reading keeps the value that it has when the fault begins."""
    kept: dict[str, Any] = {}

    def rewrite(state: State) -> State:
        kept.setdefault(reading, np.array(state.readings[reading]))
        return _with(state, kept)

    return rewrite


def lasting(rewrite: Rewrite, seconds: float) -> Rewrite:
    """A rewriting that ends by itself, so long after it began."""
    ends: list[float] = []

    def limited(state: State) -> State:
        if not ends:
            ends.append(time.monotonic() + seconds)
        return rewrite(state) if time.monotonic() < ends[0] else state

    return limited


def _with(state: State, readings: Mapping[str, Any]) -> State:
    return replace(state, readings={**state.readings, **readings})
