"""A random program as data: typed lines in nested functions, and their Python source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

import xform
from tests.fuzz import folded
from xform._jax import match_weak_type

STATES = 6


@dataclasses.dataclass(frozen=True)
class Value:
    """A variable, or a literal whose name is its text; `most` bounds its absolute value.

    An input of the program has a `form`: the type that a user would pass (`generate.FORMS`).
    """

    name: str
    shape: tuple[int, ...] = ()
    kind: str = "f"
    most: float = 1.0
    form: str = ""

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Line:
    """`targets = text`, where `{0}` is the first of `args` and `{f0}` the first of `blocks`.

    A text of several lines assigns in its last one.
    """

    targets: tuple[Value, ...]
    text: str
    args: tuple[Value, ...] = ()
    blocks: tuple[Block, ...] = ()


@dataclasses.dataclass(frozen=True)
class Block:
    """A function; `takes` and `first` unpack its parameters, `tail` packs `{0}`, ...."""

    name: str
    params: tuple[Value, ...]
    lines: tuple[Line, ...]
    results: tuple[Value, ...]
    takes: str | None = None
    first: str = ""
    tail: str | None = None


def pack(names: Iterator[str] | list[str]) -> str:
    """Return a tuple as text."""
    return "(" + "".join(f"{n}, " for n in names).rstrip(" ") + ")"


def render(block: Block, indent: int = 0) -> Iterator[str]:
    """Yield the lines of a block's source."""
    pad = " " * indent
    takes = ", ".join(v.name for v in block.params) if block.takes is None else block.takes
    yield f"{pad}def {block.name}({takes}):"
    if block.first:
        yield f"{pad}    {block.first}"
    for line in block.lines:
        for inner in line.blocks:
            yield from render(inner, indent + 4)
        names = {f"f{i}": inner.name for i, inner in enumerate(line.blocks)}
        *before, last = line.text.format(*(v.name for v in line.args), **names).split("\n")
        yield from (f"{pad}    {text}" for text in before)
        yield f"{pad}    {', '.join(v.name for v in line.targets)} = {last}"
    results = [v.name for v in block.results]
    tail = pack(results) if block.tail is None else block.tail.format(*results)
    yield f"{pad}    return {tail}"


def size(block: Block) -> int:
    """Return the number of lines, including nested ones."""
    return sum(1 + sum(map(size, line.blocks)) for line in block.lines)


def depth(block: Block) -> int:
    """Return the nesting depth of its functions."""
    return max((1 + depth(b) for line in block.lines for b in line.blocks), default=0)


def masked_while(cond: Callable[..., Any], body: Callable[..., Any], start: Any) -> Any:
    """Run a while_loop of at most `STATES` steps as a scan, which JAX can reverse."""

    def step(state: Any, _: None) -> Any:
        live = cond(state)
        return jax.tree.map(lambda a, b: jnp.where(live, a, b), body(state), state), None

    types = jax.eval_shape(lambda: lax.while_loop(cond, body, start))
    return jax.tree.map(match_weak_type, lax.scan(step, start, None, length=STATES)[0], types)


class PlainVmap:
    """A `custom_vmap` function that forgets its rule, which JAX cannot differentiate.

    The rule says that each output is batched if any input is. A choice that depends on all inputs
    tells `vmap` the same. It matters to a `custom_vjp` around it: cotangents of an output
    that is not batched are summed over the lanes before its backward function sees them.
    """

    def __init__(self, f: Callable[..., Any]):
        self.f = f

    def __call__(self, *args: Any) -> Any:
        never = jnp.any(jnp.stack([jnp.any((x != x) & (x == x)) for x in args]))
        return tuple(jnp.where(never, y, y) for y in self.f(*args))

    def def_vmap(self, rule: Callable[..., Any]) -> None:
        """Ignore the rule."""


def function(source: str, for_jax: bool = False, back: bool = False) -> Callable[..., Any]:
    """Return the function `program` of a source, in a form that JAX can push or reverse (`back`).

    `F`, `C` and `U` in it are the widest floats, complex and unsigned numbers that JAX has now.
    """
    wide = jax.config.jax_enable_x64
    names: dict[str, Any] = {
        "C": np.complex128 if wide else np.complex64,
        "F": np.float64 if wide else np.float32,
        "SymbolicZero": SymbolicZero,
        "U": np.uint64 if wide else np.uint32,
        "checkpoint_name": checkpoint_name,
        "frexp": folded.frexp if for_jax else jnp.frexp,
        "custom_vmap": PlainVmap if for_jax else custom_vmap,
        "jax": jax,
        "jnp": jnp,
        "lax": lax,
        "ldexp": folded.ldexp if for_jax else jnp.ldexp,
        "np": np,
        "reduce": folded.reduce if for_jax else lax.reduce,
        "reduce_window": folded.reduce_window if for_jax else lax.reduce_window,
        "while_loop": masked_while if back else lax.while_loop,
        "xform": xform,
    }
    exec(compile(source, "<program>", "exec"), names)
    return names["program"]
