"""The device that is planned for: JAX's default, unless a program is lowered for another.

A trace depends on this device, so the device is in the keys of JAX's caches: `jax.jit` traces a
function again for another backend. `interpret/barrier.py` decides at lowering, and does not ask.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from xform.budgets import Fit
from xform.devices import known
from xform.policies import Policy, min_cut

_other: Any = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True)
class Device:
    """A device to plan for.

    Attributes:
      backend: "cpu", "gpu" or "tpu".
      kind: the name of a device that is not in this process; None for the devices of this process.
    """

    backend: str
    kind: str | None = None

    def memory(self) -> tuple[str, int | None]:
        """The device's name, and the bytes of its memory; None where they are not known.

        For a device of this process, these are the bytes that the backend lets a program use.
        """
        if self.kind:
            device = known(self.kind)
            return self.kind, device and device.capacity_bytes
        local = self.local()
        return local.device_kind, (local.memory_stats() or {}).get("bytes_limit")

    def local(self) -> Any:
        """The first device of this backend in this process."""
        return jax.local_devices(backend=self.backend)[0]


def here() -> Device:
    """The device that is planned for."""
    if _other.value:
        name, kind, _ = _other.value
        return Device(name, kind)
    return Device(jax.default_backend())


def target() -> str | None:
    """The name of the target that is planned for; None for JAX's default backend."""
    return _other.value[2] if _other.value else None


def planned_for(
    name: str, kind: str | None = None, target: str | None = None
) -> contextlib.AbstractContextManager[None]:
    """Within it, what is traced is planned for this backend, and devices of this `kind`.

    `target` names their compiler, as in `memory/targets.py`; None is the backend of this process.
    """
    return _other((name, kind, target))


def in_bytes(policy: Policy, device: Device | None = None) -> Policy:
    """The policy itself; of `fit()` the budget that is the memory of a device.

    Where that memory is not known, `fit()` is the default policy. None stands for the device that
    is planned for.
    """
    if not isinstance(policy, Fit):
        return policy
    name, capacity = (device or here()).memory()
    if capacity is None:
        return dataclasses.replace(min_cut, regions=policy.regions)
    return policy.within(capacity, name)
