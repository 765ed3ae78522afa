"""xform's transforms for functions of Equinox modules, such as `xform.equinox.filter_grad(loss)`.

The names, arguments and meaning are the same as in `equinox`. Equinox's own transforms use JAX's
automatic differentiation; these use xform's. Transforms with a backward pass take a `policy`, which
decides the values that are saved for it. In a pytree, arrays of floats or complex numbers are
differentiated. Everything else (functions, strings, integers) is held constant, and is None in
gradients and tangents.

Each transform divides its pytrees with `eqx.partition` into the part that is differentiated, `wrt`,
and the constant rest, `held`. xform's own transform gets a function of `wrt` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from xform._jax import current_trace
from xform.errors import WrongArgument, WrongTangent
from xform.interpret.concrete import TangentTracer
from xform.introspection.callables import function_name
from xform.introspection.packages import require_package
from xform.transforms import forward, jacobian, reverse
from xform.transforms.checkpoint import checkpoint
from xform.transforms.function import Tree, as_tuple

with require_package("equinox", "Equinox", by="xform.equinox", brings="equinox"):
    import equinox as eqx

__all__ = [
    "filter_checkpoint",
    "filter_grad",
    "filter_hessian",
    "filter_jacfwd",
    "filter_jacrev",
    "filter_jvp",
    "filter_value_and_grad",
    "filter_vjp",
]

Function = Callable[..., Any]
D = TypeVar("D", bound=Function)


class _TransformedFunction(eqx.Module):
    """A transformed function: a pytree like the function itself, and usable as a method."""

    _fun: Function

    @property
    def __wrapped__(self) -> Function:
        return self._fun

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        bound: Any = self
        return self if instance is None else eqx.Partial(bound, instance)


class _ValueAndGrad(_TransformedFunction):
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


class _FilterJacobian(_TransformedFunction):
    """The function that `filter_jacfwd` or `filter_jacrev` returns; `_transform` is xform's."""

    _has_aux: bool = eqx.field(static=True)
    _transform: Function = eqx.field(static=True)

    def __call__(self, x: Tree, /, *args: Any, **kwargs: Any) -> Any:
        wrt, held = eqx.partition(x, eqx.is_inexact_array)
        f = lambda wrt: self._fun(eqx.combine(wrt, held), *args, **kwargs)
        return self._transform(f, has_aux=self._has_aux)(wrt)


class _Checkpoint(_TransformedFunction):
    """The function that `filter_checkpoint` returns."""

    _prevent_cse: bool = eqx.field(static=True)
    _policy: Any = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arrays, held = eqx.partition((self._fun, args, kwargs), eqx.is_array)
        held_outputs: list[Tree] = []

        def region(arrays: Tree) -> Tree:
            fun, args, kwargs = eqx.combine(arrays, held)
            array_outputs, other_outputs = eqx.partition(fun(*args, **kwargs), eqx.is_array)
            held_outputs[:] = [other_outputs]
            return array_outputs

        array_outputs = checkpoint(region, prevent_cse=self._prevent_cse, policy=self._policy)(
            arrays
        )
        return eqx.combine(array_outputs, held_outputs[0])


def _decorator(transform: D) -> D:
    """Let a transform return a decorator if it is called with options only.

    The function that it returns gets the name and the docstring of the given function.
    """

    @functools.wraps(transform)
    def call(fun: Function | None = None, **options: Any) -> Any:
        if fun is None:
            return functools.partial(call, **options)
        return eqx.module_update_wrapper(transform(fun, **options))

    return call  # pyright: ignore[reportReturnType]


@_decorator
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


@_decorator
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


def filter_vjp(fun: Function, *primals: Tree, has_aux: bool = False, policy: Any = None) -> Any:
    """Evaluate a function and return the map that pulls cotangents back through it.

    Args:
      fun: function of any pytrees.
      *primals: the point, the arguments of `fun`.
      has_aux: whether `fun` returns a pair `(output, auxiliary)`.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.vjp`.

    Returns:
      `(output, pull)`, or `(output, pull, auxiliary)` with `has_aux`. `pull` maps a cotangent of
      the output to a tuple with the cotangent of each primal. Cotangents have the structure of
      their values, with None for everything but arrays of floats and complex numbers.

    Raises:
      MissingRule: a primitive in `fun` has no derivative rule.
      WrongCotangent: the cotangent given to `pull` does not match the output.

    Cost: one evaluation of `fun`, and for each call of `pull` two to three times its FLOPs, plus
    what the policy recomputes.

    >>> y, pull = xform.equinox.filter_vjp(lambda tree: (tree[0] * 2, tree[1]), (jnp.ones(2), "a"))
    >>> pull((jnp.ones(2), None))[0][0].tolist(), y[1]
    ([2.0, 2.0], 'a')
    """
    wrt, held = eqx.partition(primals, eqx.is_inexact_array)

    def pure(*wrt: Tree) -> Any:
        out = fun(*eqx.combine(wrt, held))
        out, aux = out if has_aux else (out, None)
        outputs, rest = eqx.partition(out, eqx.is_inexact_array)
        return outputs, (rest, aux)

    outputs, pull, (rest, aux) = reverse.vjp(pure, *wrt, has_aux=True, policy=policy)
    out = eqx.combine(outputs, rest)
    return (out, pull, aux) if has_aux else (out, pull)


