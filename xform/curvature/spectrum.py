"""`hessian_spectrum`: the eigenvalue density of a matrix, by stochastic Lanczos quadrature.

Lanczos' method multiplies a symmetric matrix by a sequence of orthonormal vectors (the basis). It
gives a small tridiagonal matrix. Its eigenvalues, the Ritz values, approximate eigenvalues of the
large matrix. The squares of the first components of its eigenvectors are their weights in the
density.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xform.curvature.matrices import Matrix, Product, as_matrix
from xform.curvature.vectors import (
    accumulation_dtype,
    dot,
    norm,
    rademacher,
    random_key,
    real_vector,
    scale,
    size,
)
from xform.errors import WrongArgument
from xform.planner.report.picture import BLUE, new_axes, save_figure
from xform.program.arithmetic import Value
from xform.program.arrays import stacked, zeros
from xform.terminal.notebook import Result
from xform.transforms.function import Tree
from xform.transforms.within import run_within


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Spectrum(Result):
    """An estimate of the eigenvalue density of a symmetric matrix.

    Attributes:
      nodes: approximate eigenvalues (Ritz values) of each sample, of shape `[samples, steps]`,
        ascending unless Lanczos' method ended early.
      weights: weight of each Ritz value, of the same shape; the weights of a sample sum to one.
      dimension: number of rows of the matrix.
    """

    nodes: Value
    weights: Value
    dimension: int = dataclasses.field(metadata={"static": True})

    def moment(self, k: int) -> Value:
        """Estimate the mean of the `k`th powers of the eigenvalues, a scalar."""
        return jnp.mean(jnp.sum(self.weights * self.nodes**k, axis=1))

    @property
    def trace(self) -> Value:
        """Estimate of the sum of the eigenvalues."""
        return self.dimension * self.moment(1)

    @property
    def frobenius_norm(self) -> Value:
        """Estimate of the square root of the sum of the squared eigenvalues."""
        return jnp.sqrt(self.dimension * self.moment(2))

    @property
    def largest(self) -> Value:
        """Largest Ritz value: an estimate of the largest eigenvalue from below.

        Lanczos steps approximate the extreme eigenvalues first.
        """
        return jnp.max(self.nodes)

    @property
    def smallest(self) -> Value:
        """Smallest Ritz value: an estimate of the smallest eigenvalue from above."""
        return jnp.min(self.nodes)

    def density(self, points: Value, width: float | None = None) -> Value:
        """Evaluate the eigenvalue density, whose integral is one.

        Args:
          points: evaluation points, an array of any shape.
          width: standard deviation of the normal distribution that replaces each eigenvalue; None:
            the property `width`.

        Returns:
          The density at each point, in the shape of `points`.
        """
        deviation = self.width if width is None else width
        points = jnp.asarray(points, self.nodes.dtype)

        def sum_at(point: Value) -> Value:
            bells = jnp.exp(-0.5 * ((point - self.nodes) / deviation) ** 2)
            return jnp.mean(jnp.sum(self.weights * bells, axis=1))

        # In batches, because an array of all pairs of points and nodes may not fit in memory.
        sums = lax.map(sum_at, points.ravel(), batch_size=min(64, max(points.size, 1)))
        return sums.reshape(points.shape) / (deviation * math.sqrt(2 * math.pi))

    @property
    def width(self) -> Value:
        """Default `width` of `density`: a hundredth of the range of the eigenvalues.

        If all eigenvalues are equal, it is a hundredth of their absolute value, which counts as at
        least 1e-6. So the width is then at least 1e-8.
        """
        spread = self.largest - self.smallest
        return 0.01 * jnp.where(spread > 0, spread, jnp.maximum(jnp.abs(self.largest), 1e-6))

    def grid(self, num: int = 1000) -> Value:
        """Return `num` equidistant points at which to evaluate the density, an array `[num]`.

        They reach from five times `width` below the smallest Ritz value to five times `width` above
        the largest, so that the tails of the normal distributions are included.
        """
        margin = 5 * self.width
        return jnp.linspace(self.smallest - margin, self.largest + margin, num)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the density on a logarithmic axis.

        Args:
          path: the file; its suffix, .png, .svg or .pdf, is the format.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the file has another suffix.
        """
        figure, ax = new_axes("Spectrum.plot")
        points = np.asarray(self.grid(2000), np.float64)
        density = np.asarray(self.density(points), np.float64)
        ax.semilogy(points, np.maximum(density, 1e-12), color=BLUE)  # no logarithm of zero
        ax.set_ylim(bottom=1e-9)
        ax.set_title(f"{self.dimension:,} eigenvalues", loc="left")
        ax.set_xlabel("eigenvalue")
        ax.set_ylabel("density")
        save_figure(figure, "Spectrum.plot", path)

    def __str__(self) -> str:
        return (
            f"{self.dimension:,} eigenvalues from {float(self.smallest):.4g} to "
            f"{float(self.largest):.4g}, with trace {float(self.trace):.4g} and Frobenius norm "
            f"{float(self.frobenius_norm):.4g}"
        )


