"""`newton_step` and `natural_gradient_step`: steps of second-order optimization methods.

Both solve a linear system `(M + damping I) p = -g` for the step `p`, with a gradient `g` and a
symmetric matrix `M`, by truncated conjugate gradients (CG). *Truncated* means that CG stops before
the solution is exact. CG needs only products of the matrix with vectors (*products* in this file),
so the matrix is never formed. The *curvature* along a direction `d` is `d^T M d`. A *trust region*
is a ball of a given radius around the point: a step does not leave it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from xform.curvature.matrices import Distribution, Matrix, Product, as_matrix, checked_fisher
from xform.curvature.vectors import dot, norm, plus, real_vector, scale, unwrap
from xform.errors import WrongArgument
from xform.introspection.callables import check_callable
from xform.program.arithmetic import Value
from xform.transforms.function import Tree, as_array
from xform.transforms.reverse import grad
from xform.transforms.within import run_within

# The reasons why a solve ended, by `SecondOrderStep.code`; and the code while it goes on.
_REASONS = ("iterations", "converged", "negative curvature", "boundary")
_ITERATIONS, _CONVERGED, _NEGATIVE_CURVATURE, _BOUNDARY = range(len(_REASONS))
_RUNNING = -1
# A user's solver of linear systems: `solver(product, rhs)` returns `p` with `product(p) == rhs`.
Solver = Callable[[Callable[[Tree], Tree], Tree], Tree]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SecondOrderStep:
    """A step of a second-order method, and why its computation ended.

    The attributes besides `step` are scalar arrays.

    Attributes:
      step: the step to add to the primals, with their shapes: one tree for a single primal, else a
        tuple of trees.
      decrease: by how much the function falls according to its quadratic model, so positive for a
        useful step.
      residual: norm of the residual of the linear system, divided by the norm of the gradient.
      iterations: number of CG iterations, an integer; 0 with your own `solver`.
      code: why the solve ended, as an integer for use under `jit`: 0 "iterations", 1 "converged",
        2 "negative curvature", 3 "boundary"; see `reason`. With your own `solver` it is always 1,
        so check `residual`.
    """

    step: Tree
    decrease: Value
    residual: Value
    iterations: Value
    code: Value

    @property
    def reason(self) -> str:
        """The reason why the solve ended, as a text. It reads the value of `code`: not under `jit`.

        - "converged": the residual is below the tolerance;
        - "negative curvature": the matrix is not positive definite along a direction;
        - "boundary": the step reached the boundary of the trust region;
        - "iterations": `max_iterations` was reached first.
        """
        return _REASONS[int(self.code)]


def newton_step(
    f: Callable[..., Any],
    primals: Sequence[Tree],
    *,
    curvature: Matrix | None = None,
    damping: float | Value = 0.0,
    radius: float | Value | None = None,
    tolerance: float | Value | None = None,
    max_iterations: int = 100,
    solver: Solver | None = None,
    policy: Any = None,
) -> SecondOrderStep:
    """Compute a Newton step by truncated conjugate gradients.

    This function minimizes the quadratic model `g^T p + 1/2 p^T (H + damping I) p` of `f` over
    steps `p` with a norm of at most `radius`. Here `g` is the gradient of `f` and `H` its Hessian.
    Without a `radius` and with a positive definite matrix, the minimum is the solution of
    `(H + damping I) p = -g`.

    The solve stops when the tolerance is reached. It also stops at a direction along which the
    curvature is not positive, where the model has no minimum. With a `radius`, Steihaug's method
    then follows this direction to the boundary of the trust region. Without a `radius`, the result
    is the step so far, or the negative gradient if this is the first direction.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      primals: the point, a tuple or list of arguments of `f`, of real floating-point dtypes.
      curvature: matrix to use instead of the Hessian of `f`: `GaussNewton(model, loss)` or
        `Fisher(model, distribution)` of `xform.curvature`. They are positive semi-definite even
        where the Hessian is not: the first if `loss` is convex, the second always. None is the
        Hessian.
      damping: number to add to the diagonal of the matrix, for example 1e-3.
      radius: radius of the trust region in the Euclidean norm over all primals, for example 1.0.
        None means no trust region.
      tolerance: CG stops when the norm of the residual, divided by the norm of the gradient, is at
        most this number, for example 1e-6. None is `min(0.5, sqrt(norm of g))`. The steps of a
        minimization then converge superlinearly.
      max_iterations: CG stops after this many iterations, each with one product.
      solver: function `solver(product, rhs)` to use instead of truncated CG, for a positive
        definite matrix. `product` multiplies the damped matrix by a vector, `rhs` is `-g`, and the
        function returns `p`. All vectors are tuples of trees like `primals`. For example
        `lambda product, rhs: jax.scipy.sparse.linalg.cg(product, rhs)[0]`, where `[0]` drops JAX's
        second result, or a function that calls a solver of Lineax.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled computation, such as "budget:2GiB". None linearizes the gradient once
        and stores the linear map, so that all products share it. With a policy, each product
        differentiates the gradient again and takes less memory.

    Returns:
      A `SecondOrderStep`, a pytree. Add its `step` to the primals.

    Raises:
      WrongArgument: both `solver` and `radius` are given, or `primals` is not a tuple or list.
      WrongDtype: a primal is not of a real floating-point dtype.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: one gradient, one linearization of it, and one product for each iteration. Besides these,
    CG holds five vectors like the primals in memory.
    Source: Steihaug, "The conjugate gradient method and trust regions in large scale optimization",
    SIAM J. Numer. Anal. 20 (1983); Nocedal and Wright, "Numerical Optimization", algorithms 7.1 and
    7.2.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 4.0]) * (x - 1) ** 2)
    >>> found = xform.curvature.newton_step(f, (jnp.zeros(2),), tolerance=1e-6)
    >>> found.step.round(4).tolist(), found.reason, int(found.iterations)
    ([1.0, 1.0], 'converged', 2)
    """
    check_callable(f, "newton_step")
    matrix = as_matrix(curvature or f, "newton_step")
    return _solve("newton_step", f, matrix, primals, (damping, radius, tolerance),
                  max_iterations, solver, policy)  # fmt: skip


def natural_gradient_step(
    model: Callable[..., Any],
    loss: Callable[..., Any],
    primals: Sequence[Tree],
    *,
    distribution: Distribution,
    reduction: Literal["sum", "mean"] = "mean",
    damping: float | Value = 1e-3,
    radius: float | Value | None = None,
    tolerance: float | Value | None = None,
    max_iterations: int = 100,
    solver: Solver | None = None,
    policy: Any = None,
) -> SecondOrderStep:
    """Compute a natural-gradient step `-(F + damping I)^-1 g`, with the Fisher matrix `F`.

    The gradient `g` is that of `loss(model(*primals))`. The linear system is solved by truncated
    conjugate gradients.

    Args:
      model: pure function of pytrees of arrays that returns one array.
      loss: function of the model's output that returns a scalar, such as the mean negative
        log-likelihood of the labels.
      primals: the point, a tuple or list of arguments of `model`, of real floating-point dtypes.
      distribution: distribution of the labels whose parameter is the model's output: "categorical"
        (logits, with the classes on the last axis), "bernoulli" (logits), "normal" (means, with
        unit variance) or "poisson" (logarithms of rates).
      reduction: "mean" if the loss is a mean over the output's first axis, "sum" if it is a sum.
        `F` then has the scale of the loss. The default is "mean", not "sum" as for `fisher_vp`,
        because most losses are means.
      damping: number to add to the diagonal of `F`, which may be singular.
      radius: radius of the trust region in the Euclidean norm over all primals, for example 1.0.
        None means no trust region.
      tolerance: CG stops when the norm of the residual, divided by the norm of the gradient, is at
        most this number, for example 1e-6. None is `min(0.5, sqrt(norm of g))`.
      max_iterations: CG stops after this many iterations, each with one product.
      solver: function `solver(product, rhs)` to use instead of truncated CG. `product` multiplies
        `F + damping I` by a vector, `rhs` is `-g`, and the function returns the step. All vectors
        are tuples of trees like `primals`. For example
        `lambda product, rhs: jax.scipy.sparse.linalg.cg(product, rhs)[0]`.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled computation, such as "budget:2GiB". None linearizes `model` once and
        stores the linear map, so that all products share it.

    Returns:
      A `SecondOrderStep`, a pytree. Add its `step` to the primals.

    Raises:
      WrongArgument: the distribution is unknown, both `solver` and `radius` are given, or `primals`
        is not a tuple or list.
      WrongDtype: a primal is not of a real floating-point dtype.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: one gradient, one linearization of `model`, and one product for each iteration.
    Source: Amari, "Natural gradient works efficiently in learning", Neural Computation 10 (1998).

    >>> x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0])
    >>> step = xform.curvature.natural_gradient_step(
    ...     lambda w: w * x, lambda z: jnp.mean((z - y) ** 2) / 2, (jnp.array(0.0),),
    ...     distribution="normal", damping=0.0, tolerance=1e-6)
    >>> float(step.step)
    3.0
    """
    check_callable(model, "natural_gradient_step")
    check_callable(loss, "natural_gradient_step")
    f = lambda *xs: loss(model(*xs))
    curvature = checked_fisher(model, distribution, reduction)
    return _solve("natural_gradient_step", f, curvature, primals, (damping, radius, tolerance),
                  max_iterations, solver, policy)  # fmt: skip


def _solve(caller: str, f: Any, curvature: Matrix, primals: Any, scalars: tuple[Any, Any, Any],
           max_iterations: int, solver: Solver | None, policy: Any) -> SecondOrderStep:  # fmt: skip
    """Compute the step of the public function `caller`, which errors name.

    `scalars` are its arguments `damping`, `radius` and `tolerance`.
    """
    if solver is not None and scalars[1] is not None:
        raise WrongArgument(
            f"{caller} with both solver= and radius=",
            "your own solver cannot take a trust region into account",
            "",
            "drop one of the two",
        )
    point = real_vector(primals, caller)
    leaves, tree = jax.tree.flatten(point)
    given = [as_array(x, caller) for x in scalars if x is not None]

    def step_by_policy(policy: Any) -> Any:
        def step(*flat: Any) -> SecondOrderStep:
            point, remaining = tree.unflatten(flat[: len(leaves)]), iter(flat[len(leaves) :])
            damping, radius, tolerance = [None if x is None else next(remaining) for x in scalars]
            gradient = grad(f, tuple(range(len(point))), policy=policy)(*point)
            product = curvature.at(point, policy)
            damped = lambda v: plus(product(v), v, damping)
            if solver is not None:
                return _solve_with(solver, damped, gradient)
            return truncated_cg(damped, gradient, radius, tolerance, max_iterations)

        return step

    result = run_within(caller, policy, step_by_policy, [*leaves, *given])
    return dataclasses.replace(result, step=unwrap(result.step))


def _solve_with(solver: Solver, product: Product, gradient: Tree) -> SecondOrderStep:
    """Solve `product(p) = -gradient` by the user's solver; one more product gives the residual."""
    p = solver(product, scale(gradient, -1))
    image = product(p)
    decrease = -dot(gradient, p) - dot(p, image) / 2
    residual = _relative(norm(plus(image, gradient)), norm(gradient))
    return SecondOrderStep(p, decrease, residual, jnp.int32(0), jnp.int32(_CONVERGED))


