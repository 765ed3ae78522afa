"""`jacfwd`, `jacrev`, `hessian`, `hvp`: dense Jacobians and Hessians, and products with a Hessian.

`jacfwd` pushes each vector of the standard basis of the input forward: the results are the columns
of the Jacobian. `jacrev` pulls each vector of the standard basis of the output back: the results
are the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xform._jax import cotangent_aval, staging, tangent_aval
from xform._jax.meshes import explicit_mesh_of
from xform.introspection.argnums import nonempty_positions, numbers
from xform.introspection.callables import check_callable
from xform.policies import save_everything
from xform.program.arithmetic import Value
from xform.program.arrays import basis, zeros
from xform.program.arrays import stacked as stacked_type
from xform.transforms.check import check_forward_input, check_inputs, check_output
from xform.transforms.forward import jvp
from xform.transforms.function import (
    Tree,
    as_tuple,
    bind_others,
)
from xform.transforms.reverse import grad, immediate_vjp
from xform.transforms.seeds import pull_ones
from xform.transforms.within import run_within


def jacfwd(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `f` by forward mode, all columns at once.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      holomorphic: whether `f` is complex-differentiable; inputs must be complex.

    Returns:
      A function with the arguments of `f`. Its value has the tree of the output. Each leaf of this
      tree is a tree like the input, with arrays of shape `[*output, *input]`.

    Raises:
      WrongDtype: an input is not real, or is not complex with `holomorphic`.
      WrongArgument: `argnums` is empty or out of range.
      MissingRule: a primitive in `f` has no rule.

    Cost: one push for each element of the input, all in one batch: best for tall Jacobians.

    >>> jacobian = xform.jacfwd(lambda x: x * x)(jnp.arange(2.0))
    >>> [[float(e) for e in row] for row in jacobian]
    [[0.0, 0.0], [0.0, 2.0]]
    """
    check_callable(f, "jacfwd")
    numbers(argnums, "jacfwd", "argnums")

    @functools.wraps(f, updated=())
    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        bound, primals = bind_others(
            f, nonempty_positions(argnums, len(args), "jacfwd"), args, kwargs
        )
        for leaf in jax.tree.leaves(primals):
            check_forward_input("jacfwd", leaf, holomorphic)

        def push(tangents: Tree) -> Any:
            return jvp(bound, tuple(primals), tangents, has_aux=has_aux)

        axes = (None, -1, None) if has_aux else (None, -1)
        y, columns, *aux = jax.vmap(push, out_axes=axes)(_basis(tuple(primals), tangent_aval))
        if holomorphic:
            check_output("jacfwd", y, holomorphic)
        inputs = primals[0] if isinstance(argnums, int | np.integer) else tuple(primals)
        out = jax.tree.map(lambda y, c: _columns(inputs, y, c), y, columns)
        return (out, *aux) if has_aux else out

    return jacobian_of


