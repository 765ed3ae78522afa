"""What a program costs: bytes of its values, FLOPs of its equations times their trip counts.

FLOPs are counted from the program, since the compiler's own count takes a loop's body once. One
elementwise operation on one element is one FLOP whatever its kind (`exp` like `add`) and its dtype
(complex like real); moving data is none. Equations that no output depends on are not counted, as
the compiler drops them. A count is of the whole program, over all devices; bytes are those on each
device, so far as types say how values are sharded.

| equation | FLOPs |
| --- | --- |
| elementwise, and whatever is not below | 1 per output element |
| reduction, cumulative sum | 1 per input element |
| dot, convolution | 2 per multiply-add; a tap of a window that falls on padding is none |
| scan | length x body |
| while | condition and body once: the number of trips is not known |
| cond | that of the dearest branch |
| jit, remat, custom rules | the body |
| shard_map | body x number of devices that it is mapped over |
| fft | 5 N log2 N, half of it for real data (Frigo and Johnson, "The design and implementation of FFTW3", 2005) |
| matrix factorizations | Golub and Van Loan, "Matrix Computations", 4th edition |
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from xform._jax import JaxprEqn, itemsize
from xform.hijax import is_vector
from xform.ir import Program, program
from xform.passes.dce import live
from xform.passes.structured import body
from xform.table import traits


def aval_bytes(aval: Any) -> int:
    """Bytes of a value of type `aval` on each device; 0 for float0 and for tokens.

    Of a type that is sharded over explicit axes these are the bytes of one shard, and within
    `shard_map` types are those of one device; of axes that the compiler decides about (`Auto`)
    types say nothing, and a value counts as if it were whole. A PRNG key counts its key data; a
    4-bit integer a whole byte, as JAX stores it.
    """
    if is_vector(aval):
        return sum(map(aval_bytes, aval.lo_ty()))
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * itemsize(dtype) // _shards(aval)


def _shards(aval: Any) -> int:
    """How many parts its type says that a value is in."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return 1
    sizes = sharding.mesh.shape
    parts = sharding.spec.partitions
    axes = (a for part in parts for a in (part if isinstance(part, tuple) else (part,)))
    return math.prod(sizes[a] for a in axes if a in sizes)


def program_flops(f: Callable[..., Any], *args: Any) -> int:
    """FLOPs of `f` at `args` (arrays, or `jax.ShapeDtypeStruct`s in pytrees); see the table above.

    Cost: one trace of `f`. Nothing is compiled or allocated.

    >>> from xform.cost import program_flops
    >>> program_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4)))
    48
    """
    return flops(program(jax.make_jaxpr(f)(*args)))


def flops(prog: Program) -> int:
    """FLOPs of a program, counted once for each program."""
    if "flops" not in prog.cache:
        prog.cache["flops"] = sum(equation_flops(e) for e in live(prog.equations, prog.outputs))
    return prog.cache["flops"]


def equation_flops(eqn: JaxprEqn) -> int:
    """FLOPs of one equation, with the programs that it holds."""
    known = traits(eqn.primitive)
    if known.flops is not None:
        return int(known.flops(eqn))
    if known.call:
        return flops(body(eqn))
    if known.fusion == "movement":
        return 0
    return operand_size(eqn) if known.fusion == "reduction" else sum(map(size, eqn.outvars))


def equation_bytes(eqn: JaxprEqn) -> float:
    """Bytes that running one equation again passes over."""
    known = traits(eqn.primitive)
    if known.bytes is not None:
        return known.bytes(eqn)
    return sum(aval_bytes(v.aval) for v in
               (eqn.invars if known.fusion == "reduction" else eqn.outvars))  # fmt: skip


def device_flops(eqn: JaxprEqn) -> float:
    """FLOPs of one equation on each device, if its work is shared as finely as its values are."""
    return equation_flops(eqn) / max(_shards(v.aval) for v in (*eqn.invars, *eqn.outvars))


# What the counts of single primitives, which stand in their rules, are made of.


def shape(v: Any) -> tuple[int, ...]:
    """The shape of a variable's type; of a type without one, that of no elements."""
    return getattr(v.aval, "shape", (0,))


def size(v: Any) -> int:
    """The number of elements of a variable."""
    return math.prod(shape(v))


def operand_size(eqn: JaxprEqn) -> int:
    """The number of elements of the first input."""
    return size(eqn.invars[0])


def factorization(cost: Callable[[int, int], float]) -> Callable[[JaxprEqn], float]:
    """A count in terms of the matrix's longer and shorter side, for each matrix of a batch."""

    def count(eqn: JaxprEqn) -> float:
        *batch, a, b = shape(eqn.invars[0])
        return math.prod(batch) * cost(max(a, b), min(a, b))

    return count
