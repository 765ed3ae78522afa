"""Doors to xform's transforms for functions of Flax NNX objects: `xform.flax.value_and_grad(loss)`.

Names, arguments and meaning are those of `flax.nnx`, whose own transforms call JAX's automatic
differentiation; here xform differentiates. A module enters as arrays, the function runs on a copy
made inside the trace, and what it changed (running statistics, random counters) leaves as an
auxiliary output and is written to the caller's module. Linen's `apply` is pure and needs no door.

Every door takes NNX's two modes; None is NNX's own setting (`nnx.set_graph_mode`,
`nnx.set_graph_updates`). `graph=False`: modules are trees, and a Variable with two owners is an
error. `graph_updates=False` (`graph=False` implies it): new values of Variables leave, but changes
of structure do not, such as a new Variable.
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
from xform.introspection.packages import required
from xform.transforms import forward, reverse
from xform.transforms.checkpoint import checkpoint
from xform.transforms.function import Tree, as_tuple, distinct, numbers, positions

with required("flax", "Flax", by="xform.flax", brings="train"):
    from flax import nnx

__all__ = ["grad", "jvp", "remat", "value_and_grad", "vjp"]

Function = Callable[..., Any]
Argnum = int | nnx.DiffState
Mode = bool | None


@dataclasses.dataclass(frozen=True)
class _Door:
    """How NNX objects enter a pure function as arrays, and how what it did to them leaves.

    Both happen in `nnx.update_context(name)`, which knows what objects outside and inside are one.
    """

    name: str
    graph: bool
    updates: bool

    @classmethod
    def of(cls, name: str, graph: Mode, updates: Mode) -> _Door:
        graph = bool(nnx.set_graph_mode.current_value() if graph is None else graph)
        updates = bool(nnx.set_graph_updates.current_value() if updates is None else updates)
        return cls(name, graph, graph and updates)

    def enter(self, tree: Tree, prefix: Tree = None) -> Tree:
        """Objects as arrays. A Variable with two owners must have one `prefix`."""
        return nnx.to_tree(tree, prefix=prefix, split_fn=_split, ctxtag=self.name)

    def pure(self, f: Function, has_aux: bool = False) -> Function:
        """`f` as a pure function of what entered: `(output, (auxiliary, changes))`."""

        def objective(*entered: Tree, **held: Tree) -> Any:
            inside = nnx.from_tree((entered, held), ctxtag=self.name, is_inner=True)
            # `f` may change a container that holds objects, so they are found before it runs.
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
            # What did not change is not written, and so need not leave.
            whole = self.updates and not _alike(before, self.parts(objects))
            changes = objects if whole else [v for v, *old in values if _changed(v, *old)]
            changes, out = nnx.to_tree((changes, out), split_fn=_split, ctxtag=self.name)
            y, aux = out if has_aux else (out, ())
            return y, (aux, changes)

        objective.__name__ = function_name(f)
        return objective

    def leave(self, out: Tree, changes: Tree) -> Tree:
        """The output as objects; the changes are written to the objects that entered."""
        return nnx.from_tree((changes, out), ctxtag=self.name, is_inner=False)[1]

    def parts(self, tree: Tree) -> list[tuple[Any, Any]]:
        """All parts of objects, by path, each once. Trees refuse a Variable with two owners."""
        return list(nnx.iter_graph(tree, graph=self.graph))


def _split(ctx: Any, path: Any, prefix: Any, node: Any) -> nnx.NodeStates:
    """A node's definition and arrays; those that a DiffState selects are a state of their own."""
    whole = not isinstance(prefix, nnx.DiffState) or isinstance(node, nnx.Variable)
    filters = () if whole else (prefix.filter, ...)
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
    """Keyword arguments and defaults at their positions, if they have one: nnx numbers them so."""
    if isinstance(f, functools.partial):
        return args, kwargs
    try:
        bound = inspect.signature(f).bind(*args, **kwargs)
    except ValueError:  # a builtin
        return args, kwargs
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _public(required: int) -> Callable[[Function], Function]:
    """Make a door wait, as nnx's do, for what it transforms; and refuse bound methods."""

    def decorate(door: Function) -> Function:
        @functools.wraps(door)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) + len(kwargs.keys() & {"f", "primals", "tangents"}) < required:
                return functools.partial(call, *args, **kwargs)
            inner: Any = args[0] if args else kwargs["f"]
            while isinstance(inner, functools.partial):
                inner = inner.func
            if inspect.ismethod(inner) and isinstance(inner.__self__, nnx.Module):
                owner = type(inner.__self__).__name__
                raise WrongArgument(
                    f"{door.__name__} of {owner}.{inner.__name__}",
                    f"bound methods are not taken: it is bound to a {owner}, held constant then",
                    "",
                    f"pass {owner}.{inner.__name__}, and the module as its first argument",
                )
            return door(*args, **kwargs)

        return call

    return decorate


