"""Measure how much memory a device takes while it runs: its own counters, or resident memory.

GPUs and TPUs count the bytes of their allocator (`Device.memory_stats`). A CPU does not: there the
resident memory of this process is measured, which only Linux reports.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path
from typing import Any, Protocol

_PROCESS = Path("/proc/self")


class Meter(Protocol):
    """Measures the growth of memory between `start` and `growth`.

    Attributes:
      source: what is measured, for people.
    """

    source: str

    def start(self) -> None:
        """Remember the memory in use now."""

    def growth(self) -> int | None:
        """Return the most bytes since `start`, above those at `start`; None if unknown."""
        ...


class AllocatorMeter:
    """The counters of a device's allocator.

    The counter of the peak never falls. So a peak below an earlier one of the process is unknown.
    """

    source = "bytes of the device's allocator (memory_stats)"

    def __init__(self, device: Any) -> None:
        self._device, self._before, self._peak = device, 0, 0

    def start(self) -> None:
        stats = self._device.memory_stats()
        self._before, self._peak = stats["bytes_in_use"], stats["peak_bytes_in_use"]

    def growth(self) -> int | None:
        peak = self._device.memory_stats()["peak_bytes_in_use"]
        return peak - self._before if peak > self._peak else None


class ResidentMeter:
    """The resident memory of this process, on Linux, whose peak can be reset."""

    source = "resident memory of this process"

    def __init__(self) -> None:
        self._before: int | None = None

    def start(self) -> None:
        gc.collect()
        # Give free memory back, which the run would otherwise reuse without growing.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        try:
            (_PROCESS / "clear_refs").write_text("5")  # resets the peak, see proc(5)
            self._before = _resident("VmRSS")
        except OSError:
            self._before = None

    def growth(self) -> int | None:
        return None if self._before is None else max(0, _resident("VmHWM") - self._before)


def _resident(name: str) -> int:
    """Return a size of this process, in bytes: VmRSS (now) or VmHWM (at its peak)."""
    found = re.search(rf"^{name}:\s*(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def meter_of(device: Any) -> Meter:
    """Return the meter of a device."""
    stats = device.memory_stats() or {}
    counts = {"bytes_in_use", "peak_bytes_in_use"} <= stats.keys()
    return AllocatorMeter(device) if counts else ResidentMeter()
