"""The device that plans are made for: JAX's default, or the target that a program is lowered for.

A trace depends on this device. So the device is part of the keys of JAX's caches, and `jax.jit`
traces a function again for another backend. `interpret/barrier.py` decides at lowering time and
does not use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from xform.planner.hardware import find_hardware
from xform.policies import Policy, min_cut
from xform.policies.budgets import Fit

_other: Any = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to plan for.

    Attributes:
      backend: "cpu", "gpu" or "tpu".
      kind: the name of a device that this process does not have; None for its own devices.
    """

    backend: str
    kind: str | None = None

    def memory(self) -> tuple[str, int | None]:
        """The device's name and the bytes of its memory, or None if they are unknown.

        For a device of this process, these are the bytes that the backend lets a program use.
        """
        if self.kind:
            device = find_hardware(self.kind)
            return self.kind, device and device.capacity_bytes
        local = self.local()
        return local.device_kind, (local.memory_stats() or {}).get("bytes_limit")

    def local(self) -> Any:
        """The first device of this backend in this process."""
        return jax.local_devices(backend=self.backend)[0]


def current_device() -> Device:
    """The device that plans are made for."""
    if _other.value:
        name, kind, _ = _other.value
        return Device(name, kind)
    return Device(jax.default_backend())


def current_target() -> str | None:
    """The name of the target that plans are made for; None for JAX's default backend."""
    return _other.value[2] if _other.value else None


def planning_for(
    name: str, kind: str | None = None, target: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """A context manager: traces inside it plan for the backend `name` and devices of this `kind`.

    `target` names the compiler, as in `memory/targets.py`; None means the backend of this process.
    """
    return _other((name, kind, target))


def resolve_fit(policy: Policy, device: Device | None = None) -> Policy:
    """Return the policy with `fit()` replaced by a budget of the device's memory.

    If that memory is unknown, `fit()` becomes the default policy. Other policies are returned
    unchanged. If `device` is None, the device of `here()` is used.
    """
    if not isinstance(policy, Fit):
        return policy
    name, capacity = (device or current_device()).memory()
    if capacity is None:
        return dataclasses.replace(min_cut, regions=policy.regions)
    return policy.within(capacity, name)
