"""The worker: a separate process that compiles one request and exits. `remote.py` starts it.

Run as `python -P worker.py FOLDER`. The worker reads two files in the folder: `request.json`, and
`program`, a function that `jax.export` lowered for the target's platform and serialized. It writes
`answer.json`, and `module`, the HloProto of the compiled program. It imports JAX but not xform. The
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

# The compiler dumps the program as one plain file per module, whatever the user's flags ask for. A
# user's flags are in XLA_FLAGS or in the options of `jax.jit`. MaxText, for example, dumps only one
# of its modules.
_DUMP = {
    "xla_dump_hlo_as_proto": True,
    "xla_dump_hlo_module_re": ".*",
    "xla_dump_max_hlo_modules": -1,
    "xla_dump_compress_protos": False,
    "xla_dump_hlo_to_subfolder": False,
}


def compile_and_read(
    lowered: Any, dump: Path, overrides: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], bytes | None]:
    """Compile a lowered function, and return the compiler's bytes and its dump of the program.

    Args:
      lowered: JAX's `Lowered` object.
      dump: the folder for the compiler's dump.
      overrides: further compiler options. Options about the dump are ignored.

    Returns:
      A dict of `bytes` by kind and `compile_seconds`, and the HloProto, or None if the compiler
      wrote none. If the compiler refuses the program, for example because it is too large, the dict
      has `error` instead of `bytes`.
    """
    options = {**(overrides or {}), **_DUMP, "xla_dump_to": str(dump)}
    start = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        seconds = time.perf_counter() - start
        return {"error": str(error), "compile_seconds": seconds}, None
    seconds = time.perf_counter() - start
    return {"compile_seconds": seconds, "bytes": compiler_figures(compiled)}, _largest_module(dump)


def compiler_figures(compiled: Any) -> dict[str, int]:
    """Return the compiler's bytes of each kind in `KINDS` for JAX's `Compiled` object.

    The result is empty if the compiler reports no bytes.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return {}
    return {kind: int(getattr(stats, f"{kind}_size_in_bytes", None) or 0) for kind in KINDS}


def _largest_module(dump: Path) -> bytes | None:
    """Return the largest module that the compiler dumped after its last pass.

    Smaller ones are helper programs.
    """
    last = dump.glob("*after_optimizations.hlo.pb")
    return max((p.read_bytes() for p in last), key=len, default=None)


def devices(target: dict[str, Any]) -> Sequence[Any]:
    """Return the devices of a target, which need not be attached."""
    if target["platform"] == "cpu":
        return jax.devices("cpu")
    return topologies.get_topology_desc(platform=target["platform"], **target["topology"]).devices


def lower(exported: export.Exported, request: dict[str, Any]) -> Any:
    """Return the exported function, lowered for the target's devices: a `Lowered` object of JAX.

    It takes only the arguments that the function reads.
    """
    available, axes = devices(request["target"]), request["axes"]
    sizes, names, types_ = zip(*axes, strict=True) if axes else ((1,), ("device",), ("Auto",))
    array = np.array(available[: exported.nr_devices]).reshape(sizes)
    mesh = Mesh(array, names, axis_types=tuple(getattr(AxisType, name) for name in types_))
    shardings = _shardings(exported, mesh) if axes else [None] * len(exported.in_avals)
    replicated = NamedSharding(mesh, PartitionSpec())
    read = exported.module_kept_var_idx  # positions of the arguments that the function reads
    avals = exported.in_avals
    types = [
        jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i] or replicated)
        for i in read
    ]
    donated = tuple(k for k, i in enumerate(read) if i in request["donated"])

    def call(*arrays: Any) -> Any:
        """Call the exported function, with zeros for the arguments that it does not read."""
        given = dict(zip(read, arrays, strict=True))
        zeros = lambda a: jnp.zeros(a.shape, a.dtype)
        return exported.call(*(given[i] if i in given else zeros(a) for i, a in enumerate(avals)))

    call.__name__ = exported.fun_name
    # If no argument is on the mesh, JAX must be told where the program runs.
    on_mesh = any(type_.sharding.mesh is mesh for type_ in types)
    with contextlib.nullcontext() if on_mesh else jax.set_mesh(mesh):
        return jax.jit(call, donate_argnums=donated).lower(*types)


def _shardings(exported: export.Exported, mesh: Mesh) -> Sequence[Any]:
    """Return the sharding of each argument, with its memory kind.

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


def call_at_end(pipe: int, function: Callable[[], None]) -> None:
    """Call a function when a pipe ends. The requesting process holds the pipe's other end open."""
    while os.read(pipe, 4096):
        pass
    function()


def main(folder: Path) -> None:
    """Answer the request in a folder; exit early if the requesting process ends."""

    def leave() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=call_at_end, args=(0, leave), daemon=True).start()
    answer(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
