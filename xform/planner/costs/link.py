"""The link from a device to the memory of its host: its speed, and the speed of the device."""

from __future__ import annotations

import dataclasses

from xform._jax import Offloadable
from xform.planner.device import Device
from xform.planner.hardware import find_hardware

# The offload that a budget uses, in the same form as in JAX's policies.
HOST = Offloadable(src="device", dst="pinned_host")


@dataclasses.dataclass(frozen=True)
class HostLink:
    """A device and its link to the host.

    Attributes:
      flops_per_second: peak of the device, so FLOPs / flops_per_second is a lower bound on time.
      bytes_per_second: speed of the link in one direction. Both directions work at the same time.
      latency_seconds: fixed time of each transfer.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 1e-5

    def seconds(self, n_bytes: float) -> float:
        """Return the time of one transfer."""
        return self.latency_seconds + n_bytes / self.bytes_per_second


def link_of(device: Device) -> HostLink | None:
    """Return the link of a device, or None if it has none or its speed is unknown.

    A CPU has no link: all its memory kinds are one memory.
    """
    kind = device.kind
    if kind is None:
        local = device.local()
        kind = local.device_kind
        if all(m.kind != HOST.dst for m in local.addressable_memories()):
            return None
    facts = find_hardware(kind)
    if device.backend == "cpu" or facts is None:
        return None
    flops, speed = facts.flops_per_second, facts.host_bytes_per_second
    return HostLink(flops, speed) if flops and speed else None
