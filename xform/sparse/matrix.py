"""`sparse_jacobian`, `sparse_hessian`: only the elements that may differ from zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from xform.callables import check_callable
from xform.errors import WrongArgument
from xform.sparse.coloring import HESSIAN, JACOBIAN, ORDERS
from xform.sparse.compressed import Sparse
from xform.transforms.function import numbers


def sparse_jacobian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    pattern: Any = None,
    coloring: Literal["auto", "column", "row", "bidirectional"] = "auto",
    order: Literal["best", "natural", "largest_first", "smallest_last", "saturation"] = "best",
    chunk: int | None = None,
    format: Literal["bcoo", "scipy"] = "bcoo",
) -> Sparse:
    """The Jacobian of `f` as a sparse matrix, from a few products instead of one for each column.

    Columns that share no row are pushed forward together, rows that share no column pulled back
    together. What may differ from zero is found from the program (`xform.sparsity`).

    Args:
      f: pure function of pytrees of real arrays. What it closes over counts as constant.
      argnums: position or positions of the arguments whose elements are the columns.
      pattern: a `Pattern`, a sparse array of SciPy's or JAX's, or a matrix of booleans, `[m, n]`,
        which must hold every element that is ever nonzero; None: found by `xform.sparsity`.
      coloring: "column" (pushes), "row" (pulls), "bidirectional" (both: for a few dense rows and
        columns), or "auto", whichever takes the fewest products.
      order: in which order rows or columns get their colours; "best" tries several.
      chunk: how many products are computed at once; None: all.
      format: "bcoo", or "scipy" for a `scipy.sparse.csr_array`, which is none under `jit`.

    Returns:
      A function of the arguments of `f`, whose value is a `jax.experimental.sparse.BCOO` of shape
      `[m, n]`: a row for each element of the output, a column for each of the input, leaf by leaf.
      It has a method `prepare(*args)`, which takes types too, and returns the pattern and the
      colours; the first call for some types prepares. It works under `jit` and `vmap`.

    Raises:
      WrongArgument: every element may differ from zero, so that nothing is gained (give `pattern`
        to insist), or an argument is unusable.
      WrongDtype: an input or output is not real.
      NotDifferentiable: `f` has effects, or a mode that was asked for does not exist.

    Cost: to prepare, a trace, and Python for each nonzero. Then one evaluation of `f` and a push or
    a pull for each colour, `chunk` of them at once; memory for `colours x m` (or `n`) numbers.
    Source: Gebremedhin, Manne and Pothen, "What color is your Jacobian?", SIAM Review 47 (2005).

    >>> f = lambda x: x[1:] * x[:-1]
    >>> jacobian = xform.sparse_jacobian(f)
    >>> print(jacobian.prepare(jnp.arange(4.0)).coloring)
    column colouring: 2 pushes, 0 pulls
    >>> jacobian(jnp.arange(4.0)).todense().tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 1.0, 0.0], [0.0, 0.0, 3.0, 2.0]]
    """
    _check(f, "sparse_jacobian", argnums, coloring, JACOBIAN, order, chunk, format)
    return Sparse(f, argnums, "jacobian", pattern, coloring, order, chunk, format)


def sparse_hessian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    pattern: Any = None,
    coloring: Literal["auto", "star", "acyclic", "column"] = "auto",
    order: Literal["best", "natural", "largest_first", "smallest_last", "saturation"] = "best",
    chunk: int | None = None,
    format: Literal["bcoo", "scipy"] = "bcoo",
) -> Sparse:
    """The Hessian of a scalar function as a sparse matrix, from a few products with vectors.

    Args:
      f: pure function of pytrees of real arrays to a scalar. What it closes over counts as
        constant.
      argnums: position or positions of the arguments whose elements are rows and columns.
      pattern: as for `sparse_jacobian`, symmetric.
      coloring: "star" reads each element from a product; "acyclic" takes fewer products, and
        computes elements from them by sums, which rounding errors go along; "column" makes no use
        of symmetry. "auto" is "star".
      order: in which order columns get their colours; "best" tries several.
      chunk: how many products are computed at once; None: all.
      format: "bcoo", or "scipy" for a `scipy.sparse.csr_array`, which is none under `jit`.

    Returns:
      A function of the arguments of `f`, whose value is a `jax.experimental.sparse.BCOO` of shape
      `[n, n]`, with both triangles. Like that of `sparse_jacobian` it has `prepare`.

    Raises:
      NotScalar: the output of `f` is no scalar.
      WrongArgument, WrongDtype, NotDifferentiable: as for `sparse_jacobian`.

    Cost: one gradient, and a push through it for each colour, `chunk` of them at once.
    Source: Gebremedhin, Pothen, Tarafdar and Walther, "Efficient Computation of Sparse Hessians
    Using Coloring and Automatic Differentiation", INFORMS Journal on Computing 21 (2009).

    >>> f = lambda x: jnp.sum(x[1:] ** 2 * x[:-1])
    >>> hessian = xform.sparse_hessian(f)
    >>> hessian(jnp.arange(3.0)).todense().tolist()
    [[0.0, 2.0, 0.0], [2.0, 0.0, 4.0], [0.0, 4.0, 2.0]]
    """
    _check(f, "sparse_hessian", argnums, coloring, HESSIAN, order, chunk, format)
    return Sparse(f, argnums, "hessian", pattern, coloring, order, chunk, format)


def _check(f: Any, asked: str, argnums: Any, coloring: str, colorings: Sequence[str], order: str,
           chunk: Any, format: str) -> None:  # fmt: skip
    check_callable(f, asked)
    numbers(argnums, asked, "argnums")
    choices = {
        "coloring": (coloring, colorings),
        "order": (order, ORDERS),
        "format": (format, ("bcoo", "scipy")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            listed = ", ".join(map(repr, known))
            raise WrongArgument(
                f"{asked} with {name}={value!r}", "there is none of that name", "",
                f"give one of {listed}",
            )  # fmt: skip
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise WrongArgument(
            f"{asked} with chunk={chunk!r}", "it is no number of products", "", "give 1 or more"
        )
