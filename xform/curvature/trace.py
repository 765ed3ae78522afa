"""`hutchinson`: estimates of a matrix's trace and diagonal from products with random signs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.curvature.matrices import Matrix, as_matrix
from xform.curvature.vectors import (
    at_least_float32,
    dot,
    plus,
    rademacher,
    random_key,
    real_vector,
    scale,
    unwrap,
)
from xform.errors import WrongArgument
from xform.program.arithmetic import Value
from xform.transforms.function import Tree
from xform.transforms.within import run_within


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TraceAndDiagonal:
    """Estimates of the trace and the diagonal of a matrix, with their standard errors.

    Attributes:
      trace: estimate of the trace, a scalar: the mean over the samples.
      trace_error: standard error of that mean. The trace lies within two standard errors in about
        95% of runs.
      diagonal: estimate of the diagonal, of the structure of the primals.
      diagonal_error: standard error of each element of the diagonal.
    """

    trace: Value
    trace_error: Value
    diagonal: Tree
    diagonal_error: Tree


def hutchinson(
    f: Callable[..., Any] | Matrix,
    primals: Sequence[Tree],
    key: Value,
    *,
    samples: int = 32,
    policy: Any = None,
) -> TraceAndDiagonal:
    """Estimate the trace and diagonal of a curvature matrix, with standard errors.

    For a vector `z` of random signs, the expectation of `z * (A z)` is the diagonal of `A`. The
    expectation of the sum of its elements is the trace.

    Args:
      f: function that returns a scalar, to estimate its Hessian; or a matrix of `xform.curvature`:
        `GaussNewton(model, loss)` or `Fisher(model, distribution)`.
      primals: the point, a tuple or list of arguments, of real floating-point dtypes.
      key: a JAX random key.
      samples: number of random vectors, at least two. With four times as many, the errors are half
        as large.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled computation, such as "budget:2GiB". None linearizes the gradient (or
        the model) once and stores the linear map, so that all products share it. With a policy,
        each product differentiates again and takes less memory.

    Returns:
      A `TraceAndDiagonal`, a pytree, in at least float32.

    Raises:
      WrongArgument: `samples` is less than two, so that there is no error estimate; `key` is not a
        random key; or `primals` is not a tuple or list.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: one linearization of the gradient, and one product for each sample, one after the other.
    Memory holds four vectors like the primals. The error of the trace is `sqrt(2 / samples)` times
    the norm of the off-diagonal elements, so the estimate for a diagonal matrix is exact.
    Source: Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990; Bekas,
    Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", 2007.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 2.0, 3.0]) * x**2)
    >>> estimate = xform.curvature.hutchinson(f, (jnp.ones(3),), jax.random.key(0))
    >>> float(estimate.trace), float(estimate.trace_error), estimate.diagonal.tolist()
    (12.0, 0.0, [2.0, 4.0, 6.0])
    """
    curvature = as_matrix(f, "hutchinson")
    if samples < 2:
        raise WrongArgument(
            f"hutchinson with samples={samples}",
            "an error estimate needs at least two samples",
            "",
            "pass samples=2 or more",
        )
    key = random_key(key, "hutchinson")
    leaves, tree = jax.tree.flatten(real_vector(primals, "hutchinson"))

    def estimate_by_policy(policy: Any) -> Any:
        return lambda key, *flat: _estimate(curvature, tree.unflatten(flat), policy, key, samples)

    return run_within("hutchinson", policy, estimate_by_policy, [key, *leaves])


def _estimate(curvature: Matrix, primals: tuple[Tree, ...], policy: Any, key: Value, samples: int
              ) -> TraceAndDiagonal:  # fmt: skip
    """Return the estimates at `primals`, one product after the other."""
    product = curvature.at(primals, policy)
    zero = at_least_float32(scale(primals, 0))

    def add_sample(carry: Any, x: Any) -> Any:
        """Update the mean and the sum of squared deviations, by Welford's recurrence."""
        mean, squares = carry
        i, sample_key = x
        z = rademacher(sample_key, primals)
        image = product(z)
        diagonal = at_least_float32(jax.tree.map(jnp.multiply, z, image))
        new_mean = plus(mean, plus(diagonal, mean, -1.0), 1 / (i + 1))
        added = jax.tree.map(lambda x, old, new: (x - old) * (x - new), diagonal, mean, new_mean)
        return (new_mean, plus(squares, added)), dot(z, image)

    keys = jax.random.split(key, samples)
    (mean, squares), traces = lax.scan(add_sample, (zero, zero), (jnp.arange(samples), keys))
    standard_error = lambda squares: jnp.sqrt(squares / (samples * (samples - 1)))
    return TraceAndDiagonal(
        jnp.mean(traces),
        jnp.std(traces, ddof=1) / math.sqrt(samples),
        unwrap(mean),
        unwrap(jax.tree.map(standard_error, squares)),
    )
