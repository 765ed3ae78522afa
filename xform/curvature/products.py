"""`ggnvp` and `fisher_vp`: products of curvature matrices with vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from xform.curvature.matrices import Distribution, GaussNewton, Matrix, checked_fisher
from xform.curvature.vectors import real_vector, unwrap
from xform.introspection.callables import check_callable
from xform.transforms.function import Tree, as_tuple
from xform.transforms.within import run_within


def ggnvp(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    policy: Any = None,
) -> Any:
    """Multiply the generalized Gauss-Newton matrix of `loss(model(*primals))` by a vector.

    The product is `J^T H J v`, with the Jacobian `J` of the model and the Hessian `H` of the loss
    with respect to the model's output. The matrix is positive semi-definite if the loss is convex.

    Args:
      model: pure function of pytrees of arrays. All its arguments are differentiated; let it close
        over other values.
      loss: function of the model's output that returns a scalar.
      primals: the point, a tuple or list of arguments of `model`, of real floating-point dtypes.
      tangents: the vector `v`, of the structure and shapes of `primals`.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled product, such as "budget:2GiB". None saves what `xform.vjp` saves by
        default.

    Returns:
      The product, of the structure of `primals`: one tree for a single primal, else a tuple.

    Raises:
      WrongArgument: `primals` or `tangents` is not a tuple or list.
      WrongTangent: `tangents` do not match `primals`.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: one forward-mode and one reverse-mode derivative of `model`, about four evaluations. The
    matrix is never formed.
    Source: Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent",
    Neural Computation 14 (2002).

    >>> x = jnp.array([1.0, 2.0])
    >>> model, loss = lambda w: w * x, lambda z: jnp.sum(z**2)
    >>> xform.curvature.ggnvp(model, loss, (jnp.ones(2),), (jnp.ones(2),)).tolist()
    [2.0, 8.0]
    """
    check_callable(model, "ggnvp")
    check_callable(loss, "ggnvp")
    return _product("ggnvp", GaussNewton(model, loss), primals, tangents, policy)


def fisher_vp(
    model: Callable[..., Any],
    distribution: Distribution,
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    reduction: Literal["sum", "mean"] = "sum",
    policy: Any = None,
) -> Any:
    """Multiply the Fisher information matrix of a model by a vector.

    The Fisher matrix is the expected outer product of the gradient of the log-likelihood with
    itself, for outcomes drawn from the model. This function uses the closed form `J^T F J`, with
    the Jacobian `J` of the model and the Fisher matrix `F` of the output distribution. Labels are
    not needed.

    Args:
      model: pure function of pytrees of arrays that returns one array.
      distribution: distribution of independent outcomes whose parameter is the output:
        "categorical" (logits, with the classes on the last axis), "bernoulli" (logits), "normal"
        (means, with unit variance) or "poisson" (logarithms of rates).
      primals: the point, a tuple or list of arguments of `model`, of real floating-point dtypes.
      tangents: the vector, of the structure and shapes of `primals`.
      reduction: "sum" adds over all examples, for their joint likelihood; "mean" divides the sum by
        the length of the output's first axis.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled product, such as "budget:2GiB". None saves what `xform.vjp` saves by
        default.

    Returns:
      The product, of the structure of `primals`: one tree for a single primal, else a tuple.

    Raises:
      WrongArgument: the distribution is unknown, the output does not suit it, or `primals` or
        `tangents` is not a tuple or list.
      WrongTangent: `tangents` do not match `primals`.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: about four evaluations of `model`. The matrix is never formed.
    Source: Martens, "New insights and perspectives on the natural gradient method", JMLR 21 (2020),
    sections 5 and 9.

    >>> model = lambda w: w * jnp.array([1.0, 2.0])
    >>> xform.curvature.fisher_vp(model, "normal", (jnp.ones(2),), (jnp.ones(2),)).tolist()
    [1.0, 4.0]
    """
    matrix = checked_fisher(model, distribution, reduction)
    return _product("fisher_vp", matrix, primals, tangents, policy)


def _product(caller: str, matrix: Matrix, primals: Any, tangents: Any, policy: Any) -> Any:
    """Multiply `matrix` at `primals` by `tangents`, for the public function `caller`."""
    point, vector = real_vector(primals, caller), as_tuple(tangents, "tangents", caller)
    leaves, tree = jax.tree.flatten((point, vector))

    def product_by_policy(policy: Any) -> Any:
        def product(*flat: Any) -> Any:
            point, v = tree.unflatten(flat)
            return matrix.at(point, policy)(v)

        return product

    return unwrap(run_within(caller, policy, product_by_policy, leaves))
