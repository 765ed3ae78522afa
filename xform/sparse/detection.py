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
from xform.interpret.cost import size
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import check_callable, function_name
from xform.policies import save_everything
from xform.policies.sample import check_known_sizes
from xform.program.arithmetic import differentiable
from xform.program.dimensions import shape
from xform.program.ir import Mask, Program, gather, lift_constants, spread, trace
from xform.program.source import frame
from xform.sparse.nested import set_propagator
from xform.sparse.pattern import Pattern, pattern_from
from xform.sparse.sets import input_sets, to_matrix, total_size
from xform.transforms.function import as_array
from xform.transforms.reverse import grad

# A pattern with more nonzeros than this raises an error.
_MAX_NONZEROS = 2**27


def sparsity(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    of: Literal["jacobian", "hessian"] = "jacobian",
    at_point: bool = False,
) -> Pattern:
    """Find the elements of the Jacobian or Hessian of `f` that may be nonzero.

    No derivative is computed. Instead, `f` is traced, and sets of input elements are propagated
    through its operations. The rule of an operation states on which elements of its operands each
    element of a result depends. The pattern is valid for all inputs or, with `at_point`, at `args`.
    It may contain too many elements, but never too few: if nothing is known of an operation, each
    element of a result counts as depending on all elements of its operands.

    Args:
      f: pure function of pytrees of arrays; values that it closes over count as constants.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s. Only their types matter, unless
        `at_point` is True.
      argnums: position or positions of the arguments whose elements are the columns.
      of: "jacobian", or "hessian" for a function that returns a scalar.
      at_point: whether the pattern is for the values of `args` only. It may then be smaller: a
        branch, an index or a factor of zero is known there. Arguments given as types stay unknown.

    Returns:
      A `Pattern`: its rows are the elements of the output (of the gradient, for a Hessian), its
      columns the elements of the input. It can be printed, plotted, and converted to a SciPy array.

    Raises:
      NotScalar: the Hessian of a function that does not return a scalar.
      WrongArgument: an argument is invalid, or the pattern has more than 134 million nonzeros.
      NotDifferentiable: `f` has side effects.

    Cost: linear in the nonzeros of the patterns of all intermediate values. The part of `f` that
    does not depend on the inputs is compiled and run. Python code runs for each operation, not for
    each element.
    Source: Griewank and Walther, Evaluating Derivatives, 2nd edition (2008), section 7.1.

    >>> print(xform.sparse.sparsity(lambda x: jnp.cumsum(x)[::2], jnp.ones(5)))
    Jacobian of <lambda>: 3 x 5, 9 nonzeros (60%), at most 5 in a row, 3 in a column
      # . . . .
      # # # . .
      # # # # #
    >>> f = lambda x: jnp.where(x[0] > 0, x, x[0])
    >>> xform.sparse.sparsity(f, jnp.ones(3)).nonzeros
    5
    >>> xform.sparse.sparsity(f, jnp.ones(3), at_point=True).nonzeros
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
    return derivative_matrix(f, args, argnums, of, "sparsity").pattern(at_point)


@dataclasses.dataclass(frozen=True, eq=False)
class DerivativeMatrix:
    """The Jacobian or Hessian of a traced function, described but not computed.

    Attributes:
      name: title of the matrix, such as "Jacobian of f".
      request: what the user asked for, for error messages.
      program: the program of `f`, or of its gradient, with constants as leading inputs.
      constants: number of these constants.
      values: the inputs of the program, as arrays or types.
      columns: a mask of the inputs whose elements are the columns.
      is_hessian: whether the matrix is a Hessian, which is symmetric.
    """

    name: str
    request: str
    program: Program
    constants: int
    values: list[Any]
    columns: Mask
    is_hessian: bool

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        return sum(map(size, self.program.outputs)), sum(map(size, self._inputs()))

    def _inputs(self) -> list[Any]:
        """Return the inputs whose elements are the columns."""
        return gather(self.program.inputs, self.columns)

    def pattern(self, local: bool = False) -> Pattern:
        """Return the pattern for all inputs or, with `local`, for the inputs `values` only.

        Columns of integer inputs have no nonzeros.
        """
        m, n = self.shape
        starts = iter(np.cumsum([0, *map(size, self._inputs())]))
        sets = [input_sets(shape(v), int(next(starts)), n) for v in self._inputs()]
        float_sets = [x if differentiable(v.aval) else None
                      for x, v in zip(sets, self._inputs(), strict=True)]  # fmt: skip
        known = [x if local or i < self.constants else None for i, x in enumerate(self.values)]
        known = [None if isinstance(x, jax.ShapeDtypeStruct | Tracer) else x for x in known]
        outs = set_propagator().follow(self.program, spread(float_sets, self.columns), known)
        no_sets = input_sets((0,), 0, n)
        outs = [no_sets.with_ids(np.zeros(shape(v), int)) if y is None else y
                for v, y in zip(self.program.outputs, outs, strict=True)]  # fmt: skip
        if (count := sum(map(total_size, outs))) > _MAX_NONZEROS:
            raise not_sparse(
                self.request, f"up to {count} of its {m} x {n} elements may be nonzero"
            )
        matrix = sparse.csr_array(sparse.vstack([sparse.csr_array((0, n), dtype=bool),
                                                 *map(to_matrix, outs)], format="csr"))  # fmt: skip
        return pattern_from(matrix + matrix.T if self.is_hessian else matrix, self.name)


def derivative_matrix(f: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int],
                      of: str, transform: str) -> DerivativeMatrix:  # fmt: skip
    """Trace `f`, or its gradient if `of` is "hessian", at arguments or at their types.

    Leaves of `args` that are not arrays are static, except at `argnums`. `transform` is the public
    function that the user called, for error messages.
    """
    request = f"{transform} of {function_name(f)}"
    where = positions(argnums, len(args), transform)
    if not where:
        raise WrongArgument(
            f"{request} with argnums={argnums!r}",
            "it names no argument",
            "",
            "give at least one position",
        )
    if of == "hessian":
        f = grad(f, argnums, policy=save_everything)
    check_known_sizes(request, args)
    leaves, tree = jax.tree.flatten(tuple(args))
    in_columns = [i in where for i, x in enumerate(args) for _ in jax.tree.leaves(x)]
    is_array = tuple(
        [column or hasattr(x, "dtype") for x, column in zip(leaves, in_columns, strict=True)]
    )
    arrays = [x if isinstance(x, jax.ShapeDtypeStruct) else as_array(x, transform)
              for x in gather(leaves, is_array)]  # fmt: skip

    def of_arrays(*arrays: Any) -> list[Any]:
        remaining = iter(arrays)
        traced = [
            next(remaining) if array else x for x, array in zip(leaves, is_array, strict=True)
        ]
        return jax.tree.leaves(f(*jax.tree.unflatten(tree, traced)))

    prog, consts = lift_constants(trace(of_arrays, *arrays))
    _refuse_effects(prog, request)
    columns = (*[False] * len(consts), *gather(in_columns, is_array))
    name = f"{of.title()} of {function_name(f)}"
    return DerivativeMatrix(
        name, request, prog, len(consts), [*consts, *arrays], columns, of == "hessian"
    )


def not_sparse(request: str, reason: str) -> WrongArgument:
    """Return the error for a matrix that is not sparse."""
    return WrongArgument(
        request,
        reason,
        "",
        "use xform.jacfwd, xform.jacrev or xform.hessian, or products with vectors (xform.jvp, "
        "xform.vjp, xform.hvp); or, if you know that it has fewer nonzeros, pass pattern=... to "
        "xform.sparse.jacobian or xform.sparse.hessian",
    )


def _refuse_effects(prog: Program, request: str) -> None:
    """Raise an error if the program has side effects, because they would not happen exactly once.

    `sparsity` does not run the function. A sparse Jacobian runs it for many vectors at once.
    """
    for eqn in prog.equations:
        if has_effects(eqn):
            raise NotDifferentiable(
                request,
                f"{eqn.primitive.name} has side effects, which would not run exactly once",
                frame(eqn),
                "remove operations that print, call back to Python or write",
            )
