"""What the compiler makes of a function, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import hlo_text
from xform.errors import CompilationFailed
from xform.memory.compilation import compile_for
from xform.memory.proto import Message


def stablehlo_text(f: Callable[..., Any], args: Sequence[Any]) -> str:
    """What JAX hands to the compiler: one trace and lowering. Arguments may be types."""
    return jax.jit(f).lower(*args).as_text()


def compiled_text(f: Callable[..., Any], args: Sequence[Any], target: str | None = None) -> str:
    """The optimized HLO of `f`, compiled for `target`. Arguments may be types.

    Raises: what `xform.memory.compilation.compile_for` raises, and `CompilationFailed` for a
    program that is too big for the target, of which a compiler writes nothing down.
    """
    compilation = compile_for(f, args, target=target)
    if compilation.module is None:
        raise CompilationFailed(
            f"the optimized HLO of {compilation.function} for target={compilation.target.name!r}",
            compilation.verdict() if compilation.refused else "the compiler wrote none down",
            "",
            "name a larger device, or look at the StableHLO",
        )
    return hlo_text(Message(compilation.module).raw(1))
