"""The wire: what arrives whole comes out as it went in, anything else is refused by name."""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.deploy import wire
from embodied.deploy.wire import Kind, Malformed, Reason, State, Status
from embodied.spec.errors import BadInput

KEY = b"a shared key of some length"
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
keys = st.sampled_from([None, KEY])


@given(
    kind=st.sampled_from(list(Kind)),
    payload=st.binary(max_size=300),
    spec=st.binary(min_size=8, max_size=8),
    numbers=st.tuples(u32, u32, u32, u32, u64),
    key=keys,
)
@settings(deadline=None)
def test_a_datagram_comes_out_as_it_went_in(kind, payload, spec, numbers, key):
    session, epoch, age, ttl, sequence = numbers
    packet = wire.unpack(wire.pack(kind, payload, spec, session, epoch, age, ttl, sequence, key), key)
    assert packet == wire.Packet(kind, payload, spec, session, epoch, age, ttl, sequence)


def test_the_layout_by_hand():
    """Written out with struct and zlib alone, as another implementation would."""
    head = b"EMBD" + bytes([1, 4]) + struct.pack("<H", 3) + b"specspec" + struct.pack("<IIIIQ", 7, 8, 9, 10, 11)
    body = head + b"abc"
    data = body + struct.pack("<I", zlib.crc32(body))
    assert wire.pack(Kind.COMMAND, b"abc", b"specspec", 7, 8, 9, 10, 11) == data
    signed = data + hmac.new(KEY, data, hashlib.sha256).digest()[:16]
    assert wire.pack(Kind.COMMAND, b"abc", b"specspec", 7, 8, 9, 10, 11, KEY) == signed


@given(payload=st.binary(max_size=60), key=keys, data=st.data())
@settings(deadline=None)
def test_one_wrong_byte_anywhere_is_refused(payload, key, data):
    whole = bytearray(wire.pack(Kind.STATE, payload, key=key))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Malformed):
        wire.unpack(bytes(whole), key)


@given(payload=st.binary(max_size=60), key=keys, data=st.data())
@settings(deadline=None)
def test_a_cut_or_extended_datagram_is_refused(payload, key, data):
    whole = wire.pack(Kind.STATE, payload, key=key)
    cut = data.draw(st.integers(0, len(whole) - 1))
    for wrong in (whole[:cut], whole + b"\0", b"\0" + whole):
        with pytest.raises(Malformed):
            wire.unpack(wrong, key)


@pytest.mark.parametrize("theirs", [None, b"another key, also long"])
def test_without_the_key_nothing_is_believed(theirs):
    with pytest.raises(Malformed, match="authentication"):
        wire.unpack(wire.pack(Kind.COMMAND, b"move", key=theirs), KEY)


def valid_but(at: int, value: bytes) -> bytes:
    """A datagram with other header bytes and a CRC that fits them."""
    body = bytearray(wire.pack(Kind.COMMAND, b"abc")[:-4])
    body[at : at + len(value)] = value
    return bytes(body) + struct.pack("<I", zlib.crc32(bytes(body)))


@pytest.mark.parametrize(
    ("at", "value", "word"), [(0, b"EMBX", "magic"), (4, b"\x02", "version"), (5, b"\x09", "kind"), (6, b"\x04\x00", "length")]
)
def test_each_refusal_is_named(at, value, word):
    with pytest.raises(Malformed, match=word):
        wire.unpack(valid_but(at, value))


floats = st.floats(width=32, allow_nan=False)


@given(values=st.lists(floats, min_size=5, max_size=5), status=st.sampled_from(list(Status)), acted=u64)
@settings(deadline=None)
def test_a_state_comes_out_as_it_went_in(values, status, acted):
    layout = {"tcp_pos": 3, "joint_pos": 2}
    readings = {"joint_pos": np.float32(values[:2]), "tcp_pos": np.float32(values[2:])}
    state = wire.unpack_state(wire.pack_state(State(status, Reason.LIMIT, 5, 6, acted, readings), layout), layout)
    assert (state.status, state.reason, state.session, state.episode, state.acted) == (status, Reason.LIMIT, 5, 6, acted)
    for name, value in readings.items():
        np.testing.assert_array_equal(state.readings[name], value)


def test_states_and_arrays_of_another_size_are_refused():
    good = wire.pack_state(State(Status.HOLDING, Reason.NONE, 0, 0, 0, {"a": np.zeros(3)}), {"a": 3})
    for payload in (good[:-4], good + bytes(4), good[:5]):
        with pytest.raises(Malformed, match="length"):
            wire.unpack_state(payload, {"a": 3})
    with pytest.raises(Malformed, match="status"):
        wire.unpack_state(b"\x63" + good[1:], {"a": 3})


@pytest.mark.parametrize("payload", [b"", b"[1]", b"\xff\xfe", b"{", b'"x"'])
def test_what_is_no_json_object_is_refused(payload):
    with pytest.raises(Malformed, match="json"):
        wire.unpack_json(payload)


def test_addresses():
    assert wire.address_of("10.0.0.2:5000") == ("10.0.0.2", 5000)
    assert wire.address_of("5000") == ("127.0.0.1", 5000)
    for wrong in ("robot", "robot:", "robot:0", "1:65536", ""):
        with pytest.raises(BadInput, match="expected host:port"):
            wire.address_of(wrong)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "robot.local", "::"])
def test_a_network_needs_a_key(host):
    with pytest.raises(BadInput, match="shared key"):
        wire.check_exposed(host, None)
    wire.check_exposed(host, KEY)
    for mine in ("127.0.0.1", "::1", "localhost"):
        wire.check_exposed(mine, None)
