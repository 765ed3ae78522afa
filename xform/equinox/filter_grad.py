"""`xform.equinox.filter_value_and_grad` and `filter_grad`: gradients of scalar functions."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from xform.equinox.filter_calls import Function, TransformedFunction, accepts_options_only
from xform.errors import WrongArgument
from xform.introspection.callables import function_name
from xform.transforms import reverse
from xform.transforms.function import Tree


class _ValueAndGrad(TransformedFunction):
    """The function that `filter_value_and_grad` returns."""

    _has_aux: bool = eqx.field(static=True)
    _policy: Any = eqx.field(static=True)
    _holomorphic: bool = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not args:
            raise WrongArgument(
                "gradient of a function of Equinox modules",
                "it was called without a positional argument; the first one is differentiated",
                "",
                "pass the argument to differentiate first, by position",
            )
        wrt, held = eqx.partition(args[0], eqx.is_inexact_array)

        def objective(wrt: Tree) -> Any:
            return self._fun(eqx.combine(wrt, held), *args[1:], **kwargs)

        objective.__name__ = function_name(self._fun)
        options = {"has_aux": self._has_aux, "holomorphic": self._holomorphic}
        return reverse.value_and_grad(objective, **options, policy=self._policy)(wrt)


class _Grad(_ValueAndGrad):
    """The function that `filter_grad` returns."""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        value, gradient = super().__call__(*args, **kwargs)
        return (gradient, value[1]) if self._has_aux else gradient


@accepts_options_only
def filter_value_and_grad(fun: Function, *, has_aux: bool = False, policy: Any = None,
                          holomorphic: bool = False) -> Function:  # fmt: skip
    """Return a function that computes a scalar function and its gradient.

    Args:
      fun: function that returns a scalar. Its first argument, any pytree, is differentiated.
        Without `fun`, a decorator is returned.
      has_aux: whether `fun` returns a pair `(value, auxiliary)`.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.value_and_grad`.
      holomorphic: whether `fun` is complex-differentiable; inputs and output must be complex.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient)` or
      `((value, auxiliary), gradient)`. The gradient has the structure of the first argument.

    Raises:
      WrongArgument: the returned function is called without a positional argument.
      NotScalar: `fun` does not return a scalar.
      WrongDtype: an input or the output has a dtype that does not suit `holomorphic`.
      MissingRule: a primitive in `fun` has no derivative rule.

    Cost: three to four times the FLOPs of `fun`, plus what the policy recomputes.

    >>> import equinox as eqx
    >>> model = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> loss = lambda model, x: model(x) ** 2
    >>> value, g = xform.equinox.filter_value_and_grad(loss)(model, jnp.ones(2))
    >>> g.layers[0].weight.shape, g.activation
    ((4, 2), None)
    """
    return _ValueAndGrad(fun, has_aux, policy, holomorphic)


@accepts_options_only
def filter_grad(fun: Function, *, has_aux: bool = False, policy: Any = None,
                holomorphic: bool = False) -> Function:  # fmt: skip
    """Return a function that computes the gradient of a scalar function.

    Arguments, errors and cost are the same as for `filter_value_and_grad`. The returned function
    returns the gradient only, or with `has_aux` a pair `(gradient, auxiliary)`.

    >>> g = xform.equinox.filter_grad(lambda tree: tree[0] ** 2)((jnp.float32(3.0), "a name"))
    >>> float(g[0]), g[1]
    (6.0, None)
    """
    return _Grad(fun, has_aux, policy, holomorphic)
