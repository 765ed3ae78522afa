"""The cost of a program: bytes of its values, FLOPs of its equations times their trip counts.

FLOPs are counted from the program, because the compiler counts the body of a loop only once. One
elementwise operation on one element is one FLOP, whatever the operation (`exp` like `add`) and the
dtype (complex like real). Moving data takes no FLOPs. Equations that no output depends on are not
counted, because the compiler drops them. FLOPs are summed over all devices. Bytes are per device,
if the types of the values tell how they are sharded.

| equation | FLOPs |
| --- | --- |
| elementwise, and everything not listed below | 1 per output element |
| reduction, cumulative sum | 1 per input element |
| dot, convolution | 2 per multiply-add; the taps of a window that fall on padding do not count |
| scan | length x body |
| while | condition and body once: the trip count is not known, but for loops that xform makes (`iterations_scope`) |
| cond | the most expensive branch |
| jit, remat, custom rules | the body |
| shard_map | body x number of devices that it is mapped over |
| fft | 5 N log2 N, half of it for real data (Frigo and Johnson, "The design and implementation of FFTW3", 2005) |
| matrix factorizations | Golub and Van Loan, "Matrix Computations", 4th edition |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from xform._jax import JaxprEqn, itemsize
from xform.passes.dce import live
from xform.program.dimensions import number, numbers, product, shape
from xform.program.flow import Flow
from xform.program.hijax import is_differentiable_hitype
from xform.program.ir import Program, program
from xform.registry.table import flow_of, traits

_ITERATIONS = re.compile(r"xform\(iterations_(\d+)\)")


def aval_bytes(aval: Any) -> int:
    """Bytes of a value of type `aval` on each device; 0 for float0 and for tokens.

    A type that is sharded over explicit axes counts the bytes of one shard. Within `shard_map`,
    types are those of one device. For axes that the compiler decides about (`Auto`), types do not
    tell the sharding, and the full value counts. A PRNG key counts its key data. A 4-bit integer
    counts a whole byte, as JAX stores it.
    """
    if is_differentiable_hitype(aval):
        return sum(map(aval_bytes, aval.lo_ty()))
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else product(aval.shape) * itemsize(dtype) // _shards(aval)


def _shards(aval: Any) -> int:
    """Return the number of shards of a value; 1 if its type does not tell."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return 1
    sizes = sharding.mesh.shape
    parts = sharding.spec.partitions
    axes = (a for part in parts for a in (part if isinstance(part, tuple) else (part,)))
    return math.prod(sizes[a] for a in axes if a in sizes)


def program_flops(f: Callable[..., Any], *args: Any) -> int:
    """FLOPs of `f` at `args`, which are arrays or `jax.ShapeDtypeStruct`s in pytrees.

    The module's docstring has the table of counts.

    Cost: one trace of `f`. Nothing is compiled or allocated.

    >>> from xform.interpret.cost import program_flops
    >>> program_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4)))
    48
    """
    return flops(program(jax.make_jaxpr(f)(*args)))


def flops(prog: Program) -> int:
    """FLOPs of a program. The count is cached on the program."""
    if "flops" not in prog.cache:
        prog.cache["flops"] = sum(equation_flops(e) for e in live(prog.equations, prog.outputs))
    return prog.cache["flops"]


def equation_flops(eqn: JaxprEqn) -> int:
    """FLOPs of one equation, including its nested programs."""
    known = traits(eqn.primitive)
    if known.flops is not None:
        return int(number(known.flops(eqn)))
    if (flow := flow_of(eqn)) is not None:
        return _flops_through(eqn, flow)
    if known.fusion == "movement":
        return 0
    return operand_size(eqn) if known.fusion == "reduction" else sum(map(size, eqn.outvars))


def _flops_through(eqn: JaxprEqn, flow: Flow) -> int:
    """FLOPs of a loop, branch or call: of all iterations, or of the most expensive branch.

    A loop that ends by a condition counts once, unless xform made it.
    """
    if flow.index is not None:
        return max(map(flops, flow.programs))
    runs = iterations_of(eqn) if flow.condition is not None else 1
    return sum(map(flops, flow.programs)) * (runs if flow.length is None else number(flow.length))


def equation_bytes(eqn: JaxprEqn) -> float:
    """Bytes that one equation writes; for a reduction, the bytes that it reads.

    This is the estimate of the memory traffic that a recompute of the equation costs. Other reads
    do not count, because XLA fuses the recompute with its neighbours. A primitive may have a count
    of its own in its traits.
    """
    known = traits(eqn.primitive)
    if known.bytes is not None:
        return number(known.bytes(eqn))
    return sum(aval_bytes(v.aval) for v in
               (eqn.invars if known.fusion == "reduction" else eqn.outvars))  # fmt: skip


def device_flops(eqn: JaxprEqn) -> float:
    """FLOPs of one equation on each device.

    The work is divided by the largest number of shards among the inputs and outputs.
    """
    return equation_flops(eqn) / max(_shards(v.aval) for v in (*eqn.invars, *eqn.outvars))


def iterations_scope(n: int | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context that says how often the body of the `while` loop that is bound in it runs.

    It counts all runs in one run of the program, also if the loop is inside another one. None says
    nothing.
    """
    return contextlib.nullcontext() if n is None else jax.named_scope(f"xform(iterations_{n})")


def iterations_of(eqn: JaxprEqn) -> int:
    """Return how often the body of a `while` loop runs, by its `iterations_scope`; else 1."""
    return iterations_in(str(eqn.source_info.name_stack)) or 1


def iterations_in(scopes: str) -> int | None:
    """Return the number of the innermost of some scopes, if it is an `iterations_scope`; else None.

    >>> from xform.interpret.cost import iterations_in
    >>> iterations_in("layers/xform(iterations_12)")
    12
    """
    found = _ITERATIONS.search(scopes.rpartition("/")[2])
    return int(found[1]) if found else None


# Helpers for the FLOP counts in the rules of primitives.


def sizes(v: Any) -> tuple[int, ...]:
    """Return the shape of a variable's type as numbers, see `xform.program.dimensions`."""
    return numbers(shape(v))


def size(v: Any) -> int:
    """Return the number of elements of a variable."""
    return product(shape(v))


def operand_size(eqn: JaxprEqn) -> int:
    """Return the number of elements of the first input."""
    return size(eqn.invars[0])


def factorization(cost: Callable[[int, int], float]) -> Callable[[JaxprEqn], float]:
    """FLOPs of a matrix factorization: `cost(longer side, shorter side)` for each matrix."""

    def count(eqn: JaxprEqn) -> float:
        *batch, a, b = sizes(eqn.invars[0])
        return math.prod(batch) * cost(max(a, b), min(a, b))

    return count
