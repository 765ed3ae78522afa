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
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn
from xform.ir import Program, program, trace
from xform.passes.dce import live


def aval_bytes(aval: Any) -> int:
    """Bytes of a value of type `aval` on each device; 0 for float0 and for tokens.

    Of a type that is sharded over explicit axes these are the bytes of one shard, and within
    `shard_map` types are those of one device; of axes that the compiler decides about (`Auto`)
    types say nothing, and a value counts as if it were whole. A PRNG key counts its key data; a
    4-bit integer a whole byte, as JAX stores it.
    """
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(aval.shape) * dtype.itemsize // _shards(aval)


def _shards(aval: Any) -> int:
    """How many parts its type says that a value is in."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        return 1
    sizes = sharding.mesh.shape
    axes = (a for part in sharding.spec for a in (part if isinstance(part, tuple) else (part,)))
    return math.prod(sizes[a] for a in axes if a in sizes)


def program_flops(f: Callable[..., Any], *args: Any) -> int:
    """FLOPs of `f` at `args` (arrays, or `jax.ShapeDtypeStruct`s in pytrees); see the table above.

    Cost: one trace of `f`. Nothing is compiled or allocated.

    >>> from xform.planner.cost import program_flops
    >>> program_flops(jnp.dot, jnp.ones((2, 3)), jnp.ones((3, 4)))
    48
    """
    return flops(trace(f, *args))


def flops(prog: Program) -> int:
    """FLOPs of a program, counted once for each program."""
    if "flops" not in prog.cache:
        prog.cache["flops"] = sum(equation_flops(e) for e in live(prog.equations, prog.outputs))
    return prog.cache["flops"]


def equation_flops(eqn: JaxprEqn) -> int:
    """FLOPs of one equation, with the programs that it holds."""
    name = eqn.primitive.name
    if name in _COUNT:
        return int(_COUNT[name](eqn))
    bodies = [eqn.params[k] for k in _BODIES if k in eqn.params]
    if bodies:
        return flops(program(bodies[0]))
    return 0 if name in _MOVES else sum(map(_size, eqn.outvars))


def device_flops(eqn: JaxprEqn) -> float:
    """FLOPs of one equation on each device, if its work is shared as finely as its values are."""
    return equation_flops(eqn) / max(_shards(v.aval) for v in (*eqn.invars, *eqn.outvars))


def devices_of(eqn: JaxprEqn) -> int:
    """How many devices a `shard_map` maps its body over; 1 for all other equations."""
    if eqn.primitive.name != "shard_map":
        return 1
    return math.prod(eqn.params["mesh"].shape[a] for a in eqn.params["newly_manual_axes"])


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", (0,))


def _size(v: Any) -> int:
    return math.prod(_shape(v))


def _inputs(eqn: JaxprEqn) -> int:
    return _size(eqn.invars[0])


def _dot(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0]) * _product(eqn.invars[0], contracted)


def _ragged_dot(eqn: JaxprEqn) -> int:
    """Each row of the left side meets one group of the right side."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    outputs = _size(eqn.outvars[0])
    if numbers.lhs_ragged_dimensions[0] in contracted:  # every group has a result of its own
        outputs //= _shape(eqn.outvars[0])[0]
    return 2 * outputs * _product(eqn.invars[0], contracted)


def _product(v: Any, axes: Sequence[int]) -> int:
    return math.prod(_shape(v)[i] for i in axes)


def _convolution(eqn: JaxprEqn) -> int:
    """2 for each output element, input channel of its group, and window tap on the input."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    x, w, y = map(_shape, (*eqn.invars, *eqn.outvars))
    taps = math.prod(
        _taps(x[i], w[j], y[k], *options)
        for i, j, k, *options in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            params["window_strides"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            params["padding"],
            strict=True,
        )
    )
    batch, channels = (y[i] for i in numbers.out_spec[:2])
    return 2 * batch * channels * w[numbers.rhs_spec[1]] * taps


def _taps(n_in: int, n_window: int, n_out: int, stride: int, dilation: int, spread: int,
          padding: tuple[int, int]) -> int:  # fmt: skip
    """Pairs of an output position and a window position that meet an input element, on one axis.

    `dilation` is that of the input, `spread` that of the window.
    """
    at = np.arange(n_out)[:, None] * stride + np.arange(n_window) * spread - padding[0]
    return int(np.sum((at >= 0) & (at <= (n_in - 1) * dilation) & (at % dilation == 0)))


def _fft(eqn: JaxprEqn) -> float:
    kind, n = eqn.params["fft_type"], math.prod(eqn.params["fft_lengths"])
    real = kind.name in ("RFFT", "IRFFT")
    signal = eqn.invars[0] if kind.name != "IRFFT" else eqn.outvars[0]
    return (2.5 if real else 5) * _size(signal) * math.log2(n) if n else 0


def _window(eqn: JaxprEqn) -> int:
    inside = flops(program(eqn.params["jaxpr"])) if "jaxpr" in eqn.params else 1
    elements = min(_size(eqn.invars[0]), _size(eqn.outvars[0]))
    return elements * math.prod(eqn.params["window_dimensions"]) * inside


def _sort(eqn: JaxprEqn) -> int:
    n = _shape(eqn.invars[0])[eqn.params["dimension"]]
    return _inputs(eqn) * eqn.params["num_keys"] * math.ceil(math.log2(max(n, 1)))


def _factorization(cost: Callable[[int, int], float]) -> Callable[[JaxprEqn], float]:
    """A cost in terms of the matrix's longer and shorter side, for each matrix of a batch."""

    def count(eqn: JaxprEqn) -> float:
        *batch, a, b = _shape(eqn.invars[0])
        return math.prod(batch) * cost(max(a, b), min(a, b))

    return count