def truncated_cg(product: Product, gradient: Tree, radius: Value | None, tolerance: Value | None,
                 max_iterations: int) -> SecondOrderStep:  # fmt: skip
    """Solve `product(p) = -gradient` by conjugate gradients within a trust region.

    Args:
      product: function that multiplies a symmetric matrix by a vector.
      gradient: the negative right-hand side, a tuple of trees of arrays.
      radius: radius of the trust region; None means no trust region.
      tolerance: CG stops when the norm of the residual, divided by the norm of `gradient`, is at
        most this number. None is `min(0.5, sqrt(norm of gradient))`.
      max_iterations: largest number of iterations.

    Returns:
      The `SecondOrderStep`, with `p` as its `step`.
    """
    gradient_norm = norm(gradient)
    if tolerance is None:
        tolerance = jnp.minimum(0.5, jnp.sqrt(gradient_norm))
    threshold = tolerance * gradient_norm
    zero = scale(gradient, 0)

    # The state: the step p, the residual r = product(p) + gradient, the search direction d, the
    # decrease of the quadratic model, the number of iterations, and the code.
    def continues(state: Any) -> Value:
        *_, i, code = state
        return (code == _RUNNING) & (i < max_iterations)

    def iteration(state: Any) -> Any:
        p, r, d, decrease, i, _ = state
        image = product(d)
        curvature, square = dot(d, image), dot(r, r)
        positive = curvature > 0
        alpha = square / jnp.where(positive, curvature, 1)
        outside = jnp.array(False) if radius is None else norm(plus(p, d, alpha)) >= radius
        # How far to follow the last direction, if its curvature is not positive or the step would
        # leave the trust region. Without a trust region, the first direction is followed once, to
        # the negative gradient, and a later direction is not followed.
        if radius is None:
            last_alpha = jnp.where(i == 0, 1.0, 0.0).astype(square.dtype)
        else:
            last_alpha = _to_boundary(p, d, radius)
        alpha = jnp.where(positive & ~outside, alpha, last_alpha)
        # The slope of the quadratic model along d at p is -square (minus the squared norm of r),
        # because r is orthogonal to all earlier directions.
        decrease = decrease + alpha * square - alpha**2 * curvature / 2
        new_r = plus(r, image, alpha)
        inside_code = jnp.where(norm(new_r) <= threshold, _CONVERGED, _RUNNING)
        code = jnp.where(outside, _BOUNDARY, inside_code)
        code = jnp.where(positive, code, _NEGATIVE_CURVATURE)
        new_d = plus(scale(new_r, -1), d, dot(new_r, new_r) / square)
        return plus(p, d, alpha), new_r, new_d, decrease, i + 1, code

    start = jnp.where(gradient_norm <= 0, _CONVERGED, _RUNNING)
    zero_decrease = jnp.zeros_like(gradient_norm)
    state = (zero, gradient, scale(gradient, -1), zero_decrease, jnp.int32(0), start)
    p, r, _, decrease, i, code = lax.while_loop(continues, iteration, state)
    code = jnp.where(code == _RUNNING, _ITERATIONS, code)
    return SecondOrderStep(p, decrease, _relative(norm(r), gradient_norm), i, code)


def _to_boundary(p: Tree, d: Tree, radius: Value) -> Value:
    """Return the positive `alpha` that gives `p + alpha d` the norm `radius`."""
    a, b, c = dot(d, d), dot(p, d), dot(p, p) - radius**2
    root = jnp.sqrt(jnp.maximum(b**2 - a * c, 0))
    # The root of a quadratic equation, in the form without cancellation for the sign of b.
    return jnp.where(b > 0, -c / (b + root), (root - b) / jnp.where(a > 0, a, 1))


def _relative(residual: Value, gradient_norm: Value) -> Value:
    """Divide a residual norm by the norm of the gradient, or by 1 if that is zero."""
    return residual / jnp.where(gradient_norm > 0, gradient_norm, 1)
