"""`newton_step`, `natural_gradient_step`: a curvature matrix inverted by truncated CG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from xform.arithmetic import Value
from xform.callables import check_callable
from xform.curvature.matrices import Distribution, Matrix, Product, fisher, matrix
from xform.curvature.vectors import dot, norm, plus, real_vector, scaled, unwrapped
from xform.errors import WrongArgument
from xform.transforms.function import Tree, as_array
from xform.transforms.reverse import grad
from xform.transforms.within import run_within

REASONS = ("iterations", "converged", "negative curvature", "boundary")
Solver = Callable[[Callable[[Tree], Tree], Tree], Tree]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a second-order method.

    Attributes:
      step: what to add to the primals, like them.
      decrease: by how much the quadratic model says that the function falls.
      residual: norm of what is left of the equations, over that of the gradient.
      iterations: of conjugate gradients, each of one product; 0 with a solver of your own.
      code: why it ended, as a position in `REASONS`.
    """

    step: Tree
    decrease: Value
    residual: Value
    iterations: Value
    code: Value

    @property
    def reason(self) -> str:
        """Why it ended: "converged", "negative curvature", "boundary" or "iterations"."""
        return REASONS[int(self.code)]


def newton_step(
    f: Callable[..., Any],
    primals: Sequence[Tree],
    *,
    curvature: Matrix | None = None,
    damping: float | Value = 0.0,
    radius: float | Value | None = None,
    tolerance: float | Value | None = None,
    iterations: int = 100,
    solver: Solver | None = None,
    policy: Any = None,
) -> Step:
    """A Newton step by conjugate gradients, truncated where that is as good, or where it must be.

    Minimizes `g p + p (H + damping) p / 2`, with the gradient `g`, over steps `p` no longer than
    `radius`. Where the curvature along a direction is not positive, Steihaug's method goes along it
    to the boundary; without a `radius` the step ends there, or is that of steepest descent if it is
    the first direction.

    Args:
      f: pure function of pytrees of arrays that returns a scalar.
      primals: the point, a tuple or list of arguments, of real dtypes.
      curvature: a matrix of `xform.curvature` in the place of the Hessian of `f`:
        `GaussNewton(model, loss)`, `Fisher(model, distribution)`.
      damping: what is added to the diagonal.
      radius: of the trust region, in the Euclidean norm; None: there is none.
      tolerance: of the residual over the gradient's norm; None: `min(0.5, sqrt(norm of g))`, which
        makes steps of a minimization converge superlinearly.
      iterations: at most so many products.
      solver: in the place of truncated CG, `solver(product, rhs)`, such as that of
        `jax.scipy.sparse.linalg.cg`, or of Lineax, of a matrix that is positive definite.
      policy: what reverse mode keeps, or a budget of the peak of it all, as for `ggnvp`.

    Returns:
      A `Step`, a pytree: add `step` to the primals.

    Raises:
      WrongArgument: a solver is given with a `radius`, which it does not know; or `primals` is no
        tuple or list.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: one gradient, one linearization of it, and a product for each iteration; five vectors.
    Source: Steihaug, "The conjugate gradient method and trust regions in large scale optimization",
    SIAM J. Numer. Anal. 20 (1983); Nocedal and Wright, "Numerical Optimization", algorithms 7.1 and
    7.2.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 4.0]) * (x - 1) ** 2)
    >>> found = xform.newton_step(f, (jnp.zeros(2),), tolerance=1e-6)
    >>> found.step.round(4).tolist(), found.reason, int(found.iterations)
    ([1.0, 1.0], 'converged', 2)
    """
    check_callable(f, "newton_step")
    of = matrix(curvature or f, "newton_step")
    return _solved("newton_step", f, of, primals, (damping, radius, tolerance), iterations, solver,
                   policy)  # fmt: skip


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
    iterations: int = 100,
    solver: Solver | None = None,
    policy: Any = None,
) -> Step:
    """A step along the natural gradient: `-(F + damping)^-1 g`, with the Fisher matrix `F`.

    Args:
      model: pure function of pytrees of arrays that returns one array.
      loss: function of its output that returns a scalar; `g` is the gradient of both together.
      primals: the point, a tuple or list of arguments of `model`, of real dtypes.
      distribution: what the output is the parameter of, as for `fisher_vp`.
      reduction: "mean" where the loss is a mean over the output's first axis, "sum" where a sum.
      damping: what is added to the diagonal.
      radius: of the trust region, in the Euclidean norm; None: there is none.
      tolerance: of the residual over the gradient's norm; None: `min(0.5, sqrt(norm of g))`.
      iterations: at most so many products.
      solver: in the place of truncated CG, as for `newton_step`.
      policy: what reverse mode keeps, or a budget of the peak of it all, as for `ggnvp`.

    Returns:
      A `Step`, a pytree: add `step` to the primals.

    Raises:
      WrongArgument: there is no such distribution, a solver is given with a `radius`, or `primals`
        is no tuple or list.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: one gradient, one linearization of `model`, and a product for each iteration.
    Source: Amari, "Natural gradient works efficiently in learning", Neural Computation 10 (1998).

    >>> x, y = jnp.array([1.0, 2.0]), jnp.array([3.0, 6.0])
    >>> step = xform.natural_gradient_step(
    ...     lambda w: w * x, lambda z: jnp.mean((z - y) ** 2) / 2, (jnp.array(0.0),),
    ...     distribution="normal", damping=0.0, tolerance=1e-6)
    >>> float(step.step)
    3.0
    """
    check_callable(model, "natural_gradient_step")
    check_callable(loss, "natural_gradient_step")
    whole = lambda *xs: loss(model(*xs))
    of = fisher(model, distribution, reduction)
    return _solved("natural_gradient_step", whole, of, primals, (damping, radius, tolerance),
                   iterations, solver, policy)  # fmt: skip


