"""The compiler's side: a process of its own, which compiles one request and ends.

Run as `python -P worker.py FOLDER`. In the folder lie `request.json` and `program`, a serialized
`jax.export` of a function lowered for the target's platform; `answer.json` and `module`, the
HloProto of the compiled program, are written there. It needs JAX and nothing of xform. When its
standard input ends, whoever asked is gone: the folder is removed, and the process ends.
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

# What the compiler says of bytes, by kind.
KINDS = ("argument", "output", "temp", "alias", "generated_code",
         "host_argument", "host_output", "host_temp", "host_alias")  # fmt: skip


def compile_and_read(
    lowered: Any, dump: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bytes | None]:
    """Compile, with the options that are given: bytes by kind, and seconds; and the HloProto.

    The proto is None where the compiler wrote none. A program that the compiler refuses, such as
    one that is too big, is answered with `error`.
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
    """The largest program that the compiler wrote after its last pass: small ones are helpers."""
    last = dump.glob("*after_optimizations.hlo.pb")
    return max((p.read_bytes() for p in last), key=len, default=None)


def devices(target: dict[str, Any]) -> Sequence[Any]:
    """Devices of a target, none of which need be here."""
    if target["platform"] == "cpu":
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=target["platform"], **target["topology"]).devices


def lower(exported: export.Exported, request: dict[str, Any]) -> Any:
    """The exported function, on the target's devices, of the arguments that it reads."""
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
    # Of a program that reads no argument on a device, the mesh alone says where it runs.
    here = any(type_.sharding.mesh is mesh for type_ in types)
    with contextlib.nullcontext() if here else jax.set_mesh(mesh):
        return jax.jit(call, donate_argnums=donated).lower(*types)


def _shardings(exported: export.Exported, mesh: Mesh) -> Sequence[Any]:
    """Where each argument lies, and in which memory.

    GPUs that are not here do not say which memories they have, and JAX then takes each argument for
    one on the device; a mesh that names no devices keeps the memory.
    """
    there = exported.in_shardings_jax(mesh), exported.in_shardings_jax(mesh.abstract_mesh)
    kind = lambda x: getattr(x, "memory_kind", None)
    waits = lambda x: kind(x) not in (None, "device")
    return [b if waits(b) and kind(a) != kind(b) else a for a, b in zip(*there, strict=True)]


def answer(folder: Path) -> None:
    """Compile the request in a folder."""
    request = json.loads((folder / "request.json").read_text())
    exported = export.deserialize(bytearray((folder / "program").read_bytes()))
    lowered = lower(exported, request)
    data, module = compile_and_read(lowered, folder / "dump", request["options"])
    if module is not None:
        (folder / "module").write_bytes(module)
    (folder / "answer.json").write_text(json.dumps(data))


def when_alone(pipe: int, then: Callable[[], None]) -> None:
    """Do this when a pipe ends, which whoever asked holds open."""
    while os.read(pipe, 4096):
        pass
    then()


def main(folder: Path) -> None:
    """Answer the request in a folder, for as long as somebody waits for it."""

    def leave() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=when_alone, args=(0, leave), daemon=True).start()
    answer(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
