"""`memory_analysis`: compile a function for a device, at hand or not, and report its memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from xform.budgets import bytes_of
from xform.callables import check_callable
from xform.memory.asked import asked, short
from xform.memory.compilation import compile_for
from xform.memory.report import MemoryReport


def memory_analysis(
    f: Callable[..., Any],
    *args: Any,
    target: str | None = None,
    mesh: Mapping[str, int] | None = None,
    in_specs: Any = None,
    donate_argnums: int | Sequence[int] = (),
    capacity: str | int | None = None,
    **kwargs: Any,
) -> MemoryReport:
    """Compile `f` for a device, which need not be here, and report the memory that it needs there.

    Args:
      f: a function of pytrees of arrays, or one that `jax.jit` made: its donation, shardings and
        static arguments are kept.
      *args: arrays, or `jax.ShapeDtypeStruct`s (with shardings, if wanted) in pytrees. Nothing is
        run, and for the latter nothing is allocated. Strings, and objects that are no pytrees of
        arrays, are held as they are; of a function that `jax.jit` made, its static arguments are.
      target: `"cpu"`, `"cpu:8"`, `"tpu:v5e:2x2"` (v4, v5e, v5p, v6e, tpu7x, and a slice),
        `"gpu:h100"` or `"gpu:h100:8"` (a100-40, a100-80, h100, h200, b200, l4, rtx4090); None is
        JAX's default backend. `python -m xform doctor` says which of them work here.
      mesh: sizes of the axes of a mesh of the target's devices, by name: `{"data": 4, "model": 4}`.
      in_specs: a `PartitionSpec` for each of `args`, or a prefix of their tree, over `mesh` or the
        mesh of the arguments' own shardings, which hold without it.
      donate_argnums: positions of the arguments whose memory may be reused, as for `jax.jit`.
      capacity: bytes of a device, or a string such as `"14 GiB"`, in the place of what is known of
        it: of a CPU nothing is, and of a GPU JAX takes three quarters by default.
      **kwargs: keyword arguments of `f`, of the same kinds as `args`.

    Returns:
      A `MemoryReport`, of one device. The headline `total_bytes` is argument + output + temp -
      alias; a program that is too big for the device gives a report that says by how much.

    Raises:
      WrongArgument: `f` is not callable, there is no such target, or the mesh does not fit it.
      MissingExtra: what compiling for the target needs is not installed.
      CompilationFailed: the compiler failed.

    Cost: one trace, one lowering and one compilation of `f`; for a device that is not here, in a
    process of its own. What was compiled is remembered, on disk too if JAX is told to keep what it
    compiles (`jax_compilation_cache_dir`).
    Source: https://docs.jax.dev/en/latest/aot.html

    >>> x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> report = xform.memory_analysis(lambda x: x @ x, x)
    >>> report.argument_bytes, report.output_bytes, report.flops
    (262144, 262144, 33554432)
    """
    check_callable(f, "memory_analysis")
    compilation = compile_for(f, args, kwargs, target, mesh=mesh, in_specs=in_specs,
                              donate_argnums=donate_argnums)  # fmt: skip
    if capacity is not None:
        n = bytes_of(capacity, f"capacity={capacity!r}")
        device = dataclasses.replace(compilation.target.device, capacity_bytes=n)
        compilation = dataclasses.replace(
            compilation, target=dataclasses.replace(compilation.target, device=device)
        )
    leaves = [jax.typeof(x) if not isinstance(x, jax.ShapeDtypeStruct) else x
              for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "shape")]  # fmt: skip
    shapes = frozenset((short(x.dtype), tuple(x.shape)) for x in leaves)
    what = asked(f, args, kwargs)
    if (
        mesh is not None
        and in_specs is None
        and not any(map(_placed, jax.tree.leaves((args, kwargs))))
    ):
        what = dataclasses.replace(what, note=_REPLICATED)
    return MemoryReport(compilation, shapes, what)


_REPLICATED = (
    "no argument is sharded over the mesh, so each device holds all of them whole: give in_specs, "
    "on the command line --in-specs x=data"
)


def _placed(x: Any) -> bool:
    """Whether an argument says how it lies on a mesh."""
    return isinstance(getattr(x, "sharding", None), NamedSharding)
