r"""How a record lies in a journal's file: frames that are whole or known not to be.

A frame is `MAGIC`, the payload's length (uint32), a CRC-32 of length and payload (uint32), all little-endian, and the
payload: msgpack of [kind, time_ns, data]. Arrays are extension type 1: "<dtype> <shape>\n" and their bytes in C order.

Nothing here needs numpy until an array is met: the recorder's process stays small.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import sys
import zlib
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

import msgpack

from embodied.spec.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"\xc1EJ1"  # 0xc1 is the one byte that never begins a msgpack value, nor any in UTF-8
HEADER = struct.Struct("<4sII")  # magic, length of the payload, CRC-32
LARGEST = 1 << 20  # bytes of a payload; a damaged length does not make a reader swallow the rest of the file
BUFFER = 4096  # bytes the packer begins with: its own choice is so large that the system gives and takes it each time
ARRAY = 1  # msgpack extension type
ARRAY_KINDS = "biufc"  # numpy's: bool, int, uint, float, complex


def encode(kind: str, time_ns: int, data: Mapping[str, Any]) -> bytes:
    """A record as a frame.

    Args:
        kind: what it is, as "tick".
        time_ns: monotonic time of capture [ns].
        data: None, bool, int (64 bits), float, str, bytes, lists, dicts with str keys, numpy arrays of bool, int, float or
            complex (dtype and shape are kept), numpy scalars (read back as Python's).

    Raises:
        BadInput: data of other types, or more than `LARGEST` bytes.
    """
    try:
        data = dict(data)
        _check_keys(data)
        payload = msgpack.packb([kind, time_ns, data], default=_plain, buf_size=BUFFER)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadInput(f"a record of kind '{kind}' cannot be written: {error}") from error
    if len(payload) > LARGEST:
        raise BadInput(f"a record of kind '{kind}' has {len(payload)} bytes, at most {LARGEST} are possible: split it")
    return HEADER.pack(MAGIC, len(payload), _checksum(payload)) + payload


def decode(payload: bytes) -> tuple[str, int, dict[str, Any]]:
    """Kind, time and data of a frame's payload; ValueError if it is not that of a record."""
    try:
        kind, time_ns, data = msgpack.unpackb(payload, ext_hook=_array)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return kind, time_ns, data


def append_whole(fd: int, frame: bytes | bytearray) -> None:
    """Write all of a frame at the file's position, its end, or raise OSError and cut off again what was written of it."""
    end = os.lseek(fd, 0, os.SEEK_CUR)
    rest = memoryview(frame)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError:
        # where even that fails, the tail stays torn: readers say so and `repair` sets it aside
        with contextlib.suppress(OSError):
            os.lseek(fd, end, os.SEEK_SET)
            os.ftruncate(fd, end)
        raise


def read_payload(file: IO[bytes]) -> bytes | None:
    """The frame at the file's position, which moves behind it; None at the end (it does not move) or at damage (it does)."""
    header = file.read(HEADER.size)
    if len(header) == HEADER.size:
        magic, length, checksum = HEADER.unpack(header)
        # no frame is empty: a header whose second part was lost as zeros is not one
        if magic == MAGIC and 0 < length <= LARGEST:
            payload = file.read(length)
            if len(payload) == length and _checksum(payload) == checksum:
                return payload
    return None


def _checksum(payload: bytes) -> int:
    # seeded with the length: a frame whose length is damaged does not pass
    return zlib.crc32(payload, len(payload))


def _check_keys(value: Any) -> None:
    """Refuse keys other than strings: msgpack would write some that it cannot read back."""
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is {type(key).__name__}, expected str")
        value = value.values()
    elif isinstance(value, msgpack.ExtType):
        raise TypeError("a value is an extension type, expected plain data")
    for item in value:
        if isinstance(item, (dict, list, tuple)):
            _check_keys(item)


def _plain(value: Any) -> Any:
    """What msgpack does not know: numpy arrays and scalars."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if type(value) is numpy.ndarray and (head := _array_head(value.dtype, value.shape)):
            return msgpack.ExtType(ARRAY, head + value.tobytes())
        if isinstance(value, numpy.generic) and value.dtype.kind in ARRAY_KINDS:
            return value.item()
    if isinstance(value, int):
        raise TypeError(f"{value} has more than 64 bits")
    kind = type(value).__name__ + (f" of {value.dtype}" if hasattr(value, "dtype") else "")
    raise TypeError(f"a value is of type {kind}, expected plain data or numpy arrays of numbers")


@functools.lru_cache(maxsize=256)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """What stands before an array's bytes; empty for dtypes that are not numbers."""
    return f"{dtype.str} {','.join(map(str, shape))}\n".encode() if dtype.kind in ARRAY_KINDS else b""


def _array(code: int, content: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    if code != ARRAY:
        raise ValueError(f"extension type {code}, expected {ARRAY}")
    start = content.index(b"\n") + 1
    dtype, shape = content[: start - 1].decode().split(" ")
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return np.ndarray(sizes, np.dtype(dtype), buffer=content, offset=start).copy()
