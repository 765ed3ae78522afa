"""Primitives in NumPy: `IN_NUMPY[name](params, *xs)`, for those with a simple meaning.

JAX runs the primitives that are not here, or that return NotImplemented. `ROUNDS` names the
primitives that round.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.gather import gather, scatter

Params = dict[str, Any]


def _elementwise(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, *xs: f(*xs)


def _reduced(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, x: f(x, axis=tuple(p["axes"]))


def _summed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, x: f(x, axis=tuple(p["axes"]), dtype=x.dtype)


def _running(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(p: Params, x: Any) -> Any:
        axis = p["axis"]
        if not p["reverse"]:
            return f(x, axis)
        return np.flip(f(np.flip(x, axis), axis), axis)

    return run


def _broadcast(p: Params, x: Any, *dynamic: Any) -> Any:
    shape, dims = p["shape"], p["broadcast_dimensions"]
    if dynamic:
        return NotImplemented
    if not dims:
        return np.broadcast_to(x, shape)
    full = [1] * len(shape)
    for d, n in zip(dims, x.shape, strict=True):
        full[d] = n
    return np.broadcast_to(np.reshape(x, full), shape)


def _reshape(p: Params, x: Any, *dynamic: Any) -> Any:
    if dynamic:
        return NotImplemented
    return np.reshape(x if p["dimensions"] is None else np.transpose(x, p["dimensions"]),
                      p["new_sizes"])  # fmt: skip


def _select(p: Params, which: Any, *cases: Any) -> Any:
    if np.ndim(which) == 0:
        return cases[int(which)]
    if len(cases) == 2:
        return np.where(which, cases[1], cases[0])
    return np.choose(which, cases)


def _convert(p: Params, x: Any) -> Any:
    dtype = p["new_dtype"]
    if not isinstance(dtype, np.dtype):
        return NotImplemented
    if x.dtype.kind == "c" and dtype.kind != "c":
        x = x.real
    if dtype.kind == "b":
        return x != 0
    return x.astype(dtype)


def _slice(p: Params, x: Any) -> Any:
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, p["start_indices"], p["limit_indices"], strides))]


def _pad(p: Params, x: Any, fill: Any) -> Any:
    config = p["padding_config"]
    shape = [n + max(n - 1, 0) * hole + max(low, 0) + max(high, 0)
             for n, (low, high, hole) in zip(x.shape, config, strict=True)]  # fmt: skip
    out = np.full(shape, fill, x.dtype)
    places, cut = [], []
    for n, m, (low, high, hole) in zip(x.shape, shape, config, strict=True):
        start = max(low, 0)
        places.append(
            slice(start, start + max((n - 1) * (hole + 1) + 1, 0) if n else start, hole + 1)
        )
        cut.append(slice(max(-low, 0), m - max(-high, 0)))
    out[tuple(places)] = x
    return out[tuple(cut)]


def _starts(starts: Any, sizes: Any, shape: Any) -> tuple[slice, ...]:
    """Return the place of a dynamic slice, moved inside the array."""
    at = [min(max(int(s), 0), n - m) for s, m, n in zip(starts, sizes, shape, strict=True)]
    return tuple(slice(s, s + m) for s, m in zip(at, sizes, strict=True))


def _dynamic_slice(p: Params, x: Any, *starts: Any) -> Any:
    return x[_starts(starts, p["slice_sizes"], x.shape)]


def _dynamic_update_slice(p: Params, x: Any, y: Any, *starts: Any) -> Any:
    out = np.array(x)
    out[_starts(starts, y.shape, x.shape)] = y
    return out


def _iota(p: Params, *dynamic: Any) -> Any:
    shape, d = p["shape"], p["dimension"]
    column = [n if i == d else 1 for i, n in enumerate(shape)]
    return np.broadcast_to(np.arange(shape[d], dtype=p["dtype"]).reshape(column), shape)


@functools.lru_cache(maxsize=4096)
def _letters(numbers: Any, n: int, m: int) -> str:
    """Return a dot_general as einsum's text."""
    (contract_a, contract_b), (batch_a, batch_b) = numbers
    rest = iter(string.ascii_letters)
    a, b = [""] * n, [""] * m
    for i, j in zip((*batch_a, *contract_a), (*batch_b, *contract_b), strict=True):
        a[i] = b[j] = next(rest)
    a, b = [x or next(rest) for x in a], [x or next(rest) for x in b]
    free_a = [x for i, x in enumerate(a) if i not in (*batch_a, *contract_a)]
    free_b = [x for i, x in enumerate(b) if i not in (*batch_b, *contract_b)]
    out = [a[i] for i in batch_a] + free_a + free_b
    return f"{''.join(a)},{''.join(b)}->{''.join(out)}"


