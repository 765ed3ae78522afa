"""The speed of the link between a device and its host's memory, for values that are offloaded.

A saved value is *offloaded* if it is copied to the host's memory in the forward pass and copied
back in the backward pass. The planner compares the time of these copies with the time of the
computation between them, so a `HostLink` also has the speed of the device.
"""

from __future__ import annotations

import dataclasses

from xform._jax import Offloadable
from xform.planner.device import Device
from xform.planner.hardware import find_hardware

# The offload that budgets use: from the device to the host's pinned memory, as JAX writes it.
HOST = Offloadable(src="device", dst="pinned_host")


@dataclasses.dataclass(frozen=True)
class HostLink:
    """The speed of a device and of its link to the host.

    Attributes:
      flops_per_second: peak speed of the device. FLOPs / flops_per_second is a lower bound on the
        time of a computation.
      bytes_per_second: speed of the link in one direction. It can copy in both directions at once.
      latency_seconds: fixed time of each transfer.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 1e-5

    def seconds(self, n_bytes: float) -> float:
        """Return the time to copy `n_bytes` in one direction."""
        return self.latency_seconds + n_bytes / self.bytes_per_second


def link_of(device: Device) -> HostLink | None:
    """Return the link of a device to its host.

    The result is None if the device has no `pinned_host` memory, or if a speed is unknown. A CPU
    has no link: all its memory kinds are one memory.
    """
    kind = device.kind
    if kind is None:
        local = device.local()
        kind = local.device_kind
        if all(m.kind != HOST.dst for m in local.addressable_memories()):
            return None
    hardware = find_hardware(kind)
    if device.backend == "cpu" or hardware is None:
        return None
    flops, link_speed = hardware.flops_per_second, hardware.host_bytes_per_second
    return HostLink(flops, link_speed) if flops and link_speed else None
