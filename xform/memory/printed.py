"""What the compiler makes of a function, as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform.errors import WrongArgument


def stablehlo_text(f: Callable[..., Any], args: Sequence[Any]) -> str:
    """What JAX hands to the compiler: one trace and lowering. Arguments may be types."""
    return jax.jit(f).lower(*args).as_text()


def compiled_text(f: Callable[..., Any], args: Sequence[Any], target: str | None = None) -> str:
    """The optimized HLO of `f`, compiled for `target` (None: cpu). Arguments may be types."""
    if target not in (None, "cpu"):
        raise WrongArgument(
            f"the optimized HLO for target={target!r}",
            "only the CPU's compiler is asked for its text",
            "",
            "leave out the target, or look at the StableHLO, which is the same for all",
        )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(f).lower(*args).compile().as_text() or ""
