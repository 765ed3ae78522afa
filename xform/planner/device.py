"""The device that plans are made for.

It is JAX's default device, unless `planning_for` names another one. A plan is made during a trace,
so a trace depends on this device. Therefore the device is part of the keys of JAX's caches, and
`jax.jit` traces a function again for another device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from xform.planner.hardware import find_hardware
from xform.policies import Policy, min_cut
from xform.policies.budgets import Fit

# The arguments of `planning_for`; None outside of it. JAX adds them to the keys of its caches.
_planned_for: Any = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to plan for.

    Attributes:
      backend: "cpu", "gpu" or "tpu".
      kind: the name of a device that this process does not have, such as "TPU v5e"; None for the
        devices of this process.
    """

    backend: str
    kind: str | None = None

    def memory(self) -> tuple[str, int | None]:
        """Return the device's name, and the bytes of its memory or None if they are unknown.

        For a device of this process, these are the bytes that the backend lets a program use.
        """
        if self.kind:
            hardware = find_hardware(self.kind)
            return self.kind, hardware and hardware.capacity_bytes
        local = self.local()
        return local.device_kind, (local.memory_stats() or {}).get("bytes_limit")

    def local(self) -> Any:
        """Return the first device of this backend in this process."""
        return jax.local_devices(backend=self.backend)[0]


def current_device() -> Device:
    """Return the device that plans are made for."""
    if _planned_for.value:
        backend, kind, _ = _planned_for.value
        return Device(backend, kind)
    return Device(jax.default_backend())


def current_target() -> str | None:
    """Return the `target` that `planning_for` was given; None outside of it."""
    return _planned_for.value[2] if _planned_for.value else None


def planning_for(
    backend: str, kind: str | None = None, target: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: traces inside it plan for another device.

    Args:
      backend: "cpu", "gpu" or "tpu".
      kind: the name of a device that this process does not have, such as "TPU v5e"; None for the
        devices of this process.
      target: the user's text for the device, such as "v5e"; None for the backend of this process.
    """
    return _planned_for((backend, kind, target))


def resolve_fit(policy: Policy, device: Device | None = None) -> Policy:
    """Return the policy, with `fit()` (also called "auto") replaced by a budget.

    The budget is the memory of the device, less the part that `fit` reserves. If that memory is
    unknown, `fit()` becomes the default policy. Other policies are returned unchanged. If `device`
    is None, the device is `current_device()`.
    """
    if not isinstance(policy, Fit):
        return policy
    name, capacity = (device or current_device()).memory()
    if capacity is None:
        return dataclasses.replace(min_cut, regions=policy.regions)
    return policy.within(capacity, name)
