"""`sparsity`: the pattern of a Jacobian or Hessian, from the program alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from scipy import sparse

from xform._jax import Tracer, has_effects
from xform.arithmetic import differentiable
from xform.callables import check_callable, function_name
from xform.cost import shape, size
from xform.errors import NotDifferentiable, WrongArgument
from xform.ir import Mask, Program, gather, lifted, spread, trace
from xform.policies import save_everything
from xform.source import frame
from xform.sparse import sets as S
from xform.sparse.nested import walk
from xform.sparse.pattern import Pattern, pattern_from
from xform.transforms.function import as_array, numbers, positions
from xform.transforms.reverse import grad

# Of a pattern with more nonzeros than this no list is made.
_LARGEST = 2**27


def sparsity(
    f: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    of: Literal["jacobian", "hessian"] = "jacobian",
    at: Any = None,
) -> Pattern:
    """Which elements of the Jacobian or Hessian of `f` may differ from zero.

    No derivative is computed: sets of input elements go through the program of `f`, as the rule of
    each primitive says. The pattern holds at every point, or, with `at`, at one. It may be larger
    than the truth, never smaller: where nothing is known of an operation, each element of its
    results counts as depending on all of its operands'.

    Args:
      f: pure function of pytrees of arrays; what it closes over counts as constant.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s: only their types matter. May be
        left out where `at` is given and `f` takes one argument.
      argnums: position or positions of the arguments whose elements are the columns.
      of: "jacobian", or "hessian" of a function that returns a scalar.
      at: the point (the argument, or a tuple of them where `argnums` is one): where its value
        decides, at a branch, an index or a factor that is zero, the pattern holds there only. All
        other arguments are then values too.

    Returns:
      A `Pattern`: its rows are the elements of the output (of the gradient), its columns those of
      the input; it prints, plots, and becomes a SciPy array.

    Raises:
      NotScalar: the Hessian of something that is not a scalar.
      WrongArgument: an argument is unusable, or the pattern has more than 134 million nonzeros.
      NotDifferentiable: `f` has effects.

    Cost: linear in the nonzeros of all values' patterns; `f` is traced, and what of it does not
    depend on the inputs is compiled and run. Python for each equation, not for each element.
    Source: Griewank and Walther, Evaluating Derivatives, 2nd edition (2008), section 7.1.

    >>> print(xform.sparsity(lambda x: jnp.cumsum(x)[::2], jnp.ones(5)))
    Jacobian of <lambda>: 3 x 5, 9 nonzeros (60%), at most 5 in a row, 3 in a column
      # . . . .
      # # # . .
      # # # # #
    >>> f = lambda x: jnp.where(x[0] > 0, x, x[0])
    >>> xform.sparsity(f, jnp.ones(3)).nonzeros, xform.sparsity(f, at=jnp.ones(3)).nonzeros
    (5, 3)
    """
    check_callable(f, "sparsity")
    numbers(argnums, "sparsity", "argnums")
    if of not in ("jacobian", "hessian"):
        raise WrongArgument(
            f"sparsity with of={of!r}",
            "it is neither 'jacobian' nor 'hessian'",
            "",
            "say of which of the two",
        )
    if at is not None:
        args = _placed(args, argnums, at)
    return subject(f, args, argnums, of, "sparsity").pattern(at is not None)


def _placed(args: tuple[Any, ...], argnums: int | Sequence[int], at: Any) -> tuple[Any, ...]:
    """The arguments with the point among them."""
    if isinstance(argnums, int | np.integer):
        at, argnums = (at,), (int(argnums),)
    args = args or tuple(at)
    full = dict(enumerate(args)) | dict(zip(positions(argnums, len(args), "sparsity"), at,
                                            strict=True))  # fmt: skip
    return tuple(full.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A function at some types of arguments, traced.

    Attributes:
      name: of the matrix that is asked for.
      asked: the transform, and of what.
      program: of `f`, or of its gradient; what it closes over are leading inputs.
      constants: how many of those there are.
      values: its inputs; types where only those were given.
      columns: which inputs' elements are the columns.
      square: whether the matrix is symmetric.
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
        """Of the matrix."""
        return sum(map(size, self.program.outputs)), sum(map(size, self._inputs()))

    def _inputs(self) -> list[Any]:
        return gather(self.program.inputs, self.columns)

    def pattern(self, local: bool = False) -> Pattern:
        """The pattern, at every point or at this one; columns of integers are empty."""
        m, n = self.shape
        starts = iter(np.cumsum([0, *map(size, self._inputs())]))
        seeds = [S.inputs(shape(v), int(next(starts)), n) for v in self._inputs()]
        real = [s if differentiable(v.aval) else None
                for s, v in zip(seeds, self._inputs(), strict=True)]  # fmt: skip
        known = [x if local or i < self.constants else None for i, x in enumerate(self.values)]
        known = [None if isinstance(x, jax.ShapeDtypeStruct | Tracer) else x for x in known]
        outs = walk().follow(self.program, spread(real, self.columns), known)
        none = S.inputs((0,), 0, n)
        whole = [none.at(np.zeros(shape(v), int)) if y is None else y
                 for v, y in zip(self.program.outputs, outs, strict=True)]  # fmt: skip
        if (count := sum(map(S.size, whole))) > _LARGEST:
            raise dense(self.asked, f"up to {count} of its {m} x {n} elements may differ from zero")
        rows = sparse.csr_array(sparse.vstack([sparse.csr_array((0, n), dtype=bool),
                                               *map(S.rows, whole)], format="csr"))  # fmt: skip
        return pattern_from(rows + rows.T if self.square else rows, self.name)


def subject(f: Callable[..., Any], args: Sequence[Any], argnums: int | Sequence[int], of: str,
            transform: str) -> Subject:  # fmt: skip
    """Trace a function at arguments, or types of them; what is no array is held."""
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

    prog, consts = lifted(trace(flat, *arrays))
    _refuse_effects(prog, asked)
    columns = (*[False] * len(consts), *gather(mine, typed))
    name = f"{of.title()} of {function_name(f)}"
    return Subject(name, asked, prog, len(consts), [*consts, *arrays], columns, of == "hessian")


def dense(asked: str, blocked: str) -> WrongArgument:
    """The error of a matrix that is not sparse."""
    return WrongArgument(
        asked,
        blocked,
        "",
        "use xform.jacfwd, xform.jacrev or xform.hessian, or products with vectors (xform.jvp, "
        "xform.vjp, xform.hvp); or give `pattern`, if you know that it has fewer",
    )


def _refuse_effects(prog: Program, asked: str) -> None:
    """A derivative that is compressed runs the function for many vectors at once."""
    for eqn in prog.equations:
        if has_effects(eqn):
            raise NotDifferentiable(
                asked,
                f"{eqn.primitive.name} has effects, which would not happen as the function says",
                frame(eqn),
                "take out what prints, calls back or writes",
            )
