"""The robot's own side of the bridge: whoever commands it, it stops by itself, and it obeys one master at a time.

`Server` gives a `Body` (embodied.deploy.body) the wire, a lease, a watchdog, limits of its own and a latched emergency stop.
Nothing here trusts the runner on the other side.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections import Counter, OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodied.deploy import wire
from embodied.deploy.body import Body, joint_outside, jumps, refusal
from embodied.deploy.journal import Writer
from embodied.deploy.wire import Kind, Malformed, Packet, Reason, Status
from embodied.spec.errors import BadInput, Fault

LEASE_S = 2.0  # a holder that has been silent for so long may be replaced
OPERATOR_VERBS = ("hello", "estop", "clear", "status")  # need no lease


@dataclass(frozen=True)
class ServerOptions:
    """Where and how a robot process listens."""

    host: str = "127.0.0.1"
    port: int = 47000
    publish_every: int = 2  # steps of the body between states
    watchdog_s: float = 0.1  # longest life of a command
    lockstep: bool = False  # time passes only with commands: for tests
    key: bytes | None = None


@dataclass
class _Lease:
    session: int
    name: str
    address: Any
    heard: float
    epoch: int = 0
    burnt: int = -1  # commands up to this epoch are refused: the robot had to stop by itself
    sequence: int = 0
    states: int = 0
    reply: OrderedDict[int, dict[str, Any]] = field(default_factory=OrderedDict)


class Server:
    """Serves one `Body`.

    Args:
        body: the robot proper.
        options: address, watchdog.
        latch: file that exists while the emergency stop is latched: it outlives the process.
        log: where commands, refusals and changes of status go, with this process's clock; None: nowhere.

    Raises:
        BadInput: the port is taken, or not loopback without a key.
    """

    def __init__(self, body: Body, options: ServerOptions, latch: Path, log: Writer | None = None) -> None:
        wire.check_exposed(options.host, options.key)
        self.body, self.options, self.latch, self.log = body, options, latch, log
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.socket.bind((options.host, options.port))
        except OSError as error:
            self.socket.close()
            raise BadInput(
                f"{options.host}:{options.port} cannot be listened on ({error.strerror}): another robot process may "
                "have it, choose another port="
            ) from error
        self.description = {
            "robot": json.loads(json.dumps(asdict(body.spec))),
            "readings": dict(body.layout),
            "commands": {"target_pos": 3, "target_quat": 4},
            "watchdog_s": options.watchdog_s,
            "state_hz": 1.0 / (body.dt * options.publish_every),
            "lockstep": options.lockstep,
        }
        self.hash = wire.spec_hash(self.description)
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]
        self.refused: Counter[str] = Counter()
        self.episode = 0
        self.status, self.reason = (Status.ESTOP, Reason.OPERATOR) if latch.exists() else (Status.HOLDING, Reason.NONE)
        self._lease: _Lease | None = None
        self._deadline = float("inf")
        self._followed_at = -float("inf")
        self._target: tuple[Any, Any] | None = None
        self._steps_pressed = 0
        self._empty = time.monotonic()  # when the socket's buffer was last seen empty
        self._running = True

    # -- the loop ----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run until `stop`."""
        if self.options.lockstep:
            while self._running:
                select.select([self.socket], [], [], 0.2)
                self._receive()
            return
        due, count = time.monotonic(), 0
        while self._running:
            self._receive()
            now = time.monotonic()
            if self.status == Status.FOLLOWING and now > self._deadline:
                self._stop(Reason.WATCHDOG, f"no command for {1e3 * (now - self._followed_at):.0f} ms")
            self._advance()
            count += 1
            if count % self.options.publish_every == 0:
                self._check_measured()
                self._publish()
            due += self.body.dt
            rest = due - time.monotonic()
            if rest > 0:
                # wakes for a datagram, which must not wait for the next step to be heard
                while rest > 0 and select.select([self.socket], [], [], rest)[0]:
                    self._receive()
                    rest = due - time.monotonic()
            elif rest < -0.1:  # preparing a scene, or a machine that slept: time that is lost is not caught up
                due = time.monotonic()

    def stop(self) -> None:
        """End `serve` after the present step."""
        self._running = False

    def close(self) -> None:
        """Give the port back."""
        self.socket.close()

    def _advance(self) -> None:
        broken = self.body.step()
        if broken:
            self._stop(Reason.FAULT, broken)

    def _check_measured(self) -> None:
        """The robot's own limits, of what it measures."""
        if self.status != Status.FOLLOWING:
            return
        readings = self.body.read()
        motion = self.body.spec.motion
        force, torque = (float(np.linalg.norm(readings[name])) for name in ("force", "torque"))
        self._steps_pressed = self._steps_pressed + 1 if force > motion.wrench[0] or torque > motion.wrench[1] else 0
        if self._steps_pressed * self.body.dt * self.options.publish_every > motion.press_s:
            self._stop(Reason.CONTACT, f"{force:.0f} N, {torque:.1f} N m for {motion.press_s:g} s, limits {motion.wrench}")
        outside = joint_outside(self.body.spec, readings["joint_pos"])
        if outside:
            self._stop(Reason.JOINT, outside)

    def _publish(self) -> None:
        readings = self.body.read()
        lease = self._lease
        if self.log is not None:
            names = ("target_pos", "target_quat", "tcp_pos", "tcp_linvel", "tcp_angvel", "force")
            self._note("motion", **{name: np.asarray(readings[name], np.float32) for name in names})
        if lease is None:
            return
        state = wire.State(self.status, self.reason, lease.session, self.episode, lease.sequence, readings)
        lease.states += 1
        payload = wire.pack_state(state, self.body.layout)
        self._send(Kind.STATE, payload, lease.address, session=lease.session, epoch=lease.epoch, sequence=lease.states)

    # -- what arrives ------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while True:
            since = self._empty
            try:
                data, address = self.socket.recvfrom(65536)
            except BlockingIOError:
                self._empty = time.monotonic()
                return
            except ConnectionError:  # the port of a holder that died answers so
                continue
            try:
                packet = wire.unpack(data, self.options.key)
                if packet.kind == Kind.REQUEST:
                    self._answer(packet, address)
                elif packet.kind == Kind.COMMAND:
                    self._command(packet, since)
                else:
                    raise Malformed("kind")
            except Malformed as error:
                self.refused[str(error)] += 1

    def _command(self, packet: Packet, since: float) -> None:
        """Follow a command, or say why not. It may have waited in the buffer from `since` on, while we stood still."""
        lease = self._lease
        if packet.spec != self.hash:
            raise Malformed("spec")
        if lease is None or packet.session != lease.session:
            raise Malformed("session")
        if packet.sequence <= lease.sequence:
            raise Malformed("sequence")
        if packet.epoch < lease.epoch or packet.epoch <= lease.burnt:
            raise Malformed("epoch")
        now = time.monotonic()
        waited = 0.0 if self.options.lockstep else now - since
        life = min(packet.ttl_us / 1e6, self.options.watchdog_s) - packet.age_us / 1e6 - waited
        if life <= 0:
            raise Malformed("expired")
        if self.status == Status.ESTOP:
            raise Malformed("estop")
        target = wire.unpack_arrays(packet.payload, self.description["commands"])
        pos, quat = target["target_pos"].astype(float), target["target_quat"].astype(float)
        kept = self.body.read() if self._target is None else None
        before = self._target if kept is None else (kept["target_pos"], kept["target_quat"])
        if self.status == Status.STOPPED and jumps(self.body.spec, pos, quat, before):
            raise Malformed("jump")  # its sender has not seen yet where this robot has stopped
        lease.heard, lease.epoch, lease.sequence = now, packet.epoch, packet.sequence
        elapsed = min(max(now - self._followed_at, self.body.spec.control_dt), self.options.watchdog_s)
        reason, detail = refusal(self.body.spec, pos, quat, before, elapsed)
        self._note(
            "command", session=lease.session, epoch=packet.epoch, sequence=packet.sequence, pos=pos, quat=quat, refused=detail
        )
        if reason != Reason.NONE:
            self._stop(reason, detail)
            raise Malformed(reason.name.lower())
        self.body.follow(pos, quat)
        self._target, self._followed_at, self._deadline = (pos, quat), now, now + life
        if self.status != Status.FOLLOWING:
            self._set(Status.FOLLOWING, Reason.NONE, "")
        if self.options.lockstep:
            for _ in range(self.body.spec.substeps):
                self._advance()
            self._check_measured()
            self._publish()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _answer(self, packet: Packet, address: Any) -> None:
        request = wire.unpack_json(packet.payload)
        verb, number = request.get("verb"), request.get("id")
        if not isinstance(number, int):
            raise Malformed("id")
        lease = self._lease
        mine = lease is not None and request.get("session") == lease.session
        # `acquire` knows no session yet: repeated by a network or by its sender, it must not begin another
        again = lease is not None and verb == "acquire" and address == lease.address and number in lease.reply
        if lease is not None and (mine or again):
            lease.heard = time.monotonic()
            if number in lease.reply:  # our answer was lost: the same again, without doing it again
                self._reply(lease.reply[number], address)
                return
        handler = getattr(self, f"_on_{verb}", None) if isinstance(verb, str) else None
        if handler is None:
            answer: dict[str, Any] = {"error": f"unknown request '{verb}'"}
        elif verb not in (*OPERATOR_VERBS, "acquire") and not mine:
            answer = {"error": "the robot is not held by you: acquire it first"}
        else:
            answer = handler(request, address)
        answer["id"] = number
        if self._lease is not None and (mine or verb == "acquire"):
            self._lease.reply[number] = answer
            while len(self._lease.reply) > 16:
                self._lease.reply.popitem(last=False)
        self._reply(answer, address)

    def _on_hello(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        return {"description": self.description, "wire": wire.VERSION} | self._on_status(request, address)

    def _on_status(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        holder = None if self._lease is None else self._lease.name
        return {
            "status": self.status.name,
            "reason": self.reason.name,
            "holder": holder,
            "refused": dict(self.refused),
            "episode": self.episode,
        }

    def _on_acquire(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        now, lease = time.monotonic(), self._lease
        if lease is not None and now - lease.heard < LEASE_S and lease.address != address:
            self.refused["second master"] += 1
            return {"error": f"the robot is held by {lease.name}: end that first"}
        if self.status == Status.ESTOP:
            return {"error": "the emergency stop is latched: make sure that it is safe, then `embodied deploy clear`"}
        session = int.from_bytes(os.urandom(4), "little") | 1
        self._lease = _Lease(session, str(request.get("name", "?")), address, now)
        self._set(Status.HOLDING, Reason.NONE, f"held by {self._lease.name}")
        return {"session": session}

    def _on_release(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        self.body.hold()
        self._lease, self._deadline = None, float("inf")
        if self.status != Status.ESTOP:
            self._set(Status.HOLDING, Reason.NONE, "released")
        return {}

    def _on_ping(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        return {}

    def _on_scene(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        if self.status == Status.ESTOP:
            return {"error": "the emergency stop is latched"}
        if self.status == Status.FOLLOWING:
            return {"error": "the robot is moving: stop commanding it before a new scene"}
        try:
            self.body.scene(int(request["seed"]))
        except (BadInput, Fault) as error:
            return {"error": str(error)}
        self.episode += 1
        self._target = None
        self._set(Status.HOLDING, Reason.NONE, f"episode {self.episode}, seed {request['seed']}")
        if self.options.lockstep:
            self._publish()
        return {"episode": self.episode}

    def _on_rest(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        """The holder ends its motion on purpose: no watchdog, no reproach."""
        self.body.hold()
        self._deadline = float("inf")
        if self._lease is not None:  # a command that is still on its way comes too late
            self._lease.burnt = max(self._lease.burnt, int(request.get("epoch", self._lease.epoch)))
        if self.status == Status.FOLLOWING:
            self._set(Status.HOLDING, Reason.NONE, "rest")
        return {"truth": self.body.truth()}

    def _on_estop(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        self.latch.parent.mkdir(parents=True, exist_ok=True)
        self.latch.write_text(str(request.get("reason", "")), encoding="utf-8")
        self.body.hold()
        self._set(Status.ESTOP, Reason.OPERATOR, str(request.get("reason", "")))
        return {}

    def _on_clear(self, request: dict[str, Any], address: Any) -> dict[str, Any]:
        self.latch.unlink(missing_ok=True)
        self._lease = None  # whoever held it through the stop starts over
        self._set(Status.HOLDING, Reason.NONE, "cleared")
        return {}

    # -- small things ------------------------------------------------------------------------------------------------

    def _stop(self, reason: Reason, detail: str) -> None:
        """Stop by itself: keep the pose, and refuse what still comes of this epoch."""
        self.body.hold()
        if self._lease is not None:
            self._lease.burnt = self._lease.epoch
        if self.status != Status.ESTOP:
            self._set(Status.STOPPED, reason, detail)

    def _set(self, status: Status, reason: Reason, detail: str) -> None:
        self.status, self.reason = status, reason
        self._note("status", status=status.name, reason=reason.name, detail=detail)

    def _note(self, kind: str, **data: Any) -> None:
        if self.log is not None:
            self.log.append(kind, time.monotonic_ns(), data)

    def _reply(self, answer: dict[str, Any], address: Any) -> None:
        self._send(Kind.REPLY, wire.pack_json(answer), address)

    def _send(self, kind: Kind, payload: bytes, address: Any, **header: int) -> None:
        try:
            self.socket.sendto(wire.pack(kind, payload, self.hash, key=self.options.key, **header), address)
        except (BlockingIOError, ConnectionError):  # the other side's buffer is full, or it is gone: it will miss this one
            self.refused["not sent"] += 1
