"""The way from a device to the memory of its host: how fast it is, beside the device itself."""

from __future__ import annotations

import dataclasses

import jax

from xform._jax import Offloadable
from xform.planner.backend import backend, device_kind

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


# By a part of `Device.device_kind`, the first that is found in it. FLOPs are the makers' peak of
# dense products in 16 bits. Of PCI Express with 16 lanes four fifths of its rate are taken: 15.8,
# 31.5 and 63 GB/s in generations 3, 4 and 5. Sources: NVIDIA's data sheets of V100, A100, H100 and
# H200; https://docs.cloud.google.com/tpu/docs/v6e and the pages beside it; for the links of TPUs
# https://jax-ml.github.io/scaling-book/tpus, which says 16 GB/s of v4. Later ones are no slower.
_KNOWN = (
    ("V100", Link(125e12, 12e9)),
    ("A100", Link(312e12, 25e9)),
    ("H100", Link(990e12, 50e9)),
    ("H200", Link(990e12, 50e9)),
    ("TPU v4", Link(275e12, 16e9)),
    ("TPU v5 lite", Link(197e12, 16e9)),
    ("TPU v5e", Link(197e12, 16e9)),
    ("TPU v5", Link(459e12, 16e9)),
    ("TPU v6", Link(918e12, 16e9)),
)


def link_of() -> Link | None:
    """The link of the devices that are planned for; None for one that is not known.

    On a CPU there is one memory, whatever its kinds are called.
    """
    kind = device_kind()
    if kind is None:
        device = jax.local_devices(backend=backend())[0]
        kind = device.device_kind
        if all(m.kind != HOST.dst for m in device.addressable_memories()):
            return None
    return None if backend() == "cpu" else next((x for name, x in _KNOWN if name in kind), None)
