"""`hutchinson`: trace and diagonal of a matrix from a few products with random signs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xform.arithmetic import Value
from xform.curvature.matrices import Matrix, matrix
from xform.curvature.vectors import (
    dot,
    plus,
    rademacher,
    random_key,
    real_vector,
    scaled,
    unwrapped,
    wide,
)
from xform.errors import WrongArgument
from xform.transforms.function import Tree
from xform.transforms.within import run_within


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TraceAndDiagonal:
    """Estimates, with their standard errors.

    Attributes:
      trace: of the matrix.
      trace_error: the standard error of that mean: of independent samples, two errors hold 95%.
      diagonal: of the matrix, like the primals.
      diagonal_error: the standard error of each of its elements.
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
    """Estimate trace and diagonal of a Hessian, or of another curvature matrix, with their errors.

    For a vector `z` of random signs the expectation of `z * (A z)` is the diagonal of `A`, and that
    of its sum the trace.

    Args:
      f: function that returns a scalar, whose Hessian is meant; or a matrix of
        `xform.curvature`: `GaussNewton(model, loss)`, `Fisher(model, distribution)`.
      primals: the point, a tuple or list of arguments, of real dtypes.
      key: a JAX random key.
      samples: how many vectors, two at least; errors fall with its square root.
      policy: what reverse mode keeps, or a budget of the peak of it all, as for `ggnvp`.

    Returns:
      A `TraceAndDiagonal`, a pytree, in float32 at least.

    Raises:
      WrongArgument: fewer than two samples, from which no error is known; `key` is no random key;
        or `primals` is no tuple or list.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: one linearization of the gradient, one product for each sample, one after the other; four
    vectors in memory. The error of the trace is `sqrt(2 / samples)` times the norm of the
    elements off the diagonal: a diagonal matrix is exact.
    Source: Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990; Bekas,
    Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", 2007.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 2.0, 3.0]) * x**2)
    >>> estimate = xform.hutchinson(f, (jnp.ones(3),), jax.random.key(0))
    >>> float(estimate.trace), float(estimate.trace_error), estimate.diagonal.tolist()
    (12.0, 0.0, [2.0, 4.0, 6.0])
    """
    of = matrix(f, "hutchinson")
    if samples < 2:
        raise WrongArgument(
            f"hutchinson with samples={samples}",
            "from fewer than two samples no error is known",
            "",
            "give two at least",
        )
    key = random_key(key, "hutchinson")
    leaves, tree = jax.tree.flatten(real_vector(primals, "hutchinson"))
    run = lambda way: lambda key, *flat: _estimate(of, tree.unflatten(flat), way, key, samples)
    return run_within(policy, run, [key, *leaves])


def _estimate(of: Matrix, primals: tuple[Tree, ...], way: Any, key: Value, samples: int
              ) -> TraceAndDiagonal:  # fmt: skip
    product = of.at(primals, way)
    zero = wide(scaled(primals, 0))

    def step(carry: Any, x: Any) -> Any:
        """Mean and squared distances from it, by Welford's recurrence."""
        mean, square = carry
        i, sample_key = x
        z = rademacher(sample_key, primals)
        image = product(z)
        elements = wide(jax.tree.map(jnp.multiply, z, image))
        new = plus(mean, plus(elements, mean, -1.0), 1 / (i + 1))
        off = jax.tree.map(lambda e, a, b: (e - a) * (e - b), elements, mean, new)
        return (new, plus(square, off)), dot(z, image)

    keys = jax.random.split(key, samples)
    (mean, square), traces = lax.scan(step, (zero, zero), (jnp.arange(samples), keys))
    error = lambda v: jnp.sqrt(v / (samples * (samples - 1)))
    return TraceAndDiagonal(
        jnp.mean(traces),
        jnp.std(traces, ddof=1) / math.sqrt(samples),
        unwrapped(mean),
        unwrapped(jax.tree.map(error, square)),
    )
