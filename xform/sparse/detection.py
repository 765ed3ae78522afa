"""`sparsity`: the sparsity pattern of a Jacobian or Hessian, without computing derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from scipy import sparse

from xform._jax import Tracer, has_effects
from xform.errors import NotDifferentiable, WrongArgument
from xform.interpret.cost import shape, size
from xform.introspection.callables import check_callable, function_name
from xform.policies import save_everything
from xform.program.arithmetic import differentiable
from xform.program.ir import Mask, Program, gather, lift_constants, spread, trace
from xform.program.source import frame
from xform.sparse import sets as S
from xform.sparse.nested import set_propagator
from xform.sparse.pattern import Pattern, pattern_from
from xform.transforms.function import as_array, numbers, positions
from xform.transforms.reverse import grad

# A pattern with more nonzeros than this raises an error.
_LARGEST = 2**27


def sparsity(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    of: Literal["jacobian", "hessian"] = "jacobian",
    at: Any = None,
) -> Pattern:
    """The elements of the Jacobian or Hessian of `f` that may be nonzero.

    No derivative is computed. Instead, sets of input elements are propagated through the program of
    `f`, by the rule of each primitive. The pattern is valid for all inputs or, with `at`, at one
    point. It may contain too many elements, but never too few: for an operation without such a
    rule, each element of the result counts as depending on all elements of its operands.

    Args:
      f: pure function of pytrees of arrays; values that it closes over count as constants.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s; only their types matter. May be
        left out if `at` is given and `f` takes one argument.
      argnums: position or positions of the arguments whose elements are the columns.
      of: "jacobian", or "hessian" for a function that returns a scalar.
      at: a point (the argument, or a tuple of arguments if `argnums` is a tuple). The pattern is
        then valid at this point only, where values decide a branch, an index or a zero factor.
        All other arguments must be values too.

    Returns:
      A `Pattern`: its rows are the elements of the output (of the gradient, for a Hessian), its
      columns the elements of the input. It can be printed, plotted, and converted to a SciPy array.

    Raises:
      NotScalar: the Hessian of a function that does not return a scalar.
      WrongArgument: an argument is invalid, or the pattern has more than 134 million nonzeros.
      NotDifferentiable: `f` has side effects.

    Cost: linear in the nonzeros of the patterns of all values. `f` is traced, and the part of it
    that does not depend on the inputs is compiled and run. Python code runs for each equation, not
    for each element.
    Source: Griewank and Walther, Evaluating Derivatives, 2nd edition (2008), section 7.1.

    >>> print(xform.sparse.sparsity(lambda x: jnp.cumsum(x)[::2], jnp.ones(5)))
    Jacobian of <lambda>: 3 x 5, 9 nonzeros (60%), at most 5 in a row, 3 in a column
      # . . . .
      # # # . .
      # # # # #
    >>> f = lambda x: jnp.where(x[0] > 0, x, x[0])
    >>> xform.sparse.sparsity(f, jnp.ones(3)).nonzeros
    5
    >>> xform.sparse.sparsity(f, at=jnp.ones(3)).nonzeros
    3
    """
    check_callable(f, "sparsity")
    numbers(argnums, "sparsity", "argnums")
    if of not in ("jacobian", "hessian"):
        raise WrongArgument(
            f"sparsity with of={of!r}",
            "it is neither 'jacobian' nor 'hessian'",
            "",
            "pass of='jacobian' or of='hessian'",
        )
    if at is not None:
        args = _with_point(args, argnums, at)
    return derivative_matrix(f, args, argnums, of, "sparsity").pattern(at is not None)


def _with_point(args: tuple[Any, ...], argnums: int | Sequence[int], at: Any) -> tuple[Any, ...]:
    """The arguments of `f`, with those at `argnums` replaced by the point `at`."""
    if isinstance(argnums, int | np.integer):
        at, argnums = (at,), (int(argnums),)
    args = args or tuple(at)
    full = dict(enumerate(args)) | dict(zip(positions(argnums, len(args), "sparsity"), at,
                                            strict=True))  # fmt: skip
    return tuple(full.values())


@dataclasses.dataclass(frozen=True, eq=False)
class DerivativeMatrix:
    """The Jacobian or Hessian of a traced function, not computed.

    Attributes:
      name: title of the matrix, such as "Jacobian of f".
      asked: the request, for error messages.
      program: the program of `f`, or of its gradient, with constants as leading inputs.
      constants: number of these constants.
      values: the inputs of the program, as arrays or types.
      columns: which inputs' elements are the columns.
      square: whether the matrix is a Hessian, which is symmetric.
    """

    name: str
    asked: str
    program: Program
    constants: int
    values: list[Any]
    columns: Mask
    square: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return sum(map(size, self.program.outputs)), sum(map(size, self._inputs()))

    def _inputs(self) -> list[Any]:
        return gather(self.program.inputs, self.columns)

    def pattern(self, local: bool = False) -> Pattern:
        """The pattern for all inputs; with `local`, at `values`. Columns of integers are empty."""
        m, n = self.shape
        starts = iter(np.cumsum([0, *map(size, self._inputs())]))
        seeds = [S.inputs(shape(v), int(next(starts)), n) for v in self._inputs()]
        real = [s if differentiable(v.aval) else None
                for s, v in zip(seeds, self._inputs(), strict=True)]  # fmt: skip
        known = [x if local or i < self.constants else None for i, x in enumerate(self.values)]
        known = [None if isinstance(x, jax.ShapeDtypeStruct | Tracer) else x for x in known]
        outs = set_propagator().follow(self.program, spread(real, self.columns), known)
        none = S.inputs((0,), 0, n)
        whole = [none.at(np.zeros(shape(v), int)) if y is None else y
                 for v, y in zip(self.program.outputs, outs, strict=True)]  # fmt: skip
        if (count := sum(map(S.size, whole))) > _LARGEST:
            raise dense(self.asked, f"up to {count} of its {m} x {n} elements may be nonzero")
        rows = sparse.csr_array(sparse.vstack([sparse.csr_array((0, n), dtype=bool),
                                               *map(S.rows, whole)], format="csr"))  # fmt: skip
        return pattern_from(rows + rows.T if self.square else rows, self.name)


def derivative_matrix(f: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int],
                      of: str, transform: str) -> DerivativeMatrix:  # fmt: skip
    """Trace a function at arguments or their types; leaves that are not arrays are static."""
    asked = f"{transform} of {function_name(f)}"
    where = positions(argnums, len(args), transform)
    if not where:
        raise WrongArgument(
            f"{asked} with argnums={argnums!r}", "it names no argument", "", "name one at least"
        )
    if of == "hessian":
        f = grad(f, argnums, policy=save_everything)
    leaves, tree = jax.tree.flatten(tuple(args))
    mine = [i in where for i, x in enumerate(args) for _ in jax.tree.leaves(x)]
    typed = tuple([on or hasattr(x, "dtype") for x, on in zip(leaves, mine, strict=True)])
    arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, transform)
              for x in gather(leaves, typed)]  # fmt: skip

    def flat(*arrays: Any) -> list[Any]:
        rest = iter(arrays)
        whole = [next(rest) if on else x for x, on in zip(leaves, typed, strict=True)]
        return jax.tree.leaves(f(*jax.tree.unflatten(tree, whole)))

    prog, consts = lift_constants(trace(flat, *arrays))
    _refuse_effects(prog, asked)
    columns = (*[False] * len(consts), *gather(mine, typed))
    name = f"{of.title()} of {function_name(f)}"
    return DerivativeMatrix(
        name, asked, prog, len(consts), [*consts, *arrays], columns, of == "hessian"
    )


def dense(asked: str, blocked: str) -> WrongArgument:
    """The error for a matrix that is not sparse."""
    return WrongArgument(
        asked,
        blocked,
        "",
        "use xform.jacfwd, xform.jacrev or xform.hessian, or products with vectors (xform.jvp, "
        "xform.vjp, xform.hvp); or give `pattern`, if you know that it has fewer nonzeros",
    )


def _refuse_effects(prog: Program, asked: str) -> None:
    """Raise an error for side effects: the function is run for many vectors at once."""
    for eqn in prog.equations:
        if has_effects(eqn):
            raise NotDifferentiable(
                asked,
                f"{eqn.primitive.name} has side effects, which would not run once as written",
                frame(eqn),
                "remove operations that print, call back to Python or write",
            )
