"""What the device of this process has: memory, speed, and what is in use."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import xform
from models.machine import machine_memory


def speed() -> float | None:
    """FLOPs per second of the matrix products in bfloat16 of one device, if its kind is known."""
    # The report of a function that does nothing is the public way to what is known of a device.
    report = xform.memory_analysis(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32))
    return report.compilation.target.device.flops_per_second


def capacity() -> int:
    """Bytes of memory of one device; of a CPU, those of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit", 0)) or machine_memory()


def peak_bytes() -> int | None:
    """The most bytes of a device that were in use at once; None where none are counted: on CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
