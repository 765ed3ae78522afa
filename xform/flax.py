"""xform's transforms for functions of Flax NNX objects, such as `xform.flax.value_and_grad(loss)`.

The names, arguments and meaning are the same as in `flax.nnx`. NNX's own transforms use JAX's
automatic differentiation; these use xform's. A module is passed in as arrays, and the function runs
on a copy of the module that is made inside the trace. Changed state (running statistics, random
counters) is returned as an auxiliary output and written to the caller's module. Linen's `apply` is
pure, so `xform.grad` works on it directly.

Every transform takes NNX's two modes. None means NNX's own setting (`nnx.set_graph_mode`,
`nnx.set_graph_updates`). With `graph=False`, modules are trees, and a Variable with two owners is
an error. With `graph_updates=False`, which `graph=False` implies, new values of Variables are
written back, but changes of structure, such as a new Variable, are not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xform.errors import NotScalar, WrongArgument
from xform.introspection.callables import function_name
from xform.introspection.packages import require_package
from xform.transforms import forward, reverse
from xform.transforms.checkpoint import checkpoint
from xform.transforms.function import Tree, as_tuple, distinct, numbers, positions

with require_package("flax", "Flax", by="xform.flax", brings="train"):
    from flax import nnx

__all__ = ["grad", "jvp", "remat", "value_and_grad", "vjp"]

Function = Callable[..., Any]
Argnum = int | nnx.DiffState
Mode = bool | None


@dataclasses.dataclass(frozen=True)
class _ModuleBoundary:
    """Passes NNX objects into a pure function as arrays, and its changes of them back out.

    Both happen in `nnx.update_context(name)`, which maps the objects outside to the ones inside.
    """

    name: str
    graph: bool
    updates: bool

    @classmethod
    def of(cls, name: str, graph: Mode, updates: Mode) -> _ModuleBoundary:
        graph = bool(nnx.set_graph_mode.current_value() if graph is None else graph)
        updates = bool(nnx.set_graph_updates.current_value() if updates is None else updates)
        return cls(name, graph, graph and updates)

    def enter(self, tree: Tree, prefix: Tree = None) -> Tree:
        """Convert objects to arrays. All owners of a Variable must give it the same `prefix`."""
        return nnx.to_tree(tree, prefix=prefix, split_fn=_split, ctxtag=self.name)

    def pure(self, f: Function, has_aux: bool = False) -> Function:
        """`f` as a pure function of the arrays, which returns `(output, (auxiliary, changes))`."""

        def objective(*entered: Tree, **held: Tree) -> Any:
            inside = nnx.from_tree((entered, held), ctxtag=self.name, is_inner=True)
            # `f` may change a container of objects, so the objects are collected before it runs.
            pick = lambda pure, x: x if _is_node(pure) else None
            objects = jax.tree.map(pick, (entered, held), inside, is_leaf=_is_node)
            before = self.parts(objects)
            values = [(v, *jax.tree.flatten(v)) for _, v in before if isinstance(v, nnx.Variable)]
            out = f(*inside[0], **inside[1])
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise WrongArgument(
                    f"{self.name} with has_aux=True",
                    f"{function_name(f)} returned {type(out).__name__}, "
                    "not a pair (output, auxiliary)",
                    "",
                    "return a pair, or drop has_aux",
                )
            # Only changes are returned and written back.
            restructured = self.updates and not _alike(before, self.parts(objects))
            changes = objects if restructured else [v for v, *old in values if _changed(v, *old)]
            changes, out = nnx.to_tree((changes, out), split_fn=_split, ctxtag=self.name)
            y, aux = out if has_aux else (out, ())
            return y, (aux, changes)

        objective.__name__ = function_name(f)
        return objective

    def leave(self, out: Tree, changes: Tree) -> Tree:
        """Convert the output to objects, and write the changes to the objects that were passed."""
        return nnx.from_tree((changes, out), ctxtag=self.name, is_inner=False)[1]

    def parts(self, tree: Tree) -> list[tuple[Any, Any]]:
        """All parts of objects, by path, each once. In tree mode, two owners are an error."""
        return list(nnx.iter_graph(tree, graph=self.graph))


def _split(ctx: Any, path: Any, prefix: Any, node: Any) -> nnx.NodeStates:
    """A node's definition and arrays. The arrays that a DiffState selects are a separate state."""
    unsplit = not isinstance(prefix, nnx.DiffState) or isinstance(node, nnx.Variable)
    filters = () if unsplit else (prefix.filter, ...)
    return nnx.NodeStates.from_split(*ctx.split(node, *filters))


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.NodeStates)