def jacrev(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `f` by reverse mode, all rows at once.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      holomorphic: whether `f` is complex-differentiable; inputs and outputs must be complex.
      allow_int: whether to accept integer inputs; their Jacobians are zeros of their own dtype.

    Returns:
      A function with the arguments of `f`. Its value has the tree of the output. Each leaf of this
      tree is a tree like the input, with arrays of shape `[*output, *input]`.

    Raises:
      WrongDtype: an input is an integer, without `allow_int`, or an output is not real.
      WrongArgument: `argnums` is out of range.
      MissingRule: a primitive in `f` has no rule.

    Cost: one pull for each element of the output, all in one batch: best for wide Jacobians.

    >>> [float(e) for e in xform.jacrev(lambda x: jnp.sum(x * x))(jnp.arange(2.0))]
    [0.0, 2.0]
    """
    check_callable(f, "jacrev")
    numbers(argnums, "jacrev", "argnums")

    @functools.wraps(f, updated=())
    def jacobian_of(*args: Any, **kwargs: Any) -> Any:
        bound, primals = bind_others(
            f, nonempty_positions(argnums, len(args), "jacrev"), args, kwargs
        )
        check_inputs("jacrev", primals, holomorphic, allow_int)
        # Save everything: all rows share one set of residuals, which is small beside the rows. A
        # recompute would wait at a barrier for the cotangents. Here the cotangents are the basis,
        # which is available from the start, so waiting saves nothing. And XLA does not fuse through
        # a barrier, so each recomputed value would take one array for each row.
        policy = save_everything if staging() else None
        y, pull, *aux = immediate_vjp(bound, *primals, has_aux=has_aux, policy=policy)
        check_output("jacrev", y, holomorphic)
        rows = _pull_basis(pull, y)
        one_argument = isinstance(argnums, int | np.integer)
        inputs, rows = (primals[0], rows[0]) if one_argument else (tuple(primals), rows)
        parts = jax.tree.map(lambda x, r: _rows(y, x, r), inputs, rows)
        out = jax.tree.transpose(jax.tree.structure(inputs), jax.tree.structure(y), parts)
        return (out, *aux) if has_aux else out

    return jacobian_of


def hessian(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the Hessian of `f` as dense arrays, forward over reverse.

    Args:
      f: pure function of pytrees of arrays.
      argnums: position or positions of the arguments to differentiate.
      has_aux: whether `f` returns a pair `(output, auxiliary)`; the second is not differentiated.
      holomorphic: whether `f` is complex-differentiable; inputs must be complex.

    Returns:
      A function with the arguments of `f`. Its value has one array of shape
      `[*output, *input, *input]` for each leaf of the output and each pair of leaves of the input.

    Raises:
      WrongDtype: without `holomorphic`, an input or an output is not real.
      WrongArgument: `argnums` is empty or out of range.
      MissingRule: a primitive in `f` has no rule.

    Cost: one gradient, and one push through it for each element of the input, all in one batch.
    `hvp` computes a product with the Hessian without forming it.

    >>> float(xform.hessian(lambda x: x ** 3)(2.0))
    12.0
    """
    inner = jacrev(f, argnums, has_aux=has_aux, holomorphic=holomorphic)
    return jacfwd(inner, argnums, has_aux=has_aux, holomorphic=holomorphic)


def hvp(
    f: Callable[..., Any], primals: Sequence[Tree], tangents: Sequence[Tree], *, policy: Any = None
) -> Any:
    """Compute the product of the Hessian of a scalar function with a vector.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      primals: the point, a tuple or list of arguments.
      tangents: the vector, like `primals`.
      policy: which values reverse mode saves, as for `grad`. A budget, such as "budget:2GiB",
        limits the peak memory of the whole compiled product.

    Returns:
      The product: a tree like the primal if there is one primal, else a tuple like `primals`.

    Raises:
      NotScalar: `f` returned something other than a scalar.
      WrongArgument: `primals` or `tangents` is neither a tuple nor a list.
      WrongTangent: `tangents` do not match `primals` in structure, shape or dtype.
      MissingRule: a primitive in `f` has no rule.
      BudgetInfeasible: no policy that was tried fits the budget.

    Cost: about twice a gradient, in time and memory; the Hessian is never formed.
    Source: Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994).

    >>> float(xform.hvp(lambda x: x ** 3, (2.0,), (1.0,)))
    12.0
    """
    primals, tangents = as_tuple(primals, "primals", "hvp"), as_tuple(tangents, "tangents", "hvp")
    argnums = 0 if len(primals) == 1 else tuple(range(len(primals)))
    product = lambda policy, point, v: jvp(grad(f, argnums, policy=policy), point, v)[1]
    if policy is None:
        return product(None, primals, tangents)
    leaves, tree = jax.tree.flatten((primals, tangents))
    run_under = lambda policy: lambda *flat: product(policy, *tree.unflatten(flat))
    return run_within("hvp", policy, run_under, leaves)


def _basis(tree: Tree, kind: Callable[[Any], Any]) -> Tree:
    """Return the standard basis of the space of trees like `tree`, stacked along a leading axis.

    `kind` is `tangent_aval` or `cotangent_aval`.
    """
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(basis([kind(jax.typeof(x)) for x in leaves]))


def _pull_basis(pull: Callable[..., Any], y: Tree) -> Tree:
    """Pull back each vector of the standard basis of the output `y`: the rows of a Jacobian.

    For an output of one element, `pull` is called once without `vmap`, so that XLA can fuse more.
    """
    if sum(map(np.size, jax.tree.leaves(y))) != 1:
        with explicit_mesh_of(y):
            return jax.vmap(pull)(_basis(y, cotangent_aval))
    return jax.tree.map(lambda r: r[None], pull_ones(pull, y))


def _columns(inputs: Tree, y: Value, columns: Value) -> Tree:
    """Return the Jacobian of the output leaf `y` as a tree like the inputs, from its columns.

    The columns are stacked along the last axis, which is split over the leaves of the inputs.
    """
    return _split(inputs, columns, -1, y, lambda x: (*np.shape(y), *np.shape(x)))


def _rows(y: Tree, x: Value, rows: Value) -> Tree:
    """Return the Jacobian by the input leaf `x` as a tree like the output `y`, from its rows.

    The rows are stacked along the first axis, which is split over the leaves of the output.
    """
    return _split(y, rows, 0, x, lambda leaf: (*np.shape(leaf), *np.shape(x)))


def _split(
    tree: Tree, stacked: Value, axis: int, of: Value, shape: Callable[[Value], tuple[int, ...]]
) -> Tree:
    """Split an axis of `stacked` over the leaves of a tree, and give each part its `shape(leaf)`.

    If `stacked` has dtype float0, the result is zeros of the type of `of`, an integer input.
    """
    leaves, structure = jax.tree.flatten(tree)
    if stacked.dtype == jax.dtypes.float0:
        stacked = jnp.moveaxis(zeros(stacked_type(stacked.shape[axis], jax.typeof(of))), 0, axis)
    ends = np.cumsum([np.size(x) for x in leaves])[:-1]
    parts = jnp.split(stacked, ends, axis=axis)
    return structure.unflatten(p.reshape(shape(x)) for p, x in zip(parts, leaves, strict=True))
