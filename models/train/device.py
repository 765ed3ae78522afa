"""What the device of this process has: memory, speed, and what is in use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xform
from models.machine import machine_memory

# The report of a function that does nothing is the public way to what is known of a device.
_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def speed() -> float | None:
    """FLOPs per second of the matrix products in bfloat16 of one device, if its kind is known."""
    report = xform.memory_analysis(lambda x: x, _SCALAR)
    return report.compilation.target.device.flops_per_second


def capacity() -> int:
    """Bytes of memory of one device; of a CPU, those of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or machine_memory()


def room(target: str | None, memory: str | None) -> int:
    """Bytes of a device: as many as are given, or what a target has, or the device of this process.

    Raises:
      WrongArgument: there is no such target, or its memory is not known.
    """
    of = target or jax.default_backend()
    bytes_ = memory or (None if target else capacity())
    report = xform.fits(lambda x: x, _SCALAR, target=of, capacity=bytes_)
    assert report.capacity_bytes is not None  # or it says that it is not known
    return report.capacity_bytes


def peak_bytes() -> int | None:
    """The most bytes of a device that were in use at once; None where none are counted: on CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
