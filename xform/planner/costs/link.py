"""The way from a device to the memory of its host: how fast it is, beside the device itself."""

from __future__ import annotations

import dataclasses

from xform._jax import Offloadable
from xform.devices import known
from xform.planner.device import Device

# Where a budget sends values, as policies by name say it.
HOST = Offloadable(src="device", dst="pinned_host")


@dataclasses.dataclass(frozen=True)
class Link:
    """A device and its link to the host.

    Attributes:
      flops_per_second: what the device does at most: work takes at least as long as this says.
      bytes_per_second: of the link in one direction; the two directions go at once.
      latency_seconds: what each transfer takes beside its bytes.
    """

    flops_per_second: float
    bytes_per_second: float
    latency_seconds: float = 1e-5

    def seconds(self, n_bytes: float) -> float:
        """The time of one transfer."""
        return self.latency_seconds + n_bytes / self.bytes_per_second


def link_of(device: Device) -> Link | None:
    """The link of a device; None for one that is not known.

    On a CPU there is one memory, whatever its kinds are called.
    """
    kind = device.kind
    if kind is None:
        local = device.local()
        kind = local.device_kind
        if all(m.kind != HOST.dst for m in local.addressable_memories()):
            return None
    facts = known(kind)
    if device.backend == "cpu" or facts is None:
        return None
    flops, speed = facts.flops_per_second, facts.host_bytes_per_second
    return Link(flops, speed) if flops and speed else None