@_public(1)
def value_and_grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
                   holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
                   graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """A function that returns the value of a scalar function of modules, and its gradient.

    Args:
      f: function of modules, Variables and pytrees of arrays that returns a scalar; it may change
        the state of its arguments. Without it, a decorator is returned.
      argnums: position or positions of the arguments to differentiate. A module is differentiated
        by its `nnx.Param`s, or by what the filter of an `nnx.DiffState(position, filter)` selects;
        all other arguments as by `xform.value_and_grad`.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether integer inputs are taken; their gradients have dtype float0.
      policy: what is kept for the backward pass, of `xform.policies` or `jax.checkpoint_policies`.
      graph: whether objects may be shared; see the module.
      graph_updates: whether changes of structure leave. Without, a module is differentiated by all
        its Variables, and its gradient is a module.

    Returns:
      A function with the arguments of `f`, that returns `(value, gradient)`, or
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
    door = _Door.of("value_and_grad", graph, graph_updates)
    return _gradient(door, f, argnums, has_aux, holomorphic, allow_int, policy)


@_public(1)
def grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
         holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
         graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """A function that returns the gradient of a scalar function of modules.

    Arguments, errors and cost are those of `value_and_grad`; with `has_aux` the result is a pair
    `(gradient, auxiliary)`.

    >>> from flax import nnx
    >>> scale = nnx.Param(jnp.float32(3.0))
    >>> float(xform.flax.grad(lambda scale: scale[...] ** 2)(scale)[...])
    6.0
    """
    door = _Door.of("grad", graph, graph_updates)
    return _gradient(door, f, argnums, has_aux, holomorphic, allow_int, policy)


def _gradient(door: _Door, f: Function, argnums: Any, has_aux: bool, *options: Any) -> Function:
    asked, one = f"{door.name} of {function_name(f)}", not isinstance(argnums, Iterable)
    chosen = [argnums] if one else list(argnums)
    at = [x.argnum if isinstance(x, nnx.DiffState) else x for x in chosen]
    distinct(numbers(at, asked, "argnums"), asked, at)
    if not door.updates and any(isinstance(x, nnx.DiffState) for x in chosen):
        raise WrongArgument(
            f"{asked} by a DiffState",
            "without graph updates, a module is differentiated as a whole",
            "",
            "pass graph=True, graph_updates=True",
        )
    default = nnx.Param if door.updates else True
    filters = [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, default) for x in chosen]

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _resolve(f, args, kwargs) if door.updates else (args, kwargs)
        at = positions([x.argnum for x in filters], len(args), door.name)

        def objective(*wrt: Tree) -> Any:
            y, (aux, changes) = door.pure(f, has_aux)(*_place(entered, at, wrt), **held)
            if _is_node(y):
                raise NotScalar(
                    f"{asked}: gradient only defined for scalar-output functions",
                    "it returned a Variable or a module",
                    "",
                    "return an array, such as variable[...] or jnp.mean(module(x))",
                )
            return y, (y, aux, changes)

        objective.__name__ = function_name(f)
        with nnx.update_context(door.name):
            # By the prefix NNX also checks that, of a Variable's owners, all or none select it.
            prefix = [dict(zip(at, filters, strict=True)).get(i) for i in range(len(args))]
            entered, held = door.enter((args, kwargs), (tuple(prefix), None))
            selected = lambda x: x.states[0] if _is_node(x) else x
            wrt = [jax.tree.map(selected, entered[i], is_leaf=_is_node) for i in at]
            if not jax.tree.leaves(wrt):
                _refuse_objects(asked, [args[i] for i in at], filters)
            transform, every = getattr(reverse, door.name), range(len(at))
            holomorphic, allow_int, policy = options
            out = transform(objective, every, True, holomorphic, allow_int, policy=policy)(*wrt)
            g, (y, aux, changes) = out if door.name == "grad" else (out[1], out[0][1])
            aux = door.leave(aux, changes)
        if not door.updates:  # objects, built together: they share what the arguments share
            objects = nnx.from_tree(_place(entered, at, g))
            g = [objects[i] for i in at]
        g = g[0] if one else tuple(g)
        if door.name == "grad":
            return (g, aux) if has_aux else g
        return ((y, aux) if has_aux else y), g

    return gradient


def _refuse_objects(asked: str, args: Sequence[Tree], filters: Sequence[nnx.DiffState]) -> None:
    """Of modules, something must be selected; a pytree without leaves has an empty gradient."""
    nodes = [x for _, x in nnx.iter_graph(args, graph=True)]
    if kinds := {type(x).__name__ for x in nodes if isinstance(x, nnx.Variable | nnx.Module)}:
        wanted = [getattr(x.filter, "__name__", str(x.filter)) for x in filters]
        raise WrongArgument(
            f"{asked}: there is nothing to differentiate",
            f"of {', '.join(sorted(kinds))}, none is selected by {', '.join(wanted)}",
            "",
            "pass argnums=nnx.DiffState(position, filter), or another position",
        )


def _place(entered: Sequence[Tree], at: Sequence[int], wrt: Sequence[Tree]) -> list[Tree]:
    """Arguments with other arrays for those that are differentiated."""
    put = lambda old, new: old.replace(states=(new, *old.states[1:])) if _is_node(old) else new
    full = list(entered)
    for i, x in zip(at, wrt, strict=True):
        full[i] = jax.tree.map(put, full[i], x, is_leaf=_is_node)
    return full


def _values_only(name: str, graph: Mode, graph_updates: Mode) -> _Door:
    if graph_updates and _Door.of(name, graph, True).updates:
        raise WrongArgument(
            f"{name} with graph_updates=True",
            "tangents have the structure of the primals, which the function may not change then",
            "",
            "drop graph_updates, or pass graph=False",
        )
    return _Door.of(name, graph, False)


@_public(2)
def vjp(f: Function, *primals: Tree, has_aux: bool = False, policy: Any = None,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and return the map that pulls cotangents back through it.

    Arguments, result, errors and cost are those of `xform.vjp`; `graph` says whether objects may be
    shared, and `graph_updates` must be None or False. The cotangent of a module is a module of the
    cotangents of all its Variables, float0 for integers.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> y, pull = xform.flax.vjp(nnx.Linear.__call__, model, jnp.ones((3, 2)))
    >>> d_model, d_x = pull(jnp.ones_like(y))
    >>> d_model.bias[...].tolist()
    [3.0]
    """
    door = _values_only("vjp", graph, graph_updates)
    with nnx.update_context(door.name):
        entered = door.enter(primals)
        result: Any = reverse.vjp(door.pure(f, has_aux), *entered, has_aux=True, policy=policy)
        y, pull, (aux, changes) = result
        y, aux = door.leave((y, aux), changes)
    # As a Partial the pullback stays a pytree of residuals, which may leave a jitted function.
    pull = jax.tree_util.Partial(_pull, pull)
    return (y, pull, aux) if has_aux else (y, pull)


