"""The Hessian, the Gauss-Newton matrix and the Fisher matrix, as matrix-vector products.

Each class describes a symmetric matrix that depends on a point. `at(primals, policy)` returns the
function that multiplies the matrix at that point by a vector. No matrix is ever formed.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xform.errors import WrongArgument
from xform.introspection.callables import check_callable
from xform.program.arithmetic import Value
from xform.transforms.forward import jvp, linearize
from xform.transforms.function import Tree
from xform.transforms.jacobian import hvp
from xform.transforms.reverse import grad, vjp

# A point or a vector: one pytree of arrays for each argument of the function.
Vector = tuple[Tree, ...]
# Multiplies a matrix by a vector.
Product = Callable[[Vector], Vector]
# The distributions whose parameter a model may return.
Distribution = Literal["categorical", "bernoulli", "normal", "poisson"]


class Matrix(abc.ABC):
    """A symmetric matrix that depends on a point, given by its product with vectors."""

    @abc.abstractmethod
    def at(self, primals: Vector, policy: Any) -> Product:
        """Return a function that multiplies the matrix at `primals` by a vector like `primals`.

        `policy` says which values reverse mode saves. With None, the gradient or model is
        linearized once and the linear map is stored, so that many products share the cost of one
        linearization. With a policy, each product differentiates again.
        """


@dataclasses.dataclass(frozen=True)
class Hessian(Matrix):
    """The Hessian matrix of a function.

    Attributes:
      f: function of the primals that returns a scalar.
    """

    f: Callable[..., Any]

    def at(self, primals: Vector, policy: Any) -> Product:
        """Return the Hessian-vector product at `primals`: a jvp of the gradient."""
        gradient = grad(self.f, tuple(range(len(primals))), policy=policy)
        if policy is None:
            _, push = linearize(gradient, *primals)
            return lambda v: push(*v)
        return lambda v: jvp(gradient, primals, v)[1]


@dataclasses.dataclass(frozen=True)
class GaussNewton(Matrix):
    """The generalized Gauss-Newton matrix `J^T H J`.

    Attributes:
      model: function of the primals; its Jacobian is `J`.
      loss: function of the model's output that returns a scalar; its Hessian is `H`.
    """

    model: Callable[..., Any]
    loss: Callable[..., Any]

    def at(self, primals: Vector, policy: Any) -> Product:
        """Return the matrix-vector product at `primals`."""
        loss_product = lambda z, dz: hvp(self.loss, (z,), (dz,))
        return _product_through_model(self.model, loss_product, primals, policy)


@dataclasses.dataclass(frozen=True)
class Fisher(Matrix):
    """The Fisher information matrix `J^T F J` of a model whose output parametrizes a distribution.

    Attributes:
      model: function of the primals that returns one array; its Jacobian is `J`.
      distribution: the distribution whose parameter is the output; its Fisher information is `F`.
      reduction: "sum" over all examples, or "mean" over the first axis of the output.
    """

    model: Callable[..., Any]
    distribution: Distribution
    reduction: Literal["sum", "mean"] = "sum"

    def at(self, primals: Vector, policy: Any) -> Product:
        """Return the matrix-vector product at `primals`."""
        return _product_through_model(self.model, self._output_product, primals, policy)

    def _output_product(self, z: Value, dz: Value) -> Value:
        """Multiply `F`, at the model's output `z`, by `dz`."""
        if not hasattr(z, "shape"):
            raise WrongArgument(
                "fisher_vp", f"the model returned {type(z).__name__}", "", "return one array"
            )
        if self.distribution == "categorical" and z.ndim == 0:
            raise WrongArgument(
                "fisher_vp of a categorical distribution",
                "the model returned a scalar",
                "",
                "return logits, with the classes on the last axis",
            )
        product = _OUTPUT_PRODUCTS[self.distribution](z, dz)
        if self.reduction == "sum":
            return product
        if z.ndim == 0:
            raise WrongArgument(
                'fisher_vp with reduction="mean"',
                "the model returned a scalar, which has no axis of examples",
                "",
                'use reduction="sum"',
            )
        return product / z.shape[0]


def _categorical(z: Value, dz: Value) -> Value:
    """Multiply the Fisher matrix of a categorical distribution with logits `z` by `dz`."""
    p = jax.nn.softmax(z, axis=-1)
    return p * (dz - jnp.sum(p * dz, axis=-1, keepdims=True))


def _bernoulli(z: Value, dz: Value) -> Value:
    """Multiply the Fisher matrix of a Bernoulli distribution with logits `z` by `dz`."""
    p = jax.nn.sigmoid(z)
    return p * (1 - p) * dz


_OUTPUT_PRODUCTS: dict[str, Callable[[Value, Value], Value]] = {
    "categorical": _categorical,
    "bernoulli": _bernoulli,
    "normal": lambda z, dz: dz,
    "poisson": lambda z, dz: jnp.exp(z) * dz,
}


def checked_fisher(model: Any, distribution: Any, reduction: Any) -> Fisher:
    """Return the Fisher matrix; raise an error if an argument of `fisher_vp` is invalid."""
    check_callable(model, "fisher_vp")
    if distribution not in _OUTPUT_PRODUCTS:
        raise WrongArgument(
            f"fisher_vp of distribution={distribution!r}",
            "unknown distribution",
            "",
            f"use one of {tuple(_OUTPUT_PRODUCTS)}, or pass the negative log-likelihood to ggnvp",
        )
    if reduction not in ("sum", "mean"):
        raise WrongArgument(
            f"fisher_vp with reduction={reduction!r}",
            "unknown reduction",
            "",
            'use "sum" or "mean"',
        )
    return Fisher(model, distribution, reduction)


def as_matrix(f: Any, caller: str) -> Matrix:
    """Return `f` if it is a `Matrix`, or the Hessian of the function `f`.

    `caller` is the public function that an error names.
    """
    if isinstance(f, Matrix):
        return f
    check_callable(f, caller)
    return Hessian(f)


def _product_through_model(
    model: Callable[..., Any],
    output_product: Callable[[Any, Any], Any],
    primals: Vector,
    policy: Any,
) -> Product:
    """Return the product with `J^T A J`, with the Jacobian `J` of `model` at `primals`.

    `output_product(z, dz)` returns `A dz` at the model's output `z`.
    """
    if policy is None:
        z, push = linearize(model, *primals)
        _, pull = vjp(model, *primals)
        return lambda v: pull(output_product(z, push(*v)))

    def product(v: Sequence[Tree]) -> Vector:
        z, dz = jvp(model, primals, v)
        _, pull = vjp(model, *primals, policy=policy)
        return pull(output_product(z, dz))

    return product
