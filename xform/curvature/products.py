"""`ggnvp` and `fisher_vp`: products with curvature matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from xform.callables import check_callable
from xform.curvature.matrices import Distribution, GaussNewton, Matrix, fisher
from xform.curvature.vectors import real_vector, unwrapped
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
    """The product of the generalized Gauss-Newton matrix of `loss(model(*primals))` with a vector.

    With `J` the Jacobian of the model and `H` the Hessian of the loss in the model's output, this
    is `J^T H J v`: positive semi-definite where the loss is convex.

    Args:
      model: pure function of pytrees of arrays; what is not differentiated, it closes over.
      loss: function of its output that returns a scalar.
      primals: the point, a tuple or list of arguments of `model`, of real dtypes.
      tangents: the vector, like `primals`.
      policy: what reverse mode keeps, as for `grad`; `xform.policies.budget(bytes)` bounds the peak
        of the product, as compiled.

    Returns:
      The product, like `primals`: one tree if there is one primal, else a tuple.

    Raises:
      WrongArgument: `primals` or `tangents` is no tuple or list.
      WrongTangent: `tangents` do not match `primals`.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: about four evaluations of `model`: one pushed, one pulled back. No matrix is formed.
    Source: Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent",
    Neural Computation 14 (2002).

    >>> x = jnp.array([1.0, 2.0])
    >>> model, loss = lambda w: w * x, lambda z: jnp.sum(z**2)
    >>> xform.ggnvp(model, loss, (jnp.ones(2),), (jnp.ones(2),)).tolist()
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
    """The product of the Fisher information matrix of a model with a vector.

    The matrix is the expectation, over outcomes drawn from the model, of the outer product of the
    gradient of their log-likelihood with itself; here in closed form, `J^T F J`, with `F` that of
    the distribution of the outputs. Labels play no part.

    Args:
      model: pure function of pytrees of arrays that returns one array.
      distribution: of independent outcomes, given by that array: "categorical" (logits, the classes
        on the last axis), "bernoulli" (logits), "normal" (means, of unit variance), "poisson"
        (logarithms of rates).
      primals: the point, a tuple or list of arguments of `model`, of real dtypes.
      tangents: the vector, like `primals`.
      reduction: "sum" over all examples, as of their joint likelihood; "mean" divides by the length
        of the output's first axis.
      policy: what reverse mode keeps, or a budget of the peak, as for `ggnvp`.

    Returns:
      The product, like `primals`: one tree if there is one primal, else a tuple.

    Raises:
      WrongArgument: there is no such distribution, the output does not suit it, or `primals` or
        `tangents` is no tuple or list.
      WrongTangent: `tangents` do not match `primals`.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: about four evaluations of `model`. No matrix is formed.
    Source: Martens, "New insights and perspectives on the natural gradient method", JMLR 21 (2020),
    sections 5 and 9.

    >>> model = lambda w: w * jnp.array([1.0, 2.0])
    >>> xform.fisher_vp(model, "normal", (jnp.ones(2),), (jnp.ones(2),)).tolist()
    [1.0, 4.0]
    """
    return _product("fisher_vp", fisher(model, distribution, reduction), primals, tangents, policy)


def _product(asked: str, of: Matrix, primals: Any, tangents: Any, policy: Any) -> Any:
    point, vector = real_vector(primals, asked), as_tuple(tangents, "tangents", asked)
    leaves, tree = jax.tree.flatten((point, vector))

    def run(way: Any) -> Any:
        def product(*flat: Any) -> Any:
            at, v = tree.unflatten(flat)
            return of.at(at, way)(v)

        return product

    return unwrapped(run_within(policy, run, leaves))