def _alike(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(p == q and x is y for (p, x), (q, y) in pairs)


def _changed(variable: nnx.Variable[Any], leaves: list[Any], tree: Any) -> bool:
    now, now_tree = jax.tree.flatten(variable)
    return tree != now_tree or any(a is not b for a, b in zip(now, leaves, strict=True))


def _resolve(f: Function, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move keyword arguments and defaults to their positions, because NNX numbers them so."""
    if isinstance(f, functools.partial):
        return args, kwargs
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except ValueError:  # a builtin
        return args, kwargs
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _public(required: int) -> Callable[[Function], Function]:
    """Decorate a transform: without its first arguments it is a partial, and it rejects methods.

    NNX's transforms do the same. Only bound methods of modules are rejected.
    """

    def decorate(transform: Function) -> Function:
        @functools.wraps(transform)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs.keys() & {"f", "primals", "tangents"}) < required:
                return functools.partial(call, *args, **kwargs)
            inner: Any = args[0] if args else kwargs["f"]
            while isinstance(inner, functools.partial):
                inner = inner.func
            if inspect.ismethod(inner) and isinstance(inner.__self__, nnx.Module):
                owner = type(inner.__self__).__name__
                raise WrongArgument(
                    f"{transform.__name__} of {owner}.{inner.__name__}",
                    f"it is a method bound to a {owner}, which would be held constant",
                    "",
                    f"pass {owner}.{inner.__name__}, and the module as its first argument",
                )
            return transform(*args, **kwargs)

        return call

    return decorate


@_public(1)
def value_and_grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
                   holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
                   graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes a scalar function of modules and its gradient.

    Args:
      f: function of modules, Variables and pytrees of arrays that returns a scalar; it may change
        the state of its arguments. Without `f`, a decorator is returned.
      argnums: position or positions of the arguments to differentiate. A module is differentiated
        by its `nnx.Param`s, or by the Variables that the filter of an
        `nnx.DiffState(position, filter)` selects; other arguments as in `xform.value_and_grad`.
      has_aux: whether `f` returns a pair `(value, auxiliary)`.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether integer inputs are allowed; their gradients have dtype float0.
      policy: what is saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`.
      graph: whether objects may be shared; see the docstring of this module.
      graph_updates: whether changes of structure are written back. If False, a module is
        differentiated by all its Variables, and its gradient is a module.

    Returns:
      A function with the arguments of `f` that returns `(value, gradient)` or
      `((value, auxiliary), gradient)`, and updates the caller's modules. The gradient by a module
      is an `nnx.State`, as `nnx.Optimizer` takes it (a tuple if `argnums` is a sequence).

    Raises:
      WrongArgument: there is nothing to differentiate, or `f` is a bound method.
      NotScalar, WrongDtype, MissingRule: as `xform.value_and_grad`.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: model(x).sum()
    >>> value, g = xform.flax.value_and_grad(loss)(model, jnp.ones((3, 2)))
    >>> g.bias[...].tolist()
    [3.0]
    """
    boundary = _ModuleBoundary.of("value_and_grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


@_public(1)
def grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
         holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
         graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes the gradient of a scalar function of modules.

    Arguments, errors and cost are the same as for `value_and_grad`. With `has_aux` the result is a
    pair `(gradient, auxiliary)`.

    >>> from flax import nnx
    >>> scale = nnx.Param(jnp.float32(3.0))
    >>> float(xform.flax.grad(lambda scale: scale[...] ** 2)(scale)[...])
    6.0
    """
    boundary = _ModuleBoundary.of("grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


def _gradient(boundary: _ModuleBoundary, f: Function, argnums: Any, has_aux: bool,
              *options: Any) -> Function:  # fmt: skip
    caller, one = f"{boundary.name} of {function_name(f)}", not isinstance(argnums, Iterable)
    chosen = [argnums] if one else list(argnums)
    at = [x.argnum if isinstance(x, nnx.DiffState) else x for x in chosen]
    distinct(numbers(at, caller, "argnums"), caller, at)
    if not boundary.updates and any(isinstance(x, nnx.DiffState) for x in chosen):
        raise WrongArgument(
            f"{caller} by a DiffState",
            "without graph updates, a module is differentiated as a whole",
            "",
            "pass graph=True, graph_updates=True",
        )
    default = nnx.Param if boundary.updates else True
    filters = [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, default) for x in chosen]

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _resolve(f, args, kwargs) if boundary.updates else (args, kwargs)
        at = positions([x.argnum for x in filters], len(args), boundary.name)

        def objective(*wrt: Tree) -> Any:
            y, (aux, changes) = boundary.pure(f, has_aux)(*_place(entered, at, wrt), **held)
            if _is_node(y):
                raise NotScalar(
                    f"{caller}: gradient only defined for scalar-output functions",
                    "it returned a Variable or a module",
                    "",
                    "return an array, such as variable[...] or jnp.mean(module(x))",
                )
            return y, (y, aux, changes)

        objective.__name__ = function_name(f)
        with nnx.update_context(boundary.name):
            # With the prefix, NNX also checks that all or none of a Variable's owners select it.
            prefix = [dict(zip(at, filters, strict=True)).get(i) for i in range(len(args))]
            entered, held = boundary.enter((args, kwargs), (tuple(prefix), None))
            selected = lambda x: x.states[0] if _is_node(x) else x
            wrt = [jax.tree.map(selected, entered[i], is_leaf=_is_node) for i in at]
            if not jax.tree.leaves(wrt):
                _refuse_objects(caller, [args[i] for i in at], filters)
            transform, every = getattr(reverse, boundary.name), range(len(at))
            holomorphic, allow_int, policy = options
            out = transform(objective, every, True, holomorphic, allow_int, policy=policy)(*wrt)
            g, (y, aux, changes) = out if boundary.name == "grad" else (out[1], out[0][1])
            aux = boundary.leave(aux, changes)
        if not boundary.updates:  # built together, so that gradients share objects as arguments do
            objects = nnx.from_tree(_place(entered, at, g))
            g = [objects[i] for i in at]
        g = g[0] if one else tuple(g)
        if boundary.name == "grad":
            return (g, aux) if has_aux else g
        return ((y, aux) if has_aux else y), g

    return gradient


def _refuse_objects(caller: str, args: Sequence[Tree], filters: Sequence[nnx.DiffState]) -> None:
    """Raise `WrongArgument` if there are modules and the filters select nothing of them."""
    nodes = [x for _, x in nnx.iter_graph(args, graph=True)]
    if kinds := {type(x).__name__ for x in nodes if isinstance(x, nnx.Variable | nnx.Module)}:
        wanted = [getattr(x.filter, "__name__", str(x.filter)) for x in filters]
        raise WrongArgument(
            f"{caller}: there is nothing to differentiate",
            f"{', '.join(wanted)} selects nothing of {', '.join(sorted(kinds))}",
            "",
            "pass argnums=nnx.DiffState(position, filter), or another position",
        )


def _place(entered: Sequence[Tree], at: Sequence[int], wrt: Sequence[Tree]) -> list[Tree]:
    """The arguments, with new arrays for the differentiated ones."""
    put = lambda old, new: old.replace(states=(new, *old.states[1:])) if _is_node(old) else new
    full = list(entered)
    for i, x in zip(at, wrt, strict=True):
        full[i] = jax.tree.map(put, full[i], x, is_leaf=_is_node)
    return full


def _values_only(name: str, graph: Mode, graph_updates: Mode) -> _ModuleBoundary:
    if graph_updates and _ModuleBoundary.of(name, graph, True).updates:
        raise WrongArgument(
            f"{name} with graph_updates=True",
            "tangents have the structure of the primals, so the function may not change it",
            "",
            "drop graph_updates, or pass graph=False",
        )
    return _ModuleBoundary.of(name, graph, False)


@_public(2)
def vjp(f: Function, *primals: Tree, has_aux: bool = False, policy: Any = None,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and return the map that pulls cotangents back through it.

    Arguments, result, errors and cost are the same as for `xform.vjp`. `graph` says whether objects
    may be shared; `graph_updates` must be None or False. The cotangent of a module is a module with
    the cotangents of all its Variables, float0 for integers.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> y, pull = xform.flax.vjp(nnx.Linear.__call__, model, jnp.ones((3, 2)))
    >>> d_model, d_x = pull(jnp.ones_like(y))
    >>> d_model.bias[...].tolist()
    [3.0]
    """
    boundary = _values_only("vjp", graph, graph_updates)
    with nnx.update_context(boundary.name):
        entered = boundary.enter(primals)
        result: Any = reverse.vjp(boundary.pure(f, has_aux), *entered, has_aux=True, policy=policy)
        y, pull, (aux, changes) = result
        y, aux = boundary.leave((y, aux), changes)
    # As a Partial the pullback is a pytree of residuals, which a jitted function may return.
    pull = jax.tree_util.Partial(_pull, pull)
    return (y, pull, aux) if has_aux else (y, pull)


def _pull(pull: Any, ct: Tree) -> Any:
    return nnx.from_tree(pull(nnx.to_tree(ct)))


@_public(3)
def jvp(f: Function, primals: Sequence[Tree], tangents: Sequence[Tree], *, has_aux: bool = False,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and push tangents forward through it.

    Arguments, result, errors and cost are the same as for `xform.jvp`. `graph` says whether objects
    may be shared; `graph_updates` must be None or False. The tangent of a module is a module with
    the tangents of all its Variables, float0 for integers.

    >>> from flax import nnx
    >>> scale, tangent = nnx.Param(jnp.float32(3.0)), nnx.Param(jnp.float32(1.0))
    >>> y, dy = xform.flax.jvp(lambda scale: scale[...] ** 2, (scale,), (tangent,))
    >>> float(dy)
    6.0
    """
    boundary = _values_only("jvp", graph, graph_updates)
    primals, tangents = as_tuple(primals, "primals", "jvp"), as_tuple(tangents, "tangents", "jvp")
    with nnx.update_context(boundary.name):
        entered, pushed = boundary.enter(primals), nnx.to_tree(tangents)
        pure = boundary.pure(f, has_aux)
        y, dy, (aux, changes) = forward.jvp(pure, entered, pushed, has_aux=True)
        y, aux = boundary.leave((y, aux), changes)
    return (y, nnx.from_tree(dy), aux) if has_aux else (y, nnx.from_tree(dy))


@_public(1)
def remat(f: Function, *, prevent_cse: bool = True, static_argnums: int | tuple[int, ...] = (),
          policy: Any = None, graph: Mode = None, graph_updates: Mode = None
          ) -> Function:  # fmt: skip
    """Return a function like `f` whose intermediate values are recomputed in the backward pass.

    `f` is a method in its class, or a function of modules, Variables and pytrees of arrays. It may
    change their state. Without `f`, a decorator is returned. `graph` and `graph_updates` are the
    same as for `value_and_grad`, the other arguments and the cost the same as for `xform.remat`.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> layer = xform.flax.remat(nnx.Linear.__call__, policy=xform.policies.save_dots)
    >>> xform.flax.grad(lambda m, x: layer(m, x).sum())(model, jnp.ones((3, 2))).bias[...].tolist()
    [3.0]
    """
    boundary = _ModuleBoundary.of("remat", graph, graph_updates)
    # Made once, not at each call: JAX caches a region's trace by the identity of its function.
    region = checkpoint(
        boundary.pure(f), prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _resolve(f, args, kwargs) if boundary.updates else (args, kwargs)
        with nnx.update_context(boundary.name):
            entered, held = boundary.enter((args, kwargs))
            y, (_, changes) = region(*entered, **held)
            return boundary.leave(y, changes)

    return call
