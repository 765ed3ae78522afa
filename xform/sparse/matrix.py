"""`xform.sparse.jacobian` and `hessian`: compute only the elements that may be nonzero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from xform.errors import WrongArgument
from xform.introspection.argnums import numbers
from xform.introspection.callables import check_callable
from xform.sparse.coloring import HESSIAN, JACOBIAN, ORDERS
from xform.sparse.compressed import SparseMatrixFunction


def jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    pattern: Any = None,
    coloring: Literal["auto", "column", "row", "bidirectional"] = "auto",
    order: Literal["best", "natural", "largest_first", "smallest_last", "saturation"] = "best",
    chunk: int | None = None,
    format: Literal["bcoo", "scipy"] = "bcoo",
) -> SparseMatrixFunction:
    """Return a function that computes the Jacobian of `f` as a sparse matrix, from few products.

    Columns without nonzeros in the same row are computed together by one jvp (a push), rows without
    nonzeros in the same column by one vjp (a pull). Columns (or rows) that are computed together
    have the same colour. `xform.sparse.sparsity` finds the elements that may be nonzero.

    Args:
      f: pure function of pytrees of real arrays. Values that it closes over count as constants.
      argnums: position or positions of the arguments whose elements are the columns.
      pattern: a `Pattern`, a sparse array of SciPy or JAX, or a boolean matrix, `[m, n]`. It must
        contain every element that is ever nonzero. None: `xform.sparse.sparsity` finds it.
      coloring: "column" (pushes), "row" (pulls), "bidirectional" (both, for matrices with a few
        dense rows and columns), or "auto", which takes the fewest products.
      order: the order in which rows or columns get their colours, which decides how many colours
        are needed. "best" tries those that are not too slow for the size of the matrix, and takes
        the one with the fewest colours.
      chunk: how many products with vectors are computed at once, which bounds memory; None: all.
      format: "bcoo", or "scipy" for a `scipy.sparse.csr_array`, which does not work under `jit`.

    Returns:
      A `SparseMatrixFunction`: a function of the arguments of `f` that returns a
      `jax.experimental.sparse.BCOO` of shape `[m, n]`. It has one row for each element of the
      output and one column for each element of the input, leaf by leaf. The function works under
      `jit` and `vmap`. Its method `prepare(*args)` takes arrays or types, and returns the pattern
      and the colouring. If it is not called, the first call with new types computes them.

    Raises:
      WrongArgument: every element may be nonzero, so nothing is gained (pass `pattern` to override
        this), or an argument is invalid.
      WrongDtype: an input or output is not real.
      NotDifferentiable: `f` has side effects, or does not have the forward mode that pushes need or
        the reverse mode that pulls need.

    Cost: at the first call with new argument types, a trace, and Python code for each nonzero. At
    each call, one evaluation of `f` and one push or pull for each colour, `chunk` of them at once.
    Memory is `colours x m` numbers for pushes, `colours x n` for pulls.
    Source: Gebremedhin, Manne and Pothen, "What color is your Jacobian?", SIAM Review 47 (2005).

    >>> f = lambda x: x[1:] * x[:-1]
    >>> jacobian = xform.sparse.jacobian(f)
    >>> print(jacobian.prepare(jnp.arange(4.0)).coloring)
    column colouring: 2 pushes, 0 pulls
    >>> jacobian(jnp.arange(4.0)).todense().tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 3.0, 2.0]]
    """
    _check(f, "sparse.jacobian", argnums, coloring, JACOBIAN, order, chunk, format)
    return SparseMatrixFunction(f, argnums, "jacobian", pattern, coloring, order, chunk, format)


def hessian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    pattern: Any = None,
    coloring: Literal["auto", "star", "acyclic", "column"] = "auto",
    order: Literal["best", "natural", "largest_first", "smallest_last", "saturation"] = "best",
    chunk: int | None = None,
    format: Literal["bcoo", "scipy"] = "bcoo",
) -> SparseMatrixFunction:
    """Return a function that computes the Hessian of a scalar function as a sparse matrix.

    It is computed from a few Hessian-vector products: one for each colour, instead of one for each
    column. Columns of one colour are computed together.

    Args:
      f: pure function of pytrees of real arrays to a scalar. Values that it closes over count as
        constants.
      argnums: position or positions of the arguments whose elements are rows and columns.
      pattern: a `Pattern`, a sparse array of SciPy or JAX, or a boolean matrix, `[n, n]`. It must
        be symmetric and contain every element that is ever nonzero. None: `xform.sparse.sparsity`
        finds it.
      coloring: "star" reads each element directly from a product. "acyclic" takes fewer products,
        but computes elements by sums and differences, so rounding errors accumulate.
        "column" does not use symmetry. "auto" is "star".
      order: the order in which columns get their colours, which decides how many colours are
        needed. "best" tries those that are not too slow for the size of the matrix, and takes the
        one with the fewest colours.
      chunk: how many products with vectors are computed at once, which bounds memory; None: all.
      format: "bcoo", or "scipy" for a `scipy.sparse.csr_array`, which does not work under `jit`.

    Returns:
      A `SparseMatrixFunction`: a function of the arguments of `f` that returns a
      `jax.experimental.sparse.BCOO` of shape `[n, n]`, with both triangles. The function works
      under `jit` and `vmap`. Its method `prepare(*args)` takes arrays or types, and returns the
      pattern and the colouring. If it is not called, the first call with new types computes them.

    Raises:
      NotScalar: the output of `f` is not a scalar.
      WrongArgument: every element may be nonzero, so nothing is gained (pass `pattern` to override
        this), or an argument is invalid.
      WrongDtype: an input or the output is not real.
      NotDifferentiable: `f` has side effects, no reverse mode, or its gradient no forward mode.

    Cost: one gradient, and one jvp of the gradient for each colour, `chunk` of them at once.
    Source: Gebremedhin, Pothen, Tarafdar and Walther, "Efficient Computation of Sparse Hessians
    Using Coloring and Automatic Differentiation", INFORMS Journal on Computing 21 (2009).

    >>> f = lambda x: jnp.sum(x[1:] ** 2 * x[:-1])
    >>> hessian = xform.sparse.hessian(f)
    >>> hessian(jnp.arange(3.0)).todense().tolist()
    [[0.0, 2.0, 0.0], [2.0, 0.0, 4.0], [0.0, 4.0, 2.0]]
    """
    _check(f, "sparse.hessian", argnums, coloring, HESSIAN, order, chunk, format)
    return SparseMatrixFunction(f, argnums, "hessian", pattern, coloring, order, chunk, format)


def _check(f: Any, caller: str, argnums: Any, coloring: str, colorings: Sequence[str], order: str,
           chunk: Any, format: str) -> None:  # fmt: skip
    """Raise an error if an argument of `caller` is invalid."""
    check_callable(f, caller)
    numbers(argnums, caller, "argnums")
    choices = {
        "coloring": (coloring, colorings),
        "order": (order, ORDERS),
        "format": (format, ("bcoo", "scipy")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            listed = ", ".join(map(repr, known))
            raise WrongArgument(
                f"{caller} with {name}={value!r}", f"{name} has no such value", "",
                f"pass one of {listed}",
            )  # fmt: skip
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise WrongArgument(
            f"{caller} with chunk={chunk!r}",
            "it is not a positive integer",
            "",
            "pass an integer from 1 on, or None for all products at once",
        )
