"""Datagrams between a robot process and the one process that may command it.

A datagram is a header, a payload, the CRC32 of both and, where a key is shared, an HMAC-SHA256 of all that. Clocks are never
compared: a state carries its age when it was sent, a command how long it may be acted on. Little endian, float32 arrays.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from embodied.spec.errors import BadInput

MAGIC, VERSION = b"EMBD", 1
# magic, version, kind, payload length, spec hash, session, epoch, age [us], time to live [us], sequence
_HEADER = struct.Struct("<4sBBH8sIIIIQ")
_CRC = struct.Struct("<I")
# status, reason, session that holds the robot, episode, sequence of the last command it acted on
_STATUS = struct.Struct("<BBIIQ")
_MAC_SIZE = 16
NO_SPEC = bytes(8)
LARGEST_US = 2**32 - 1


class Kind(IntEnum):
    """What a datagram is."""

    REQUEST = 1  # JSON, answered by a REPLY with the same id; repeated until it is
    REPLY = 2
    STATE = 3  # robot -> holder, many times a second
    COMMAND = 4  # holder -> robot, once a tick


class Status(IntEnum):
    """What the robot does, by its own account."""

    HOLDING = 0  # keeps its pose; follows the next command of its holder
    FOLLOWING = 1
    STOPPED = 2  # stopped by itself: keeps its pose, follows again only commands of a newer epoch
    ESTOP = 3  # latched: nothing moves until an operator clears it


class Reason(IntEnum):
    """Why the robot stopped."""

    NONE = 0
    WATCHDOG = 1  # no command within its time to live
    LIMIT = 2  # a command beyond the robot's own limits
    NOT_FINITE = 3  # a command that is not finite
    CONTACT = 4  # measured force or torque beyond the limit
    JOINT = 5  # a measured joint outside its limits
    OPERATOR = 6
    FAULT = 7  # the robot itself is broken (in simulation: the physics diverged)


class Malformed(Exception):
    """A datagram that is not acted on; the message is one word, for counting."""


@dataclass(frozen=True)
class Packet:
    """A datagram that arrived whole."""

    kind: Kind
    payload: bytes
    spec: bytes
    session: int
    epoch: int
    age_us: int
    ttl_us: int
    sequence: int


@dataclass(frozen=True)
class State:
    """What a robot says of itself: `readings` by name, float32 [n]; `finite`: all of them are."""

    status: Status
    reason: Reason
    session: int
    episode: int
    acted: int
    readings: dict[str, NDArray[np.float32]]
    finite: bool = True


def pack(
    kind: Kind,
    payload: bytes,
    spec: bytes = NO_SPEC,
    session: int = 0,
    epoch: int = 0,
    age_us: int = 0,
    ttl_us: int = 0,
    sequence: int = 0,
    key: bytes | None = None,
) -> bytes:
    """One datagram."""
    head = _HEADER.pack(MAGIC, VERSION, kind, len(payload), spec, session, epoch, age_us, ttl_us, sequence)
    data = head + payload
    data += _CRC.pack(zlib.crc32(data))
    return data if key is None else data + _mac(data, key)


def unpack(data: bytes, key: bytes | None = None) -> Packet:
    """The packet in a datagram.

    Raises:
        Malformed: `short`, `authentication`, `crc`, `magic`, `version`, `length` or `kind`.
    """
    if key is not None:
        data, mac = data[:-_MAC_SIZE], data[-_MAC_SIZE:]
        if not hmac.compare_digest(mac, _mac(data, key)):
            raise Malformed("authentication")
    if len(data) < _HEADER.size + _CRC.size:
        raise Malformed("short")
    body = data[: -_CRC.size]
    if zlib.crc32(body) != _CRC.unpack(data[-_CRC.size :])[0]:
        raise Malformed("crc")
    magic, version, kind, length, *rest = _HEADER.unpack_from(body)
    if magic != MAGIC:
        raise Malformed("magic")
    if version != VERSION:
        raise Malformed("version")
    payload = body[_HEADER.size :]
    if len(payload) != length:
        raise Malformed("length")
    try:
        return Packet(Kind(kind), payload, *rest)
    except ValueError:
        raise Malformed("kind") from None


def pack_state(state: State, layout: Mapping[str, int]) -> bytes:
    """The payload of a STATE: status, then the readings in the order of `layout` (name -> size)."""
    head = _STATUS.pack(state.status, state.reason, state.session, state.episode, state.acted)
    return head + pack_arrays(state.readings, layout)


def unpack_state(payload: bytes, layout: Mapping[str, int]) -> State:
    """The inverse of `pack_state`.

    Raises:
        Malformed: `length` or `status`.
    """
    if len(payload) < _STATUS.size:
        raise Malformed("length")
    status, reason, session, episode, acted = _STATUS.unpack_from(payload)
    readings = unpack_arrays(payload[_STATUS.size :], layout)
    finite = bool(np.isfinite(np.frombuffer(payload, "<f4", offset=_STATUS.size)).all())
    try:
        return State(Status(status), Reason(reason), session, episode, acted, readings, finite)
    except ValueError:
        raise Malformed("status") from None


def pack_arrays(arrays: Mapping[str, Any], layout: Mapping[str, int]) -> bytes:
    """float32 arrays one after another, in the order of `layout`."""
    flat = np.concatenate([np.asarray(arrays[name], np.float32).reshape(size) for name, size in layout.items()])
    return flat.astype("<f4").tobytes()


def unpack_arrays(payload: bytes, layout: Mapping[str, int]) -> dict[str, NDArray[np.float32]]:
    """The inverse of `pack_arrays`.

    Raises:
        Malformed: `length`.
    """
    if len(payload) != 4 * sum(layout.values()):
        raise Malformed("length")
    flat = np.frombuffer(payload, "<f4").astype(np.float32)
    cuts = np.cumsum(list(layout.values()))[:-1]
    return dict(zip(layout, np.split(flat, cuts), strict=True))


def pack_json(document: Mapping[str, Any]) -> bytes:
    """The payload of a REQUEST or REPLY."""
    return json.dumps(document).encode()


def unpack_json(payload: bytes) -> dict[str, Any]:
    """The inverse of `pack_json`.

    Raises:
        Malformed: `json`.
    """
    try:
        document = json.loads(payload)
    except (ValueError, UnicodeDecodeError):
        raise Malformed("json") from None
    if not isinstance(document, dict):
        raise Malformed("json")
    return document


def spec_hash(description: Mapping[str, Any]) -> bytes:
    """Eight bytes that both sides put into every datagram, of what the robot said of itself."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()[:8]


def address_of(text: str) -> tuple[str, int]:
    """The (host, port) that `host:port` or a bare port names; a bare port is on loopback.

    Raises:
        BadInput: it is neither.
    """
    host, _, port = str(text).rpartition(":")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(f"'{text}' is no address: expected host:port, such as 127.0.0.1:47000")
    return host or "127.0.0.1", int(port)


def check_exposed(host: str, key: bytes | None) -> None:
    """Refuse to command, or be commanded, over a network without a key.

    Raises:
        BadInput: the host is not loopback and there is no key.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and key is None:
        raise BadInput(
            f"{host} is not this machine: a robot is commanded over a network only with a shared key, give key_file="
        )


def _mac(data: bytes, key: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()[:_MAC_SIZE]
