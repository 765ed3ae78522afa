"""The worker: a separate process that compiles one request and exits.

Run as `python -P worker.py FOLDER`. The worker reads `request.json` and `program` from the folder;
`program` is a serialized `jax.export` of a function lowered for the target's platform. It writes
`answer.json` and `module`, the HloProto of the compiled program. It imports JAX but not xform. The
end of its standard input means that the requesting process has ended: the worker then removes the
folder and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# The kinds of bytes that a compiler reports.
KINDS = ("argument", "output", "temp", "alias", "generated_code",
         "host_argument", "host_output", "host_temp", "host_alias")  # fmt: skip


def compile_and_read(
    lowered: Any, dump: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bytes | None]:
    """Compile a lowered function and read the compiler's figures.

    Args:
      lowered: JAX's `Lowered` object.
      dump: the folder for the compiler's dump.
      overrides: compiler options.

    Returns:
      A dict of `bytes` by kind and `compile_seconds`, and the HloProto, or None if the compiler
      wrote none. If the compiler refuses the program, for example because it is too large, the dict
      has `error` instead of `bytes`.
    """
    options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_proto": True, **(overrides or {})}
    start = time.perf_counter()
    try:
        stats = lowered.compile(compiler_options=options).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - start
        return {"error": str(error), "compile_seconds": seconds}, None
    seconds = time.perf_counter() - start
    read = lambda kind: int(getattr(stats, f"{kind}_size_in_bytes", None) or 0)
    return {"compile_seconds": seconds, "bytes": {k: read(k) for k in KINDS}}, _module(dump)


def _module(dump: Path) -> bytes | None:
    """The largest module that the compiler dumped after its last pass; small ones are helpers."""
    last = dump.glob("*after_optimizations.hlo.pb")
    return max((p.read_bytes() for p in last), key=len, default=None)


def devices(target: dict[str, Any]) -> Sequence[Any]:
    """The devices of a target, which need not be attached."""
    if target["platform"] == "cpu":
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=target["platform"], **target["topology"]).devices


def lower(exported: export.Exported, request: dict[str, Any]) -> Any:
    """Lower the exported function for the target's devices, with only the arguments it reads."""
    available, axes = devices(request["target"]), request["axes"]
    sizes, names, kinds = zip(*axes, strict=True) if axes else ((1,), ("device",), ("Auto",))
    array = np.array(available[: exported.nr_devices]).reshape(sizes)
    mesh = Mesh(array, names, axis_types=tuple(getattr(AxisType, k) for k in kinds))
    shardings = _shardings(exported, mesh) if axes else [None] * len(exported.in_avals)
    everywhere = NamedSharding(mesh, PartitionSpec())
    kept = exported.module_kept_var_idx
    types = [jax.ShapeDtypeStruct(exported.in_avals[i].shape, exported.in_avals[i].dtype,
                                  sharding=shardings[i] or everywhere) for i in kept]  # fmt: skip
    donated = tuple(at for at, i in enumerate(kept) if i in request["donated"])

    def call(*arrays: Any) -> Any:
        by = dict(zip(kept, arrays, strict=True))
        unread = lambda a: jnp.zeros(a.shape, a.dtype)
        avals = enumerate(exported.in_avals)
        return exported.call(*(by[i] if i in by else unread(a) for i, a in avals))

    call.__name__ = exported.fun_name
    # Without an argument on the mesh, only the mesh itself says where the program runs.
    here = any(type_.sharding.mesh is mesh for type_ in types)
    with contextlib.nullcontext() if here else jax.set_mesh(mesh):
        return jax.jit(call, donate_argnums=donated).lower(*types)


def _shardings(exported: export.Exported, mesh: Mesh) -> Sequence[Any]:
    """The sharding of each argument, with its memory kind.

    GPUs that are not attached do not list their memories, so on their mesh JAX loses the memory
    kind of an argument. On an abstract mesh it keeps the memory kind.
    """
    both = exported.in_shardings_jax(mesh), exported.in_shardings_jax(mesh.abstract_mesh)
    kind = lambda x: getattr(x, "memory_kind", None)
    offloaded = lambda x: kind(x) not in (None, "device")
    return [b if offloaded(b) and kind(a) != kind(b) else a for a, b in zip(*both, strict=True)]


def answer(folder: Path) -> None:
    """Compile the request in a folder and write the answer there."""
    request = json.loads((folder / "request.json").read_text())
    exported = export.deserialize(bytearray((folder / "program").read_bytes()))
    lowered = lower(exported, request)
    data, module = compile_and_read(lowered, folder / "dump", request["options"])
    if module is not None:
        (folder / "module").write_bytes(module)
    (folder / "answer.json").write_text(json.dumps(data))


def when_alone(pipe: int, then: Callable[[], None]) -> None:
    """Call `then` when a pipe ends; the requesting process holds its other end open."""
    while os.read(pipe, 4096):
        pass
    then()


def main(folder: Path) -> None:
    """Answer the request in a folder; exit early if the requesting process ends."""

    def leave() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=when_alone, args=(0, leave), daemon=True).start()
    answer(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
