"""What running an equation again costs: nothing but reading and writing, real work, or too much.

Elementwise operations, reductions and moves of data are fused by XLA with what reads them: run
again they cost no more passes over memory than saving them. Products, convolutions, sorts,
factorizations, loops and calls are work. Random numbers, effects, collectives and calls of foreign
code are not run again unless a policy says so by name.
"""

from __future__ import annotations

import math

from xform._jax import JaxprEqn
from xform.interpret.node import fork_p
from xform.passes.structured import body
from xform.planner.cost import aval_bytes, equation_flops
from xform.table import RULES

# Elementwise in form, but iterations inside: not free.
_ITERATIVE = frozenset((
    "bessel_i0e", "bessel_i1e", "digamma", "igamma", "igamma_grad_a", "igammac", "polygamma",
    "random_gamma_grad", "regularized_incomplete_beta", "zeta",
))  # fmt: skip
_ELEMENTWISE = frozenset((
    "add", "add_any", "and", "clamp", "complex", "conj", "copy", "copy_p", "div", "eq", "ge", "gt",
    "imag", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "population_count", "real", "reduce_precision", "rem", "round", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "square", "stop_gradient", "sub",
    "xor", "floor", "ceil", "convert_element_type", "name", "tie", "bitcast_convert_type",
))  # fmt: skip
_MOVES = frozenset((
    "broadcast_in_dim", "concatenate", "dynamic_slice", "dynamic_update_slice", "expand_dims",
    "gather", "iota", "pad", "pvary", "reshape", "rev", "slice", "split",
    "squeeze", "tile", "transpose",
))  # fmt: skip
_REDUCTIONS = frozenset((
    "argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce_xor",
))  # fmt: skip

# Random numbers, collectives, foreign code; a map over devices is the whole of its function.
_ONCE = frozenset((
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "custom_partitioning",
    "device_put", "ffi_call", "io_callback", "pallas_call", "pbroadcast", "pgather", "pmax", "pmin",
    "ppermute", "psum", "psum_invariant", "pure_callback", "ragged_all_to_all", "random_bits",
    "random_fold_in", "random_gamma", "random_seed", "random_split", "reduce_scatter",
    "rng_bit_generator", "rng_uniform", "shard_map", "threefry2x32", "unreduced_psum",
    "unreduced_reduce_scatter",
))  # fmt: skip

# What these call is opened by the compiler.
_CALLS = frozenset(("closed_call", "custom_jvp_call", "jit"))

# In bytes saved for each byte that is passed over again.
_FUSED, _REDUCED = 1 / 1024, 1 / 64


def fusible(eqn: JaxprEqn) -> bool:
    """Whether XLA fuses an equation with what reads its result; a call, if all that it calls."""
    name = eqn.primitive.name
    if eqn.primitive is fork_p or eqn.effects or name in _ITERATIVE:
        return False
    if name in _CALLS:
        return all(map(fusible, body(eqn).equations))
    if name in _ELEMENTWISE or name in _MOVES or name in _REDUCTIONS:
        return True
    return name in RULES and RULES[name].word == "pointwise"


def price(eqn: JaxprEqn, flop: float = math.inf) -> float:
    """The price of running an equation again, in bytes, if that of a FLOP of real work is `flop`.

    What fuses costs little, so that bytes decide; between equal bytes the less work wins, and a
    statistic of a row is worth saving.
    """
    if fusible(eqn):
        return _passed_over(eqn)
    if flop == math.inf or not repeatable(eqn):
        return math.inf
    called = eqn.params["node"].eqn if eqn.primitive is fork_p else eqn
    return flop * equation_flops(called) + _FUSED * sum(aval_bytes(v.aval) for v in called.outvars)


def repeatable(eqn: JaxprEqn) -> bool:
    """Whether an equation may be run again at all."""
    called = eqn.params["node"].eqn if eqn.primitive is fork_p else eqn
    return not called.effects and called.primitive.name not in _ONCE


def _passed_over(eqn: JaxprEqn) -> float:
    if eqn.primitive.name == "name":
        return 0.0
    if eqn.primitive.name in _CALLS:
        return sum(map(_passed_over, body(eqn).equations))
    if eqn.primitive.name in _REDUCTIONS:
        return _REDUCED * sum(aval_bytes(v.aval) for v in eqn.invars)
    return _FUSED * sum(aval_bytes(v.aval) for v in eqn.outvars)
