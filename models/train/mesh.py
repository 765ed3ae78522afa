"""The devices of a run: a mesh of them by flags, on one machine or on many, and what lies where."""

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
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from models.errors import InputError
from models.nets.axes import BATCH, MESH_AXES, spec
from models.settings import nearest
from models.train.host import check_host

# How messages of JAX's runtime begin, of which collectives that fail are.
_OF_RUNTIME = re.compile("(UNKNOWN|UNAVAILABLE|INTERNAL|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


def sizes(text: str) -> dict[str, int]:
    """How many devices each axis has, in the order of `MESH_AXES`, by `data=4,fsdp=2`.

    Raises:
      InputError: it cannot be read.
    """
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in MESH_AXES or name in found:
            axes = ", ".join(MESH_AXES)
            raise InputError(
                f"--mesh {text}: {name!r} is none of {axes}, once{nearest(name, MESH_AXES)}"
            )
        if not size.isdecimal() or int(size) < 1:
            raise InputError(f"--mesh {text}: {name} is {size!r}, and must be a number of devices")
        found[name] = int(size)
    return {name: found.get(name, 1) for name in MESH_AXES}


def abstract_mesh(text: str) -> AbstractMesh:
    """The mesh without its devices, which need not be here."""
    axes = sizes(text)
    return AbstractMesh((*axes.values(),), (*axes,), axis_types=(AxisType.Auto,) * len(axes))


def mesh_or_none(text: str, offload: bool = False) -> AbstractMesh | None:
    """The same, of several devices, or of one that offloads: then it says which memory is meant."""
    return mesh if (mesh := abstract_mesh(text)).size > 1 or offload else None


def make_mesh(text: str, offload: bool = False) -> Mesh | None:
    """The mesh of the devices of all processes, or of the first ones; None for one device.

    One that offloads has a mesh too, which says which memory is meant.

    Raises:
      InputError: there are too few devices, some process would have none to itself, or they cannot
        offload.
    """
    axes = sizes(text)
    needed, there = int(np.prod([*axes.values()])), jax.device_count()
    if needed > there or (jax.process_count() > 1 and needed != there):
        raise InputError(
            f"--mesh {text or 'data=1'} is of {needed} devices, and {jax.process_count()} processes"
            f" have {there}"
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
    """Types of arrays with their shardings: those of variables by the names of their axes.

    What an optimizer keeps of a parameter lies as it does; what has no such axes is on each device.
    `memory` is that in which variables lie, if it is not the devices' own.
    """

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, nnx.Variable):
            return leaf.update(sharding=NamedSharding(mesh, P()))
        names, array = leaf.get_metadata().get("out_sharding") or (), leaf.get_value()
        where = spec(names, array.shape, mesh) if len(names) == array.ndim else P()
        return leaf.replace(array.update(sharding=NamedSharding(mesh, where, memory_kind=memory)))

    return jax.tree.map(place, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


def shares(axes: Mapping[str, int]) -> int:
    """How many groups of devices have examples of their own."""
    return math.prod(axes[name] for name in BATCH)


def batch_sharding(mesh: Mesh | AbstractMesh, size: int, axis: int) -> NamedSharding:
    """How an array with examples along `axis`, so many, lies: parted where they can be shared."""
    parted = size % shares(mesh.shape) == 0
    return NamedSharding(mesh, P(*[None] * axis, BATCH) if parted else P())


def check_batch(text: str, batch: int) -> None:
    """Refuse a batch that devices cannot share.

    Raises:
      InputError: it is no multiple of their number.
    """
    groups = shares(sizes(text))
    if batch % groups:
        raise InputError(
            f"--batch {batch} cannot be shared by {groups} groups of devices (--mesh {text}): give"
            " a multiple"
        )


def on_devices(batch: Any, mesh: Mesh | None, axis: int) -> Any:
    """A batch with examples along `axis` of each array; this process gives its devices theirs."""
    return batch if mesh is None else jax.tree.map(lambda x: _parted(x, mesh, axis), batch)


def types_on(batch: Any, mesh: Mesh | AbstractMesh | None, axis: int) -> Any:
    """Types of such a batch, with their shardings."""
    if mesh is None:
        return batch
    lies = lambda x: x.update(sharding=batch_sharding(mesh, x.shape[axis], axis))
    return jax.tree.map(lies, batch)


def _parted(batch: np.ndarray, mesh: Mesh, axis: int) -> jax.Array:
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
    """Whether it is so in any process: all of them then do the same."""
    if jax.process_count() == 1:
        return here
    return bool(np.any(multihost_utils.process_allgather(np.array(here))))


def begin_processes(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Join the processes of a run, if it has several: by flags, or as the environment says.

    Before any device is asked for. Of `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`, or what a cluster sets, JAX knows.

    Raises:
      InputError: the others were not found.
    """
    given = [x is not None for x in (coordinator, processes, process)]
    if any(given) and not all(given):
        raise InputError("--coordinator, --processes and --process belong together: give all three")
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
    # On CPUs two programs that run at once would mix their collectives up.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the processes did not find each other: {error}") from None


@contextlib.contextmanager
def ended_with_others() -> Iterator[None]:
    """Within, one of several processes that cannot go on, or lost another, ends: one line, code 2.

    At once: the others may wait for it, and to close anything in order it would wait for them. What
    was saved is whole, and the lock goes with the process.
    """
    try:
        yield
    except (InputError, ValueError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        lost = bool(_OF_RUNTIME.match(said))
        if jax.process_count() == 1 or not (lost or isinstance(error, InputError)):
            raise
        if lost:
            said = f"lost another process of the run, go on with --resume: {said}"
        print("error:", said, file=sys.stderr, flush=True)
        os._exit(2)
