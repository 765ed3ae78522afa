"""The devices and processes of a run, and the sharding of its arrays."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.errors import InputError
from models.nets.axes import BATCH, CONTEXT, MESH_AXES, spec
from models.settings import nearest
from models.train.host import check_host

# The beginning of messages of JAX's runtime, such as those of failed collectives.
_RUNTIME_ERROR = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


def sizes(text: str) -> dict[str, int]:
    """Parse `data=4,fsdp=2` to the number of devices along each axis of `MESH_AXES`.

    Raises:
      InputError: the text is not a valid mesh.
    """
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in MESH_AXES or name in found:
            axes = ", ".join(MESH_AXES)
            unknown = f"is not one of {axes}{nearest(name, MESH_AXES)}"
            problem = "is given twice" if name in found else unknown
            raise InputError(f"--mesh {text}: {name!r} {problem}")
        if not size.isdecimal() or int(size) < 1:
            raise InputError(f"--mesh {text}: {name} is {size!r}, but must be a number of devices")
        found[name] = int(size)
    return {name: found.get(name, 1) for name in MESH_AXES}


def abstract_mesh(text: str) -> AbstractMesh:
    """Return the mesh as an abstract mesh, which needs no devices."""
    axes = sizes(text)
    return AbstractMesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes))


def mesh_or_none(text: str, offload: bool = False) -> AbstractMesh | None:
    """Return the abstract mesh; None for one device, unless it offloads.

    Offloading needs a mesh, because the shardings name the memory.
    """
    return mesh if (mesh := abstract_mesh(text)).size > 1 or offload else None


def make_mesh(text: str, offload: bool = False) -> Mesh | None:
    """Make the mesh of the first devices; None for one device, unless it offloads.

    With several processes the mesh must have all their devices.

    Raises:
      InputError: there are too few devices, several processes have more devices than the mesh, or
        the devices cannot offload.
    """
    axes = sizes(text)
    needed, there = int(np.prod([*axes.values()])), jax.device_count()
    if needed > there or (jax.process_count() > 1 and needed != there):
        several = f"these {jax.process_count()} processes have"
        remedy = f"choose a --mesh of {there}"
        if jax.default_backend() == "cpu" and jax.process_count() == 1:
            remedy += (
                ", or split the CPU with the environment variable"
                f" XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            )
        raise InputError(
            f"--mesh {text or 'data=1'} needs {needed} devices, but"
            f" {several if jax.process_count() > 1 else 'there are'} {there}: {remedy}"
        )
    if offload:
        check_host(jax.local_devices()[0])
    elif needed == 1:
        return None
    return jax.make_mesh(
        (*axes.values(),),
        (*axes,),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:needed],
    )


def placed(tree: Any, mesh: Mesh | AbstractMesh, memory: str | None = None) -> Any:
    """Add shardings to a tree of array types. Variables are sharded by the names of their axes.

    Optimizer state of a parameter is sharded like the parameter. Arrays without named axes are
    replicated. `memory` is the memory kind of the variables; None for the devices' default.
    """

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf.update(sharding=NamedSharding(mesh, P()))
        names, array = leaf.get_metadata().get("out_sharding") or (), leaf.get_value()
        if isinstance(array, optax.MaskedNode):  # a parameter that this part does not update
            return leaf
        where = spec(names, array.shape, mesh) if len(names) == array.ndim else P()
        return leaf.replace(array.update(sharding=NamedSharding(mesh, where, memory_kind=memory)))

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def shares(axes: Mapping[str, int]) -> int:
    """Return the number of groups of devices among which a batch is divided."""
    return math.prod(axes[name] for name in BATCH)


def batch_sharding(mesh: Mesh | AbstractMesh, size: int, axis: int) -> NamedSharding:
    """Return the sharding of an array with `size` examples along `axis`.

    The examples are replicated if they cannot be divided equally. If devices share each sequence,
    the blocks of the sequences are sharded along the next axis (`models.zigzag`).
    """
    examples = BATCH if size % shares(mesh.shape) == 0 else None
    blocks = [CONTEXT] if mesh.shape[CONTEXT] > 1 else []
    return NamedSharding(mesh, P(*[None] * axis, examples, *blocks))


def check_batch(text: str, batch: int, length: int | None) -> None:
    """Check that a batch can be divided equally among the devices.

    `length` is the number of tokens of a sequence; None if the examples are no sequences of tokens.

    Raises:
      InputError: it cannot.
    """
    context = sizes(text)[CONTEXT]
    if context > 1 and length is None:
        raise InputError(f"--mesh {text}: only models of text can share sequences over `context`")
    if context > 1 and length is not None and length % (2 * context):
        raise InputError(
            f"--context {length} cannot be divided among {context} devices (--mesh {text}), which"
            f" have two blocks each: give a multiple of {2 * context}"
        )
    groups = shares(sizes(text))
    if batch % groups:
        raise InputError(
            f"--batch {batch} cannot be divided among {groups} groups of devices (--mesh {text}):"
            f" give a multiple of {groups}"
        )


def on_devices(batch: Any, mesh: Mesh | None, axis: int) -> Any:
    """Put a batch, with examples along `axis`, on the devices. Each process places its own part."""
    return batch if mesh is None else jax.tree.map(lambda x: _place_batch(x, mesh, axis), batch)


def types_on(batch: Any, mesh: Mesh | AbstractMesh | None, axis: int) -> Any:
    """Add shardings to the types of a batch with examples along `axis`."""
    if mesh is None:
        return batch
    with_sharding = lambda x: x.update(sharding=batch_sharding(mesh, x.shape[axis], axis))
    return jax.tree.map(with_sharding, batch)


def _place_batch(batch: np.ndarray, mesh: Mesh, axis: int) -> jax.Array:
    sharding = batch_sharding(mesh, batch.shape[axis], axis)
    indices = sharding.addressable_devices_indices_map(batch.shape)
    own = [
        slice(min(low), max(high))
        for axis, length in enumerate(batch.shape)
        for low, high in [
            zip(
                *[index[axis].indices(length)[:2] for index in indices.values() if index],
                strict=True,
            )
        ]
    ]
    return jax.make_array_from_process_local_data(sharding, batch[tuple(own)], batch.shape)


def any_process(here: bool) -> bool:
    """Return whether `here` is true in any process. All processes get the same answer."""
    if jax.process_count() == 1:
        return here
    return bool(np.any(multihost_utils.process_allgather(np.array(here))))


def begin_processes(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Connect the processes of a run, if flags or the environment say that there are several.

    Call it before JAX uses any device. The environment variables are `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, and those of clusters that JAX detects.

    Raises:
      InputError: only some of the flags are given, or the other processes were not found.
    """
    given = [x is not None for x in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise InputError(
            "--coordinator-address, --num-processes and --process-id must be given together"
        )
    if not any(given) and "JAX_COORDINATOR_ADDRESS" not in os.environ:
        return
    options: dict[str, Any] = {}
    with contextlib.suppress(KeyError):
        options["num_processes"] = int(os.environ["JAX_NUM_PROCESSES"])
        options["process_id"] = int(os.environ["JAX_PROCESS_ID"])
    if all(given):
        options = {"coordinator_address": coordinator, "num_processes": processes,
                   "process_id": process}  # fmt: skip
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # On CPUs, the collectives of two programs that run at the same time would be mixed up.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the processes did not find each other: {error}; check --coordinator-address and"
            " --num-processes"
        ) from None


@contextlib.contextmanager
def ended_with_others() -> Iterator[None]:
    """End this process at once, with one line and code 2, if one of several processes fails.

    This happens if this process has an `InputError`, or if it has lost another process. Nothing is
    closed in order, because closing would wait for processes that wait for this one. Checkpoints
    are complete anyway, and the lock is released with the process.
    """
    try:
        yield
    except (InputError, ValueError, RuntimeError) as error:
        message = str(error).partition("\n")[0]
        lost = bool(_RUNTIME_ERROR.match(message))
        if jax.process_count() == 1 or not (lost or isinstance(error, InputError)):
            raise
        if lost:
            message = f"another process of the run was lost; continue with --resume: {message}"
        print("error:", message, file=sys.stderr, flush=True)
        os._exit(2)
