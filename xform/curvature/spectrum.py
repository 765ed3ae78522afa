"""`hessian_spectrum`: the density of eigenvalues, by stochastic Lanczos quadrature."""

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

from xform.arithmetic import Value
from xform.curvature.matrices import Matrix, Product, matrix
from xform.curvature.vectors import (
    accumulator,
    dot,
    norm,
    rademacher,
    random_key,
    real_vector,
    scaled,
    size,
)
from xform.errors import WrongArgument
from xform.planner.report.picture import BLUE, axes, save
from xform.transforms.function import Tree
from xform.transforms.within import run_within


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a symmetric matrix as a density, and moments of it.

    Attributes:
      nodes: Ritz values of each sample, of shape `[samples, steps]`, ascending.
      weights: of each of them; those of a sample sum to one.
      dimension: rows of the matrix.
    """

    nodes: Value
    weights: Value
    dimension: int = dataclasses.field(metadata={"static": True})

    def moment(self, k: int) -> Value:
        """The mean of the `k`th powers of the eigenvalues."""
        return jnp.mean(jnp.sum(self.weights * self.nodes**k, axis=1))

    @property
    def trace(self) -> Value:
        """The sum of the eigenvalues."""
        return self.dimension * self.moment(1)

    @property
    def frobenius_norm(self) -> Value:
        """The root of the sum of their squares."""
        return jnp.sqrt(self.dimension * self.moment(2))

    @property
    def largest(self) -> Value:
        """The largest eigenvalue, which Lanczos steps find first; from below."""
        return jnp.max(self.nodes)

    @property
    def smallest(self) -> Value:
        """The smallest eigenvalue; from above."""
        return jnp.min(self.nodes)

    def density(self, at: Value, width: float | None = None) -> Value:
        """The density of eigenvalues at some points, of integral one.

        Args:
          at: points, an array of any shape.
          width: standard deviation of the normal distribution that stands for each eigenvalue;
            None: a hundredth of the range of eigenvalues.
        """
        broad = self.width if width is None else width
        points = jnp.asarray(at, self.nodes.dtype)

        def one(point: Value) -> Value:
            each = jnp.exp(-0.5 * ((point - self.nodes) / broad) ** 2)
            return jnp.mean(jnp.sum(self.weights * each, axis=1))

        # In batches: of all points and nodes at once there may be many.
        found = lax.map(one, points.ravel(), batch_size=min(64, max(points.size, 1)))
        return found.reshape(points.shape) / (broad * math.sqrt(2 * math.pi))

    @property
    def width(self) -> Value:
        """A hundredth of the range of eigenvalues, or of the largest if all are equal."""
        wide = self.largest - self.smallest
        return 0.01 * jnp.where(wide > 0, wide, jnp.maximum(jnp.abs(self.largest), 1e-6))

    def grid(self, points: int = 1000) -> Value:
        """Points over the whole range, with room for what is broadened at its ends."""
        room = 5 * self.width
        return jnp.linspace(self.smallest - room, self.largest + room, points)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the density, its logarithm upwards; PNG, SVG or PDF."""
        figure, ax = axes("Spectrum.plot")
        at = np.asarray(self.grid(2000), np.float64)
        ax.semilogy(at, np.maximum(np.asarray(self.density(at), np.float64), 1e-12), color=BLUE)
        ax.set_ylim(bottom=1e-9)
        ax.set_title(f"{self.dimension:,} eigenvalues", loc="left")
        ax.set_xlabel("eigenvalue")
        ax.set_ylabel("density")
        save(figure, "Spectrum.plot", path)

    def __str__(self) -> str:
        return (
            f"{self.dimension:,} eigenvalues from {float(self.smallest):.4g} to "
            f"{float(self.largest):.4g}, of trace {float(self.trace):.4g} and Frobenius norm "
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
    """The eigenvalue density of a Hessian, or of another curvature matrix.

    From each random vector, `steps` steps of Lanczos' method, each new vector made orthogonal to
    all before it, give a Gauss quadrature of the density.

    Args:
      f: function that returns a scalar, whose Hessian is meant; or a matrix of
        `xform.curvature`: `GaussNewton(model, loss)`, `Fisher(model, distribution)`.
      primals: the point, a tuple or list of arguments, of real dtypes.
      key: a JAX random key.
      steps: of Lanczos' method; at most as many as there are rows are made.
      samples: random vectors, over which is averaged.
      policy: what reverse mode keeps, or a budget of the peak of it all, as for `ggnvp`.

    Returns:
      A `Spectrum`, a pytree: print it, plot it, ask it for moments.

    Raises:
      WrongArgument: there are no steps, no samples, or no elements; `key` is no random key; or
        `primals` is no tuple or list.
      BudgetInfeasible: nothing that was tried fits the budget.

    Cost: `steps * samples` products, and `steps` vectors like the primals in memory.
    Source: Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature",
    SIAM J. Matrix Anal. Appl. 38 (2017); Yao et al., "PyHessian", arXiv:1912.07145, section 3.

    >>> f = lambda x: jnp.sum(jnp.array([1.0, 2.0, 3.0]) * x**2)
    >>> print(xform.hessian_spectrum(f, (jnp.ones(3),), jax.random.key(0)))
    3 eigenvalues from 2 to 6, of trace 12 and Frobenius norm 7.483
    """
    of, asked = matrix(f, "hessian_spectrum"), "hessian_spectrum"
    point, key = real_vector(primals, asked), random_key(key, asked)
    leaves, tree = jax.tree.flatten(point)
    n = size(point)
    if min(steps, samples, n) < 1:
        raise WrongArgument(
            f"{asked} with steps={steps} and samples={samples}",
            f"one of these, or of the {n} elements of the primals, is none",
            "",
            "give positive numbers, and parameters that have elements",
        )

    def run(way: Any) -> Any:
        def spectrum(key: Value, *flat: Value) -> tuple[Value, Value]:
            at = tree.unflatten(flat)
            product = of.at(at, way)
            one = lambda k: _quadrature(product, rademacher(k, at), min(steps, n))
            return lax.map(one, jax.random.split(key, samples))

        return spectrum

    nodes, weights = run_within(policy, run, [key, *leaves])
    return Spectrum(nodes, weights, n)


def _quadrature(product: Product, start: Tree, steps: int) -> tuple[Value, Value]:
    """Nodes and weights of the density that a vector sees."""
    alphas, betas = lanczos(product, start, steps)
    inside = betas[:-1]
    values, vectors = jnp.linalg.eigh(jnp.diag(alphas) + jnp.diag(inside, 1) + jnp.diag(inside, -1))
    # A step after the last one that there is, is cut off: it has no weight, and repeats a node.
    weights = vectors[0] ** 2
    heaviest = values[jnp.argmax(weights)]
    return jnp.where(weights > 0, values, heaviest), weights / jnp.sum(weights)


def lanczos(product: Product, start: Tree, steps: int) -> tuple[Value, Value]:
    """The diagonal of the tridiagonal matrix, and what is beside it; fully reorthogonalized.

    Where the space that products reach is exhausted, all that follows is zero.
    """
    dtype = accumulator(start)
    basis = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), start)
    q = scaled(start, 1 / norm(start))
    tiny = 10 * float(jnp.finfo(dtype).eps)

    def step(carry: Any, i: Value) -> Any:
        basis, q, largest = carry
        basis = jax.tree.map(lambda b, x: b.at[i].set(x), basis, q)
        w = product(q)
        alpha = dot(w, q)
        w = _orthogonal(_orthogonal(w, basis), basis)  # twice, for what rounding leaves
        beta = norm(w)
        largest = jnp.maximum(largest, jnp.maximum(jnp.abs(alpha), beta))
        going = beta > tiny * largest * steps
        beta = jnp.where(going, beta, 0)
        q = scaled(w, jnp.where(going, 1 / jnp.where(going, beta, 1), 0))
        return (basis, q, largest), (alpha, beta)

    carry = basis, q, jnp.zeros((), dtype)
    _, (alphas, betas) = lax.scan(step, carry, jnp.arange(steps))
    return alphas, betas


def _orthogonal(w: Tree, basis: Tree) -> Tree:
    """A vector without what it has along each of a stack of orthonormal ones."""
    along = jax.vmap(lambda b: dot(b, w))(basis)
    part = lambda b: jnp.tensordot(along.astype(b.dtype), b, 1)
    return jax.tree.map(lambda x, b: x - part(b), w, basis)
