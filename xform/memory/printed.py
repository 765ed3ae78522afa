"""The StableHLO and the optimized HLO of a function, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import hlo_text
from xform.errors import CompilationFailed
from xform.memory.compilation import compile_for
from xform.memory.proto import Message


def stablehlo_text(f: Callable[..., Any], args: Sequence[Any]) -> str:
    """The StableHLO of `f`, which JAX passes to the compiler. Arguments may be types.

    Cost: one trace and one lowering.
    """
    return jax.jit(f).lower(*args).as_text()


def compiled_text(f: Callable[..., Any], args: Sequence[Any], target: str | None = None) -> str:
    """The optimized HLO of `f`, compiled for `target`. Arguments may be types.

    Raises:
      CompilationFailed: the compiler failed, or the program is too large for the target: then the
        compiler writes no HLO.

    Other errors are those of `xform.memory.compilation.compile_for`.
    """
    compilation = compile_for(f, args, target=target)
    if compilation.module is None:
        raise CompilationFailed(
            f"the optimized HLO of {compilation.function} for target={compilation.target.name!r}",
            compilation.verdict() if compilation.refused else "the compiler wrote no HLO",
            "",
            "name a larger device, or look at the StableHLO",
        )
    return hlo_text(Message(compilation.module).raw(1))
