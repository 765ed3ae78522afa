"""The backend that is planned for: JAX's default, but while a program is lowered for another.

What is asked while a function is traced is part of what the trace depends on, so the answer is in
the keys of JAX's caches: a function that `jax.jit` has traced for one backend is traced again for
another. What lowering alone decides (`interpret/barrier.py`) needs no such answer.
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


def backend() -> str:
    """The backend that is planned for: "cpu", "gpu" or "tpu"."""
    return _other.value[0] if _other.value else jax.default_backend()


def device_kind() -> str | None:
    """The name of a device that is planned for and is not here; None for those of this process."""
    return _other.value[1] if _other.value else None


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


def memory() -> tuple[str, int | None]:
    """The device that is planned for, and the bytes of its memory; None where they are not known.

    Of a device that is here it is what the backend lets a program take.
    """
    if kind := device_kind():
        device = known(kind)
        return kind, device and device.capacity_bytes
    here = jax.local_devices(backend=backend())[0]
    return here.device_kind, (here.memory_stats() or {}).get("bytes_limit")


def in_bytes(policy: Policy) -> Policy:
    """A policy, but that `fit()` is the budget that it is here, or the default if none is known."""
    if not isinstance(policy, Fit):
        return policy
    device, capacity = memory()
    if capacity is None:
        return dataclasses.replace(min_cut, regions=policy.regions)
    return policy.within(capacity, device)
