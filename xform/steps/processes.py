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
    halves = np.frombuffer(struct.pack("<d", number), np.int32)  # JAX may have no 64-bit types
    first = multihost_utils.broadcast_one_to_all(halves)
    (value,) = struct.unpack("<d", np.asarray(first, np.int32).tobytes())
    return type(number)(value)
