"""Let all processes of a program take the decisions of the first process."""

from __future__ import annotations

import struct
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Number = TypeVar("Number", bool, float)


def agreed(number: Number) -> Number:
    """The number that the first process has; all processes call this in the same order.

    With one process it is the number itself.
    """
    if jax.process_count() == 1:
        return number
    (value,) = struct.unpack("<d", _broadcast(struct.pack("<d", number)))
    return type(number)(value)


def agreed_bytes(data: bytes) -> bytes:
    """The bytes that the first process has, such as a file's; see `agreed`."""
    if jax.process_count() == 1:
        return data
    size = int(agreed(float(len(data))))
    padded = data[:size].ljust(-size % 4 + size, b"\0")
    return _broadcast(padded)[:size] if size else b""


def _broadcast(data: bytes) -> bytes:
    """The `data` of the first process: a multiple of 4 bytes, of the same length everywhere."""
    first = multihost_utils.broadcast_one_to_all(np.frombuffer(data, np.int32))
    return np.asarray(first, np.int32).tobytes()