def filter_jvp(
    fn: Function, primals: Sequence[Tree], tangents: Sequence[Tree], **kwargs: Any
) -> tuple[Tree, Tree]:
    """Evaluate a function and push tangents forward through it.

    Args:
      fn: function of any pytrees.
      primals: the point, a sequence of arguments.
      tangents: a tangent for each leaf of `primals`, or None to hold the leaf constant.
      **kwargs: keyword arguments of `fn`, held constant.

    Returns:
      The output and its tangent. The tangent has None for leaves that are not arrays or do not
      depend on the tangents.

    Raises:
      WrongArgument: `primals` or `tangents` is not a tuple or list.
      WrongTangent: `tangents` does not have the structure of `primals`.
      MissingRule: a primitive in `fn` has no derivative rule.
      NotDifferentiable: `fn` calls a `custom_vjp` function, which has no forward mode.

    Cost: two to three times the FLOPs of `fn`; memory about twice that of `fn`.

    >>> y, dy = xform.equinox.filter_jvp(lambda x, y: (x * y, y, "a"), (2.0, 3.0), (1.0, None))
    >>> float(dy[0]), dy[1], dy[2]
    (3.0, None, None)
    """
    primals = as_tuple(primals, "primals", "filter_jvp")
    tangents = as_tuple(tangents, "tangents", "filter_jvp")
    is_none = lambda x: x is None
    primals_tree, tangents_tree = (
        jax.tree.structure(t, is_leaf=is_none) for t in (primals, tangents)
    )
    if primals_tree != tangents_tree:
        raise WrongTangent(
            "filter_jvp",
            f"the tangents have the structure {tangents_tree}, the primals {primals_tree}",
            "",
            "pass a tangent, or None, for each leaf of the primals",
        )
    is_held = jax.tree.map(is_none, tangents, is_leaf=is_none)
    held, wrt = eqx.partition(primals, is_held)
    leaves, tree = jax.tree.flatten(wrt)

    def pure(*leaves: Any) -> Any:
        """Return the outputs that have a tangent, and the other outputs."""
        trace: Any = current_trace()
        tag = trace.tag
        out = fn(*eqx.combine(jax.tree.unflatten(tree, leaves), held), **kwargs)
        has_tangent = lambda x: isinstance(x, TangentTracer) and x._trace.tag is tag
        return eqx.partition(out, has_tangent)

    y, tangent, constant = forward.jvp(pure, leaves, jax.tree.leaves(tangents), has_aux=True)
    return eqx.combine(y, constant), tangent


def filter_jacfwd(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Jacobian by the first argument, in forward mode.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.jacfwd`: one
    jvp for each element of the input.

    >>> jacobian = xform.equinox.filter_jacfwd(lambda tree: tree[0] ** 2)
    >>> jacobian((jnp.array([1.0, 2.0]), "a"))[0].tolist()
    [[2.0, 0.0], [0.0, 4.0]]
    """
    return _FilterJacobian(fun, has_aux, jacobian.jacfwd)


def filter_jacrev(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Jacobian by the first argument, in reverse mode.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.jacrev`: one
    pullback for each element of the output.

    >>> xform.equinox.filter_jacrev(lambda tree: tree[0].sum())((jnp.ones(2), "a"))[0].tolist()
    [1.0, 1.0]
    """
    return _FilterJacobian(fun, has_aux, jacobian.jacrev)


def filter_hessian(fun: Function, has_aux: bool = False) -> Function:
    """Return a function that computes the Hessian by the first argument, forward over reverse.

    `fun` maps any pytree to a pytree of arrays, or with `has_aux` to a pair of that and an
    auxiliary output, which is returned too. Errors and cost are the same as for `xform.hessian`.

    >>> h = xform.equinox.filter_hessian(lambda tree: tree[0] ** 3)((jnp.float32(2.0), "a"))
    >>> float(h[0][0])
    12.0
    """
    return filter_jacfwd(filter_jacrev(fun, has_aux), has_aux)


@_decorator
def filter_checkpoint(fun: Function, *, prevent_cse: bool = True, policy: Any = None) -> Function:
    """Return a function like `fun` whose intermediate values are recomputed in the backward pass.

    Args:
      fun: function that takes and returns any pytrees. Without `fun`, a decorator is returned.
      prevent_cse: whether to keep the compiler from merging the recomputed operations with those of
        the forward pass.
      policy: which intermediate values are saved nevertheless: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; None saves none of them.

    Returns:
      A function with the arguments and results of `fun`.

    Raises:
      WrongArgument: `policy` is not a policy, or is a budget of the peak memory.

    Cost: in reverse mode, about one more evaluation of `fun`, less what the policy saves.

    >>> twice, policy = lambda x, f: f(f(x)), xform.policies.save_dots
    >>> layer = xform.equinox.filter_checkpoint(twice, policy=policy)
    >>> float(xform.grad(lambda x: layer(x, jnp.sin))(0.0))
    1.0
    """
    return _Checkpoint(fun, prevent_cse, policy)
