"""Curvature matrices, by their products with vectors: Hessian, Gauss-Newton and Fisher matrix.

Each is a symmetric matrix of a point; none is ever formed. `at` gives its product there.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from xform.arithmetic import Value
from xform.callables import check_callable
from xform.errors import WrongArgument
from xform.transforms.forward import jvp, linearize
from xform.transforms.function import Tree
from xform.transforms.jacobian import hvp
from xform.transforms.reverse import grad, vjp

Vector = tuple[Tree, ...]
Product = Callable[[Vector], Vector]
Distribution = Literal["categorical", "bernoulli", "normal", "poisson"]


class Matrix(abc.ABC):
    """A symmetric matrix that belongs to each point."""

    @abc.abstractmethod
    def at(self, primals: Vector, way: Any) -> Product:
        """Its product with vectors like `primals`, there.

        `way` is what reverse mode keeps; None: the linear map is kept as a whole, so that many
        products cost one linearization.
        """


@dataclasses.dataclass(frozen=True)
class Hessian(Matrix):
    """Second derivatives of a function.

    Attributes:
      f: function of the primals that returns a scalar.
    """

    f: Callable[..., Any]

    def at(self, primals: Vector, way: Any) -> Product:
        """The product of the Hessian, forward over reverse."""
        gradient = grad(self.f, tuple(range(len(primals))), policy=way)
        if way is None:
            _, push = linearize(gradient, *primals)
            return lambda v: push(*v)
        return lambda v: jvp(gradient, primals, v)[1]


@dataclasses.dataclass(frozen=True)
class GaussNewton(Matrix):
    """The generalized Gauss-Newton matrix `J^T H J`.

    Attributes:
      model: function of the primals whose Jacobian is `J`.
      loss: function of the model's output that returns a scalar, whose Hessian is `H`.
    """

    model: Callable[..., Any]
    loss: Callable[..., Any]

    def at(self, primals: Vector, way: Any) -> Product:
        """The product of the matrix."""
        return _sandwich(self.model, lambda z, dz: hvp(self.loss, (z,), (dz,)), primals, way)


@dataclasses.dataclass(frozen=True)
class Fisher(Matrix):
    """The Fisher information `J^T F J` of a model whose output gives a distribution.

    Attributes:
      model: function of the primals that returns one array, whose Jacobian is `J`.
      distribution: what the output is the parameter of, whose Fisher information is `F`.
      reduction: "sum" over all examples, or "mean" over the first axis of the output.
    """

    model: Callable[..., Any]
    distribution: Distribution
    reduction: Literal["sum", "mean"] = "sum"

    def at(self, primals: Vector, way: Any) -> Product:
        """The product of the matrix."""
        return _sandwich(self.model, self._of_output, primals, way)

    def _of_output(self, z: Value, dz: Value) -> Value:
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
        product = _OF_OUTPUT[self.distribution](z, dz)
        if self.reduction == "sum":
            return product
        if z.ndim == 0:
            raise WrongArgument(
                'fisher_vp with reduction="mean"',
                "the model returned a scalar, which has no axis of examples",
                "",
                'give reduction="sum"',
            )
        return product / z.shape[0]


def _categorical(z: Value, dz: Value) -> Value:
    p = jax.nn.softmax(z, axis=-1)
    return p * (dz - jnp.sum(p * dz, axis=-1, keepdims=True))


def _bernoulli(z: Value, dz: Value) -> Value:
    p = jax.nn.sigmoid(z)
    return p * (1 - p) * dz


_OF_OUTPUT: dict[str, Callable[[Value, Value], Value]] = {
    "categorical": _categorical,
    "bernoulli": _bernoulli,
    "normal": lambda z, dz: dz,
    "poisson": lambda z, dz: jnp.exp(z) * dz,
}


def fisher(model: Any, distribution: Any, reduction: Any) -> Fisher:
    """The matrix, its arguments checked."""
    check_callable(model, "fisher_vp")
    if distribution not in _OF_OUTPUT:
        raise WrongArgument(
            f"fisher_vp of distribution={distribution!r}",
            "there is no such distribution",
            "",
            f"give one of {tuple(_OF_OUTPUT)}, or ggnvp the negative log-likelihood",
        )
    if reduction not in ("sum", "mean"):
        raise WrongArgument(
            f"fisher_vp with reduction={reduction!r}", "there is none", "", 'give "sum" or "mean"'
        )
    return Fisher(model, distribution, reduction)


def matrix(f: Any, asked: str) -> Matrix:
    """A matrix; of a function its Hessian."""
    if isinstance(f, Matrix):
        return f
    check_callable(f, asked)
    return Hessian(f)


def _sandwich(
    model: Callable[..., Any], inner: Callable[[Any, Any], Any], primals: Vector, way: Any
) -> Product:
    """`J^T A J`, of a model and the product with a matrix of its output's space."""
    if way is None:
        z, push = linearize(model, *primals)
        _, pull = vjp(model, *primals)
        return lambda v: pull(inner(z, push(*v)))

    def product(v: Sequence[Tree]) -> Vector:
        z, dz = jvp(model, primals, v)
        _, pull = vjp(model, *primals, policy=way)
        return pull(inner(z, dz))

    return product