def _solved(asked: str, f: Any, of: Matrix, primals: Any, numbers: tuple[Any, Any, Any],
            iterations: int, solver: Solver | None, policy: Any) -> Step:  # fmt: skip
    if solver is not None and numbers[1] is not None:
        raise WrongArgument(
            f"{asked} with a solver and a radius", "the solver knows no trust region", "",
            "drop one of them",
        )  # fmt: skip
    point = real_vector(primals, asked)
    (leaves, tree), given = (
        jax.tree.flatten(point),
        [as_array(x, asked) for x in numbers if x is not None],
    )

    def run(way: Any) -> Any:
        def step(*flat: Any) -> Step:
            at, rest = tree.unflatten(flat[: len(leaves)]), iter(flat[len(leaves) :])
            damping, radius, tolerance = [None if x is None else next(rest) for x in numbers]
            gradient = grad(f, tuple(range(len(at))), policy=way)(*at)
            product = of.at(at, way)
            damped = lambda v: plus(product(v), v, damping)
            if solver is not None:
                return _by(solver, damped, gradient)
            return truncated_cg(damped, gradient, radius, tolerance, iterations)

        return step

    found = run_within(policy, run, [*leaves, *given])
    return dataclasses.replace(found, step=unwrapped(found.step))


def _by(solver: Solver, product: Product, gradient: Tree) -> Step:
    p = solver(product, scaled(gradient, -1))
    image = product(p)
    none = jnp.zeros((), jnp.int32)
    decrease = -dot(gradient, p) - dot(p, image) / 2
    return Step(p, decrease, _over(norm(plus(image, gradient)), norm(gradient)), none, none + 1)


def truncated_cg(product: Product, gradient: Tree, radius: Value | None, tolerance: Value | None,
                 iterations: int) -> Step:  # fmt: skip
    """The step of conjugate gradients on `product(p) = -gradient`, within a trust region."""
    length = norm(gradient)
    enough = (jnp.minimum(0.5, jnp.sqrt(length)) if tolerance is None else tolerance) * length
    zero = scaled(gradient, 0)
    running, converged, negative, boundary = -1, 1, 2, 3

    def going(state: Any) -> Value:
        *_, i, code = state
        return (code == running) & (i < iterations)

    def step(state: Any) -> Any:
        p, r, d, decrease, i, _ = state
        image = product(d)
        curvature, square = dot(d, image), dot(r, r)
        falls = curvature > 0
        alpha = square / jnp.where(falls, curvature, 1)
        ahead = plus(p, d, alpha)
        outside = jnp.array(False) if radius is None else norm(ahead) >= radius
        if radius is None:  # along the first direction as far as the gradient is long
            edge = jnp.where(i == 0, 1.0, 0.0).astype(square.dtype)
        else:
            edge = _to_boundary(p, d, radius)
        by = jnp.where(falls & ~outside, alpha, edge)
        # Of the model along d: its slope at p is -square, as r is orthogonal to all d before.
        decrease = decrease + by * square - by**2 * curvature / 2
        rest = plus(r, image, by)
        ended = jnp.where(norm(rest) <= enough, converged, running)
        code = jnp.where(falls, jnp.where(outside, boundary, ended), negative)
        again = plus(scaled(rest, -1), d, dot(rest, rest) / square)
        return plus(p, d, by), rest, again, decrease, i + 1, code

    start = jnp.where(length <= 0, converged, running)
    state = (zero, gradient, scaled(gradient, -1), jnp.zeros_like(length), jnp.int32(0), start)
    p, r, _, decrease, i, code = lax.while_loop(going, step, state)
    code = jnp.where(code == running, 0, code)
    return Step(p, decrease, _over(norm(r), length), i, code)


def _to_boundary(p: Tree, d: Tree, radius: Value) -> Value:
    """How far along `d` it is from `p` to the sphere: the positive root of a quadratic."""
    a, b, c = dot(d, d), dot(p, d), dot(p, p) - radius**2
    root = jnp.sqrt(jnp.maximum(b**2 - a * c, 0))
    # The form without cancellation, whichever sign b has.
    return jnp.where(b > 0, -c / (b + root), (root - b) / jnp.where(a > 0, a, 1))


def _over(residual: Value, length: Value) -> Value:
    return residual / jnp.where(length > 0, length, 1)