def hessian_spectrum(
    f: Callable[..., Any] | Matrix,
    primals: Sequence[Tree],
    key: Value,
    *,
    steps: int = 80,
    samples: int = 4,
    policy: Any = None,
) -> Spectrum:
    """Estimate the eigenvalue density of a Hessian, or of another curvature matrix.

    Each sample starts from a random vector and makes `steps` steps of Lanczos' method, with full
    reorthogonalization. The result is a Gauss quadrature of the density.

    Args:
      f: function that returns a scalar, to estimate its Hessian; or a matrix of `xform.curvature`:
        `GaussNewton(model, loss)` or `Fisher(model, distribution)`.
      primals: the point, a tuple or list of arguments, of real floating-point dtypes.
      key: a JAX random key.
      steps: number of Lanczos steps, at most the number of rows of the matrix.
      samples: number of random vectors; the density is the mean over them.
      policy: which values reverse mode saves: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; or a budget of the peak memory
        of the whole compiled computation, such as "budget:2GiB". None linearizes the gradient (or
        the model) once and stores the linear map, so that all products share it. With a policy,
        each product differentiates again and takes less memory.

    Returns:
      A `Spectrum`, a pytree, with moments, a text form and a plot.

    Raises:
      WrongArgument: `steps`, `samples` or the number of elements of the primals is zero; `key` is
        not a random key; or `primals` is not a tuple or list.
      BudgetInfeasible: no plan that was tried fits the budget.

    Cost: `steps * samples` products, and `steps` vectors like the primals in memory.
    Source: Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature",
    SIAM J. Matrix Anal. Appl. 38 (2017); Yao et al., "PyHessian", arXiv:1912.07145, section 3.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 2.0, 3.0]) * x**2)
    >>> print(xform.curvature.hessian_spectrum(f, (jnp.ones(3),), jax.random.key(0)))
    3 eigenvalues from 2 to 6, with trace 12 and Frobenius norm 7.483
    """
    caller = "hessian_spectrum"
    curvature = as_matrix(f, caller)
    point, key = real_vector(primals, caller), random_key(key, caller)
    leaves, tree = jax.tree.flatten(point)
    n = size(point)
    if min(steps, samples, n) < 1:
        raise WrongArgument(
            f"{caller} with steps={steps} and samples={samples}, of primals with {n} elements",
            "each of these numbers must be at least one",
            "",
            "pass positive steps and samples, and parameters that have elements",
        )

    def quadratures_by_policy(policy: Any) -> Any:
        def quadratures(key: Value, *flat: Value) -> tuple[Value, Value]:
            point = tree.unflatten(flat)
            product = curvature.at(point, policy)
            sample = lambda key: _quadrature(product, rademacher(key, point), min(steps, n))
            return lax.map(sample, jax.random.split(key, samples))

        return quadratures

    nodes, weights = run_within(caller, policy, quadratures_by_policy, [key, *leaves])
    return Spectrum(nodes, weights, n)


def _quadrature(product: Product, start: Tree, steps: int) -> tuple[Value, Value]:
    """Return nodes and weights of the Gauss quadrature that Lanczos steps from `start` give."""
    alphas, betas = lanczos(product, start, steps)
    off_diagonal = betas[:-1]
    tridiagonal = jnp.diag(alphas) + jnp.diag(off_diagonal, 1) + jnp.diag(off_diagonal, -1)
    values, vectors = jnp.linalg.eigh(tridiagonal)
    # If Lanczos' method ended early, the remaining rows of the tridiagonal matrix are zero. Their
    # eigenvalues have weight zero, and are replaced by a Ritz value, so that they add no node.
    weights = vectors[0] ** 2
    heaviest = values[jnp.argmax(weights)]
    return jnp.where(weights > 0, values, heaviest), weights / jnp.sum(weights)


def lanczos(product: Product, start: Tree, steps: int) -> tuple[Value, Value]:
    """Run Lanczos' method with full reorthogonalization.

    Returns the diagonal of the tridiagonal matrix, and its off-diagonal with one extra element at
    the end, each of length `steps`. The method ends early if the next vector is zero except for
    rounding: products of the matrix with the basis then add nothing new. All later elements are
    zero.
    """
    dtype = accumulation_dtype(start)
    basis = jax.tree.map(lambda x: zeros(stacked(steps, jax.typeof(x))), start)
    length = norm(start)
    q = scale(start, 1 / length)
    tiny = 10 * float(jnp.finfo(dtype).eps)

    def step(carry: Any, i: Value) -> Any:
        basis, q, largest = carry
        basis = jax.tree.map(lambda b, x: b.at[i].set(x), basis, q)
        w = product(q)
        alpha = dot(w, q)
        w = _orthogonal(_orthogonal(w, basis), basis)  # twice, because rounding leaves a remainder
        beta = norm(w)
        largest = jnp.maximum(largest, jnp.maximum(jnp.abs(alpha), beta))
        has_next = beta > tiny * largest * steps
        beta = jnp.where(has_next, beta, 0)
        q = scale(w, jnp.where(has_next, 1 / jnp.where(has_next, beta, 1), 0))
        return (basis, q, largest), (alpha, beta)

    carry = basis, q, zeros(jax.typeof(length))
    _, (alphas, betas) = lax.scan(step, carry, jnp.arange(steps))
    return alphas, betas


def _orthogonal(w: Tree, basis: Tree) -> Tree:
    """Remove from a vector its components along each of a stack of orthonormal vectors."""
    components = jax.vmap(lambda b: dot(b, w))(basis)
    combination = lambda b: jnp.tensordot(components.astype(b.dtype), b, 1)
    return jax.tree.map(lambda x, b: x - combination(b), w, basis)
