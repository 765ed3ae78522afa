"""Meters of a device's memory: the allocator's counters, and resident memory.

No GPU is needed: a stand-in has the counters of `Device.memory_stats`, under JAX's names for them.
"""

import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from xform.memory.meters import AllocatorMeter, ResidentMeter, meter_of

MIB = 2**20


class Allocator:
    """A stand-in for a GPU: counters of bytes, of which the peak never falls."""

    def __init__(self, in_use: int) -> None:
        self.in_use = self.peak = in_use

    def allocate(self, n: int) -> None:
        self.in_use += n
        self.peak = max(self.peak, self.in_use)

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak, "bytes_limit": 2**40}


def test_the_counters_give_the_peak_above_the_start() -> None:
    device = Allocator(100)
    meter = meter_of(device)
    assert isinstance(meter, AllocatorMeter)
    meter.start()
    device.allocate(70)
    device.allocate(-70)
    device.allocate(30)
    assert meter.growth() == 70


def test_a_peak_below_an_earlier_one_is_unknown() -> None:
    device = Allocator(100)
    device.allocate(500)
    device.allocate(-500)
    meter = meter_of(device)
    meter.start()
    device.allocate(70)
    assert meter.growth() is None


@pytest.mark.parametrize("stats", [None, {}, {"bytes_limit": 1}])
def test_a_device_without_counters_has_resident_memory(stats) -> None:
    device = SimpleNamespace(memory_stats=lambda: stats)
    assert isinstance(meter_of(device), ResidentMeter)
    if jax.default_backend() == "cpu":
        assert isinstance(meter_of(jax.devices()[0]), ResidentMeter)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_resident_meter_counts_memory_freed_before_the_reading() -> None:
    meter = ResidentMeter()
    meter.start()
    block = np.ones(64 * MIB, np.uint8)
    del block
    growth = meter.growth()
    assert growth is not None
    assert 60 * MIB < growth < 90 * MIB
    meter.start()
    again = meter.growth()
    assert again is not None
    assert again < 10 * MIB
