"""The memory, the speed and the memory use of this process's device."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xform
from models.machine import machine_memory

# xform's public API describes a device only in reports, so we report on a trivial function.
_SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def flops_per_second() -> float | None:
    """Return the peak speed of bfloat16 matrix products; None for an unknown device."""
    report = xform.memory_analysis(lambda x: x, _SCALAR)
    return report.device.flops_per_second


def capacity() -> int:
    """Return the memory of one device in bytes; for a CPU, the memory of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or machine_memory()


def memory_bytes(target: str | None, capacity_text: str | None) -> int:
    """Return the memory of a device in bytes.

    Args:
      target: the name of a device; None for the device of this process.
      capacity_text: the memory to assume, such as "14GiB"; None for that of the device.

    Raises:
      WrongArgument: there is no such target, or its memory is not known.
    """
    assumed = capacity_text or (None if target else capacity())
    report = xform.fits(
        lambda x: x, _SCALAR, target=target or jax.default_backend(), capacity=assumed
    )
    assert report.capacity_bytes is not None  # `fits` raises if it is not known
    return report.capacity_bytes


def peak_bytes() -> int | None:
    """Return the peak memory use of a device in bytes; None if it does not count, as on CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
