"""The arrays that a process holds on its devices, by the line that made them.

They are read from JAX's profile of device memory, which is a protocol buffer of pprof.
Source: https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import dataclasses
import gzip

import jax

from xform.memory.proto import Message
from xform.program.frameworks import is_library, line_of_model


@dataclasses.dataclass(frozen=True)
class HeldArrays:
    """Arrays that one line made.

    Attributes:
      where: `file:line (function)`; empty if unknown.
      bytes: their bytes, on all devices.
      count: number of their buffers; a sharded array has one on each device.
    """

    where: str
    bytes: int
    count: int


def held_arrays() -> list[HeldArrays]:
    """Return the arrays that exist now, in groups by line, largest first."""
    return read_profile(jax.profiler.device_memory_profile())


def read_profile(data: bytes) -> list[HeldArrays]:
    """Return the arrays in a profile of device memory, in groups by line, largest first."""
    profile = Message(gzip.decompress(data))
    texts = profile.texts(6)
    functions = {m.number(1): (texts[m.number(4)], texts[m.number(2)]) for m in profile.messages(5)}
    frames: dict[int, tuple[str, int, str]] = {}  # file, line, function by location
    for location in profile.messages(4):
        for line in location.messages(4):
            path, name = functions.get(line.number(1), ("", ""))
            frames.setdefault(location.number(1), (path, line.number(2), name))
    value_names = [texts[m.number(1)] for m in profile.messages(1)]
    count_at, bytes_at = (
        next((i for i, n in enumerate(value_names) if n == name), None)
        for name in ("allocations", "space")
    )
    sizes: dict[str, tuple[int, int]] = {}
    for sample in profile.messages(2):
        labels = {texts[m.number(1)]: texts[m.number(2)] for m in sample.messages(3)}
        if labels.get("kind") != "buffer" or bytes_at is None:
            continue
        stack = [frames[i] for i in sample.numbers(1) if i in frames]
        where = line_of_model((p, f"{p}:{n} ({f})") for p, n, f in stack if not is_library(p))
        values = sample.numbers(2)
        size, count = sizes.get(where, (0, 0))
        count += 1 if count_at is None else values[count_at]
        sizes[where] = size + values[bytes_at], count
    arrays = [HeldArrays(where, *both) for where, both in sizes.items()]
    return sorted(arrays, key=lambda held: (-held.bytes, held.where))
