"""Every function of NumPy's and SciPy's interfaces, of numbers as users write them.

Types alone are compared with those of JAX: nothing is compiled. Values are compared elsewhere.
"""

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xform

A, B = jnp.array([0.3, 0.7, 0.2]), np.array([0.5, 0.2, 0.9])
M = jnp.array([[2.0, 0.3, 0.1], [0.3, 1.5, 0.2], [0.1, 0.2, 1.7]])
# One argument; two, of which either is differentiated; three.
ONE = A, 0.6, np.float64(0.6), B, M
TWO = (A, 0.6), (A, np.float64(0.4)), (A, 2), (A, B), (0.6, 0.4), (0.6, 2), (M, np.asarray(M))
THREE = (A, 0.1, 0.8), (A, np.float64(0.1), 2), (0.6, 0.1, 0.8), (A, B, 0.9)
MODULES = ("jax.numpy", "jax.numpy.linalg", "jax.numpy.fft")
# Not of arrays: files, settings, and functions of functions.
OTHER = {
    "apply_along_axis", "apply_over_axes", "array_repr", "array_str", "from_dlpack", "fromfile",
    "fromfunction", "frompyfunc", "get_printoptions", "load", "piecewise", "printoptions", "save",
    "savez", "set_printoptions", "vectorize",
}  # fmt: skip


def inexact(x: Any) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, np.inexact)


def kinds(t: Any, f: Callable[..., Any], x: Any) -> Any:
    """Types of the value, of its cotangent and of its tangent; or that there are none."""
    found: dict[str, Any] = {}

    def unit(y: Any) -> Any:
        return jnp.ones_like(y) if inexact(y) else np.zeros(np.shape(y), jax.dtypes.float0)

    def run(x: Any) -> None:
        for name in ("vjp", "jvp"):
            try:
                if name == "vjp":
                    y, pull = t.vjp(f, x)
                    out = y, pull(jax.tree.map(unit, y))
                else:
                    out = t.jvp(f, (x,), (unit(x),))
            except Exception:  # whatever is raised: where JAX raises, xform may know more
                out = None
            avals = [jax.typeof(a) for a in jax.tree.leaves(out)]
            found[name] = [(a.shape, a.dtype, getattr(a, "weak_type", False)) for a in avals]

    jax.eval_shape(run, x)
    return found


def calls(f: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], Any]]:
    """Functions of one argument, with it, of which JAX can make something that is inexact."""
    for x in ONE:
        yield (lambda x: f(x)), x  # a function of C is none that jit can take
    for a, b in TWO:
        yield (lambda x, b=b: f(x, b)), a
        yield (lambda x, b=b: f(b, x)), a
        yield (lambda x, a=a: f(a, x)), b
    for a, b, c in THREE:
        yield (lambda x, b=b, c=c: f(x, b, c)), a
        yield (lambda x, b=b, c=c: f(b, x, c)), a
        yield (lambda x, b=b, c=c: f(b, c, x)), a


def moves(f: Callable[..., Any], x: Any) -> bool:
    try:
        return inexact(x) and any(map(inexact, jax.tree.leaves(jax.eval_shape(f, x))))
    except Exception:  # no call of this function
        return False


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_types_of_derivatives_are_those_of_jax(module: str) -> None:
    held = importlib.import_module(module)
    wrong: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in sorted(set(dir(held)) - OTHER):
            f = getattr(held, name)
            if name.startswith("_") or not callable(f) or isinstance(f, type):
                continue
            for i, (g, x) in enumerate(calls(f)):
                if not moves(g, x):
                    continue
                ours, theirs = kinds(xform, g, x), kinds(jax, g, x)
                wrong += [(name, i, k, ours[k], theirs[k]) for k in theirs
                          if theirs[k] and ours[k] != theirs[k]]  # fmt: skip
    assert not wrong