def _svd(eqn: JaxprEqn) -> float:
    vectors = lambda m, n: 6 * m * n**2 + 20 * n**3
    values = lambda m, n: 2 * m * n**2 + 2 * n**3
    return _factorization(vectors if eqn.params["compute_uv"] else values)(eqn)


def _pallas(eqn: JaxprEqn) -> int:
    """The kernel's own estimate if it gives one, else its body at every point of its grid."""
    estimate, grid = eqn.params["cost_estimate"], eqn.params["grid_mapping"].grid
    return estimate.flops if estimate else math.prod(grid) * flops(program(eqn.params["jaxpr"]))


_qr = _factorization(lambda m, n: 2 * m * n**2 - 2 * n**3 / 3)

_BODIES = ("jaxpr", "call_jaxpr", "fwd_jaxpr", "call", "callee")
_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "top_k", "approx_top_k",
)  # fmt: skip
_WINDOWS = (
    "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
    "select_and_scatter", "select_and_scatter_add", "select_and_gather_add",
)  # fmt: skip
_SCATTERS = ("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
_MOVES = (
    "all_gather", "all_to_all", "after_all", "axis_index", "bitcast_convert_type",
    "broadcast_in_dim", "complex", "concatenate", "convert_element_type", "copy", "copy_p",
    "create_token", "device_put", "dynamic_slice", "dynamic_update_slice", "empty2", "full",
    "gather", "get", "imag", "iota", "keep_lane", "loop_result", "name", "optimization_barrier",
    "pad", "pbroadcast", "pcast", "ppermute", "pvary", "ragged_all_to_all", "random_seed",
    "random_unwrap", "random_wrap", "real", "reshape", "reshard", "rev", "scatter",
    "sharding_constraint", "slice", "some_lane", "split", "squeeze", "stop_gradient", "store_lanes",
    "swap", "tie", "tile", "transpose",
)  # fmt: skip
_COUNT: dict[str, Callable[[JaxprEqn], float]] = {
    "dot_general": _dot,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
    "fft": _fft,
    "scan": lambda e: e.params["length"] * flops(program(e.params["jaxpr"])),
    "while": lambda e: sum(flops(program(e.params[k])) for k in ("cond_jaxpr", "body_jaxpr")),
    "cond": lambda e: max(flops(program(b)) for b in e.params["branches"]),
    "shard_map": lambda e: devices_of(e) * flops(program(e.params["jaxpr"])),
    "custom_linear_solve": lambda e: flops(program(e.params["jaxprs"].solve)),
    "pallas_call": _pallas,
    "reduce": lambda e: _inputs(e) * flops(program(e.params["jaxpr"])),
    "sort": _sort,
    "cholesky": _factorization(lambda m, n: n**3 / 3),
    "lu": _factorization(lambda m, n: m * n**2 - n**3 / 3),
    "qr": lambda e: 2 * _qr(e),
    "geqrf": _qr,
    "householder_product": _qr,
    "eigh": _factorization(lambda m, n: 9 * n**3),
    "eig": _factorization(lambda m, n: 25 * n**3),
    "svd": _svd,
    "triangular_solve": lambda e: _size(e.invars[1]) * _shape(e.invars[0])[-1],
    **dict.fromkeys(_REDUCTIONS, _inputs),
    **dict.fromkeys(_WINDOWS, _window),
    **dict.fromkeys(_SCATTERS, lambda e: _size(e.invars[2])),
}