def _dot(p: Params, a: Any, b: Any) -> Any:
    kind = p.get("preferred_element_type")
    if a.dtype != b.dtype or (kind is not None and kind != a.dtype):
        return NotImplemented
    (left, right), (batch_a, batch_b) = p["dimension_numbers"]
    numbers = (tuple(left), tuple(right)), (tuple(batch_a), tuple(batch_b))
    return np.einsum(_letters(numbers, np.ndim(a), np.ndim(b)), a, b)


def _sort(p: Params, *xs: Any) -> Any:
    if p["num_keys"] != 1 or xs[0].dtype.kind == "c":
        return NotImplemented
    order = np.argsort(xs[0], p["dimension"], kind="stable")
    return [np.take_along_axis(x, order, p["dimension"]) for x in xs]


def _split(p: Params, x: Any) -> Any:
    return np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"])


def _round(p: Params, x: Any) -> Any:
    if int(p["rounding_method"]) == 1:
        return np.rint(x)
    return np.trunc(x + np.copysign(0.5, x)) if np.all(np.abs(x) < 2**50) else NotImplemented


def _argument(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(p: Params, x: Any) -> Any:
        (axis,) = p["axes"]
        return np.asarray(f(x, axis)).astype(p["index_dtype"])

    return run


def _logsumexp(x: Any, axis: int) -> Any:
    return np.logaddexp.accumulate(x, axis)


def _clamp(p: Params, low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


def _pow(p: Params, x: Any, y: Any) -> Any:
    return np.power(x, y.astype(x.dtype)) if x.dtype.kind == "f" else NotImplemented


def _integer_pow(p: Params, x: Any) -> Any:
    if p["y"] < 0 and x.dtype.kind not in "fc":
        return NotImplemented
    return x ** p["y"] if p["y"] >= 0 else 1.0 / x ** -p["y"]


def _same(p: Params, *xs: Any) -> Any:
    return xs[0]


def _sign(x: Any) -> Any:
    return NotImplemented if x.dtype.kind == "c" else np.sign(x)


def _of(kinds: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """Restrict a function to some kinds of numbers."""

    def run(p: Params, *xs: Any) -> Any:
        return f(*xs) if all(x.dtype.kind in kinds for x in xs) else NotImplemented

    return run


def _quotient(a: Any, b: Any) -> Any:
    """Divide; integers are divided toward zero."""
    if a.dtype.kind in "fc":
        return np.divide(a, b)
    if a.dtype.kind != "i" or not np.all(b):
        return NotImplemented
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _remainder(a: Any, b: Any) -> Any:
    return np.fmod(a, b) if a.dtype.kind == "f" or np.all(b) else NotImplemented


def _top_k(p: Params, x: Any) -> Any:
    axis = p.get("axis", -1)
    order = np.take(np.argsort(-x, axis, kind="stable"), range(p["k"]), axis)
    return [np.take_along_axis(x, order, axis), order.astype(np.int32)]


_ROUNDING = {
    **dict.fromkeys(("add", "add_any"), _elementwise(np.add)),
    "sub": _elementwise(np.subtract),
    "mul": lambda p, a, b: a & b if a.dtype.kind == "b" else a * b,
    "div": _elementwise(_quotient),
    "rem": _of("fi", _remainder),
    "pow": _pow,
    "integer_pow": _integer_pow,
    "square": _elementwise(np.square),
    "sqrt": _of("fc", np.sqrt),
    "rsqrt": _of("f", lambda x: 1.0 / np.sqrt(x)),
    "cbrt": _of("f", np.cbrt),
    "logistic": _of("f", lambda x: 1.0 / (1.0 + np.exp(-x))),
    "atan2": _of("f", np.arctan2),
    "reduce_sum": _summed(np.sum),
    "reduce_prod": _summed(np.prod),
    "cumsum": _running(lambda x, axis: np.cumsum(x, axis, dtype=x.dtype)),
    "cumprod": _running(lambda x, axis: np.cumprod(x, axis, dtype=x.dtype)),
    "cumlogsumexp": _running(_logsumexp),
    "dot_general": _dot,
    **{
        name: _of("fc", getattr(np, found))
        for name, found in {
            **{n: n for n in ("sin", "cos", "tan", "tanh", "sinh", "cosh", "exp", "exp2", "expm1",
                              "log", "log1p", "log2")},
            **{n: f"arc{n[1:]}" for n in ("asin", "acos", "atan", "asinh", "acosh", "atanh")},
        }.items()
    },
}  # fmt: skip

ROUNDS = frozenset(_ROUNDING)

IN_NUMPY: dict[str, Callable[..., Any]] = {
    **_ROUNDING,
    "neg": _elementwise(np.negative),
    "abs": lambda p, x: np.abs(x),
    "sign": lambda p, x: _sign(x),
    "floor": _elementwise(np.floor),
    "ceil": _elementwise(np.ceil),
    "round": _round,
    "is_finite": _elementwise(np.isfinite),
    "max": _of("fiu", np.maximum),
    "min": _of("fiu", np.minimum),
    "clamp": _clamp,
    "real": lambda p, x: np.real(x),
    "imag": lambda p, x: np.imag(x),
    "complex": lambda p, a, b: a + 1j * b,
    "conj": lambda p, x: np.conj(x) if x.dtype.kind == "c" else x + x.dtype.type(0) * 1j,
    **{name: _elementwise(getattr(np, found)) for name, found in (
        ("eq", "equal"), ("ne", "not_equal"), ("lt", "less"), ("le", "less_equal"),
        ("gt", "greater"), ("ge", "greater_equal"), ("and", "bitwise_and"), ("or", "bitwise_or"),
        ("xor", "bitwise_xor"), ("not", "bitwise_not"))},
    "select_n": _select,
    "convert_element_type": _convert,
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_or": _reduced(np.any),
    "reduce_and": _reduced(np.all),
    "argmax": _argument(np.argmax),
    "argmin": _argument(np.argmin),
    "cummax": _running(lambda x, axis: np.maximum.accumulate(x, axis)),
    "cummin": _running(lambda x, axis: np.minimum.accumulate(x, axis)),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda p, x: np.squeeze(x, tuple(p["dimensions"])),
    "expand_dims": lambda p, x: np.expand_dims(x, tuple(p["dimensions"])),
    "transpose": lambda p, x: np.transpose(x, p["permutation"]),
    "rev": lambda p, x: np.flip(x, tuple(p["dimensions"])),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "split": _split,
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "unstack": lambda p, x: list(np.moveaxis(x, p["axis"], 0)),
    "tile": lambda p, x: np.tile(x, p["reps"]),
    "empty2": lambda p: np.zeros((), p["dtype"]),
    "gather": gather,
    "scatter": scatter(lambda old, new: new),
    "scatter-add": scatter(np.add),
    "scatter-sub": scatter(np.subtract),
    "scatter-mul": scatter(np.multiply),
    "scatter-max": scatter(np.maximum),
    "scatter-min": scatter(np.minimum),
    "top_k": _top_k,
    "slice": _slice,
    "pad": _pad,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    "sort": _sort,
    **dict.fromkeys(
        ("copy", "copy_p", "name", "stop_gradient", "some_lane", "loop_result"),
        _same,
    ),
    "keep_lane": lambda p, alive, new, old: new,
    "xform_materialize": lambda p, x: x,
    "xform_own_layout": lambda p, x: x,
    "xform_barrier": lambda p, *xs: list(xs[: p["n"]]),
    "optimization_barrier": lambda p, *xs: list(xs),
}  # fmt: skip

# Elementwise primitives without a NumPy function; JAX runs them on arrays of one size only.
SPECIAL = frozenset(
    ("erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "igamma", "igammac",
     "igamma_grad_a", "random_gamma_grad", "bessel_i0e", "bessel_i1e", "bessel_i0", "bessel_i1",
     "regularized_incomplete_beta", "nextafter")
)  # fmt: skip