def _pull(pull: Any, ct: Tree) -> Any:
    return nnx.from_tree(pull(nnx.to_tree(ct)))


@_public(3)
def jvp(f: Function, primals: Sequence[Tree], tangents: Sequence[Tree], *, has_aux: bool = False,
        graph: Mode = None, graph_updates: Mode = None) -> Any:  # fmt: skip
    """Evaluate a function of modules and push tangents forward through it.

    Arguments, result, errors and cost are those of `xform.jvp`; `graph` says whether objects may be
    shared, and `graph_updates` must be None or False. The tangent of a module is a module of the
    tangents of all its Variables, float0 for integers.

    >>> from flax import nnx
    >>> scale, tangent = nnx.Param(jnp.float32(3.0)), nnx.Param(jnp.float32(1.0))
    >>> y, dy = xform.flax.jvp(lambda scale: scale[...] ** 2, (scale,), (tangent,))
    >>> float(dy)
    6.0
    """
    door = _values_only("jvp", graph, graph_updates)
    primals, tangents = as_tuple(primals, "primals", "jvp"), as_tuple(tangents, "tangents", "jvp")
    with nnx.update_context(door.name):
        entered, pushed = door.enter(primals), nnx.to_tree(tangents)
        y, dy, (aux, changes) = forward.jvp(door.pure(f, has_aux), entered, pushed, has_aux=True)
        y, aux = door.leave((y, aux), changes)
    return (y, nnx.from_tree(dy), aux) if has_aux else (y, nnx.from_tree(dy))


@_public(1)
def remat(f: Function, *, prevent_cse: bool = True, static_argnums: int | tuple[int, ...] = (),
          policy: Any = None, graph: Mode = None, graph_updates: Mode = None
          ) -> Function:  # fmt: skip
    """A function like `f`, of modules, whose intermediate values are recomputed in reverse mode.

    `f` is a method in its class, or a function of modules, Variables and pytrees of arrays, and may
    change their state. Without it, a decorator is returned. Other arguments and cost are those of
    `xform.remat`; of `graph` and `graph_updates`, those of `value_and_grad`.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> layer = xform.flax.remat(nnx.Linear.__call__, policy=xform.policies.save_dots)
    >>> xform.flax.grad(lambda m, x: layer(m, x).sum())(model, jnp.ones((3, 2))).bias[...].tolist()
    [3.0]
    """
    door = _Door.of("remat", graph, graph_updates)
    # Marked once, not at each call: JAX keeps a region's trace by the identity of its function.
    region = checkpoint(
        door.pure(f), prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _resolve(f, args, kwargs) if door.updates else (args, kwargs)
        with nnx.update_context(door.name):
            entered, held = door.enter((args, kwargs))
            y, (_, changes) = region(*entered, **held)
            return door.leave(y, changes)

    return call
