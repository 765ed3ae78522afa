"""The text of a function's program before XLA (StableHLO) and after XLA (optimized HLO)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform._jax import hlo_text, jit
from xform.errors import CompilationFailed
from xform.memory.compilation import compile_for
from xform.memory.proto import Message


def stablehlo_text(f: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the StableHLO of `f` as text, which JAX passes to the compiler.

    `args` are arrays or `jax.ShapeDtypeStruct`s in pytrees.

    Cost: one trace and one lowering.
    """
    return jit(f).lower(*args).as_text()


def compiled_text(f: Callable[..., Any], args: Sequence[Any], target: str | None = None) -> str:
    """Return the optimized HLO of `f`, compiled for `target`, as text.

    `args` are arrays or `jax.ShapeDtypeStruct`s in pytrees. `target` is a name such as
    "tpu:v5e:1x1"; None is JAX's default backend.

    Raises:
      WrongArgument: the target is unknown.
      MissingExtra: a package that is needed to compile for the target is not installed.
      CompilationFailed: the compiler failed, or the program is too large for the target: then the
        compiler writes no HLO.
    """
    report = compile_for(f, args, target=target)
    if report.module is None:
        raise CompilationFailed(
            f"the optimized HLO of {report.function} for target={report.target!r}",
            report.verdict() if report.refused else "the compiler wrote no HLO",
            "",
            "name a larger device, or look at the StableHLO",
        )
    return hlo_text(Message(report.module).raw(1))
