"""Doors to xform's transforms for functions of Flax NNX objects: `xform.flax.value_and_grad(loss)`.

Names, arguments and meaning are those of `flax.nnx`, whose own transforms call JAX's automatic
differentiation; here xform differentiates. A module enters as arrays, the function runs on a copy
made inside the trace, and what it changed (running statistics, random counters) leaves as an
auxiliary output and is written to the caller's module. Linen's `apply` is pure and needs no door.

Every door takes NNX's two modes; None is NNX's own setting (`nnx.set_graph_mode`,
`nnx.set_graph_updates`). `graph=False`: modules are trees, and a Variable with two owners is an
error. `graph_updates=False` (`graph=False` implies it): only new values of Variables leave; with it,
changes of structure do as well, such as a Variable added by `sow`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform.errors import NotScalar, WrongArgument, XformError
from xform.transforms import forward, reverse
from xform.transforms.checkpoint import checkpoint
from xform.transforms.function import Tree, positions

try:
    from flax import nnx
except ModuleNotFoundError as missing:
    if missing.name != "flax":
        raise
    raise XformError(
        "xform.flax", "Flax is not installed", "", 'pip install "xform[train]"'
    ) from None

__all__ = ["grad", "jvp", "remat", "value_and_grad", "vjp"]

Function = Callable[..., Any]
Argnum = int | nnx.DiffState
Mode = bool | None


@dataclasses.dataclass(frozen=True)
class _Door:
    """How NNX objects enter a pure function as arrays, and how what it did to them leaves.

    With `updates` NNX's update context, open around all four steps, knows which objects outside
    and inside are the same. Without, Variables are matched by their order.
    """

    name: str
    graph: bool
    updates: bool

    @classmethod
    def of(cls, name: str, graph: Mode, updates: Mode) -> _Door:
        graph = bool(nnx.set_graph_mode.current_value() if graph is None else graph)
        updates = bool(nnx.set_graph_updates.current_value() if updates is None else updates)
        return cls(name, graph, graph and updates)

    @property
    def tag(self) -> str | None:
        return f"xform.{self.name}" if self.updates else None

    def open(self) -> contextlib.AbstractContextManager[Any]:
        return nnx.update_context(self.tag) if self.updates else contextlib.nullcontext()

    def enter(self, tree: Tree, prefix: Tree = None) -> Tree:
        """Objects as arrays. A Variable with two owners must have one `prefix`."""
        return nnx.to_tree(tree, prefix=prefix, split_fn=_split, ctxtag=self.tag)

    def run(self, f: Function, pure: Tree, has_aux: bool = False) -> tuple[Tree, Tree]:
        """Inside: the output of `f`, a pair, and the changes that it made to its arguments."""
        args, kwargs = nnx.from_tree(pure, ctxtag=self.tag, is_inner=True)
        if self.updates:  # `f` may change containers, too: what to look at is found before
            changes = jax.tree.map(_if_node, pure, (args, kwargs), is_leaf=_is_node)
            out = _pair(self.name, f, f(*args, **kwargs), has_aux)
        else:
            inside = self.variables((args, kwargs))
            before = [jax.tree.flatten(v) for v in inside]
            out = _pair(self.name, f, f(*args, **kwargs), has_aux)
            changes = [v if _changed(v, b) else None for v, b in zip(inside, before, strict=True)]
        changes, out = nnx.to_tree((changes, out), split_fn=_split, ctxtag=self.tag)
        return out, changes

    def leave(self, given: Tree, out: Tree, changes: Tree) -> Tree:
        """Outside again: the output as objects; the changes are written to those `given`."""
        # With an update context, this writes them.
        changes, out = nnx.from_tree((changes, out), ctxtag=self.tag, is_inner=False)
        if not self.updates:
            for variable, new in zip(self.variables(given), changes, strict=True):
                if new is not None:
                    variable.update_from_state(new)
        return out

    def variables(self, tree: Tree) -> list[nnx.Variable[Any]]:
        found = (x for _, x in nnx.iter_graph(tree, graph=self.graph))
        return [x for x in found if isinstance(x, nnx.Variable)]


def _split(ctx: Any, path: Any, prefix: Any, node: Any) -> nnx.NodeStates:
    """A node's definition and arrays; those that a DiffState selects are a state of their own."""
    whole = not isinstance(prefix, nnx.DiffState) or isinstance(node, nnx.Variable)
    filters = () if whole else (prefix.filter, ...)
    return nnx.NodeStates.from_split(*ctx.split(node, *filters))


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.NodeStates)


def _if_node(pure: Any, x: Any) -> Any:
    return x if _is_node(pure) else None


def _changed(variable: nnx.Variable[Any], before: tuple[list[Any], Any]) -> bool:
    leaves, tree = jax.tree.flatten(variable)
    return tree != before[1] or any(a is not b for a, b in zip(leaves, before[0], strict=True))


def _wrt(pure: Tree) -> Tree:
    """The arrays of an argument that are differentiated."""
    return jax.tree.map(lambda x: x.states[0] if _is_node(x) else x, pure, is_leaf=_is_node)


def _place(pure: Sequence[Tree], at: Sequence[int], wrt: Sequence[Tree]) -> tuple[Tree, ...]:
    """Arguments with other arrays for those that are differentiated."""

    def put(old: Any, new: Any) -> Any:
        return old.replace(states=(new, *old.states[1:])) if _is_node(old) else new

    full = list(pure)
    for i, x in zip(at, wrt, strict=True):
        full[i] = jax.tree.map(put, full[i], x, is_leaf=_is_node)
    return tuple(full)


def _name(f: Function) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _pair(asked: str, f: Function, out: Any, has_aux: bool) -> tuple[Any, Any]:
    """The output and auxiliary output of `f`."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise WrongArgument(
            f"{asked} with has_aux=True",
            f"{_name(f)} returned {type(out).__name__}, not a pair (output, auxiliary)",
            "",
            "return a pair, or drop has_aux",
        )
    return out if has_aux else (out, ())


def _resolve(f: Function, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Keyword arguments and defaults at their positions, if they have one: nnx numbers them so."""
    if isinstance(f, functools.partial):
        return args, kwargs
    try:
        signature = inspect.signature(f)
    except ValueError:  # a builtin
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _transform(required: int) -> Callable[[Function], Function]:
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
                    f"it is bound to a {owner}, which would be held constant",
                    "",
                    f"pass {owner}.{inner.__name__}, and the module as its first argument",
                )
            return door(*args, **kwargs)

        return call

    return decorate


@_transform(1)
def value_and_grad(
    f: Function,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Any = None,
    graph: Mode = None,
    graph_updates: Mode = None,
) -> Function:
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
      graph_updates: whether changes of structure leave; see the module. Without, a module is
        differentiated by all its Variables, and its gradient is a module.

    Returns:
      A function with the arguments of `f`, that returns `(value, gradient)`, or
      `((value, auxiliary), gradient)`, and updates the caller's modules. The gradient by a module
      is an `nnx.State`, as `nnx.Optimizer` takes it (a tuple if `argnums` is a sequence).

    Raises:
      NotScalar: `f` returned something other than a scalar array.
      WrongArgument: there is nothing to differentiate, or `f` is a bound method.
      WrongDtype: an integer input without `allow_int`, or an output that is not real.
      MissingRule: a primitive in `f` has no rule.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: model(x).sum()
    >>> value, g = xform.flax.value_and_grad(loss)(model, jnp.ones((3, 2)))
    >>> g.bias[...].tolist()
    [3.0]
    """
    door = _Door.of("value_and_grad", graph, graph_updates)
    options = {"holomorphic": holomorphic, "allow_int": allow_int, "policy": policy}

    @functools.wraps(f, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        (y, aux), g = _gradient(door, f, argnums, has_aux, args, kwargs, options)
        return ((y, aux) if has_aux else y), g

    return both


@_transform(1)
def grad(
    f: Function,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    *,
    policy: Any = None,
    graph: Mode = None,
    graph_updates: Mode = None,
) -> Function:
    """A function that returns the gradient of a scalar function of modules.

    Arguments, errors and cost are those of `value_and_grad`; with `has_aux` the result is a pair
    `(gradient, auxiliary)`.

    >>> from flax import nnx
    >>> scale = nnx.Param(jnp.float32(3.0))
    >>> float(xform.flax.grad(lambda scale: scale[...] ** 2)(scale)[...])
    6.0
    """
    door = _Door.of("grad", graph, graph_updates)
    options = {"holomorphic": holomorphic, "allow_int": allow_int, "policy": policy}

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        (_, aux), g = _gradient(door, f, argnums, has_aux, args, kwargs, options)
        return (g, aux) if has_aux else g

    return gradient


def _gradient(
    door: _Door, f: Function, argnums: Any, has_aux: bool, args: Any, kwargs: Any, options: Any
) -> tuple[tuple[Any, Any], Any]:
    """Value, auxiliary output and gradient of `f`."""
    if door.updates:
        args, kwargs = _resolve(f, args, kwargs)
    one = isinstance(argnums, int | nnx.DiffState)
    chosen = (argnums,) if one else tuple(argnums)
    at = positions([getattr(x, "argnum", x) for x in chosen], len(args), door.name)
    if len(set(at)) < len(at) or (not door.updates and not all(isinstance(x, int) for x in chosen)):
        raise WrongArgument(
            f"{door.name} with argnums={argnums}",
            "a position is repeated" if door.updates else "a DiffState needs graph updates",
            "",
            "name each position once" if door.updates else "pass graph_updates=True, graph=True",
        )
    # What NNX checks a Variable with two owners by: both are differentiated, or neither is.
    prefix: list[Any] = [None if door.updates else False] * (len(args) + 1)
    for i, x in zip(at, chosen, strict=True):
        default = nnx.DiffState(i, nnx.Param) if door.updates else True
        prefix[i] = x if isinstance(x, nnx.DiffState) else default

    def objective(*wrt: Tree) -> Any:
        (y, aux), changes = door.run(f, (_place(pure, at, wrt), held), has_aux)
        if _is_node(y):
            raise NotScalar(
                f"{door.name} of {_name(f)}: gradient only defined for scalar-output functions",
                "it returned a Variable or a module",
                "",
                "return an array, such as variable[...] or jnp.mean(module(x))",
            )
        return y, (aux, changes)

    objective.__name__ = _name(f)
    transform = reverse.value_and_grad(objective, range(len(at)), has_aux=True, **options)
    with door.open():
        pure, held = door.enter((args, kwargs), (tuple(prefix[:-1]), prefix[-1]))
        wrt = [_wrt(pure[i]) for i in at]
        if at and not jax.tree.leaves(wrt):
            raise _nothing(door, f, [args[i] for i in at], prefix[at[0]])
        (y, (aux, changes)), g = transform(*wrt)
        aux = door.leave((args, kwargs), aux, changes)
    if not door.updates:  # objects with the aliases of the arguments, so all are built together
        objects = nnx.from_tree(_place(pure, at, g))
        g = tuple(objects[i] for i in at)
    return (y, aux), g[0] if one else g


def _nothing(door: _Door, f: Function, args: Sequence[Any], wanted: Any) -> WrongArgument:
    kinds = ", ".join(sorted({type(v).__name__ for v in door.variables(args)})) or "no Variable"
    wanted = getattr(wanted, "filter", "any")
    return WrongArgument(
        f"{door.name} of {_name(f)}: there is nothing to differentiate",
        f"{' and '.join(type(x).__name__ for x in args)} has {kinds}, and what is differentiated "
        f"is {getattr(wanted, '__name__', wanted)}",
        "",
        "pass argnums=nnx.DiffState(position, filter), or another position",
    )


def _objective(door: _Door, f: Function, has_aux: bool) -> Function:
    def objective(*pure: Tree) -> Any:
        (y, aux), changes = door.run(f, (pure, {}), has_aux)
        return y, (aux, changes)

    objective.__name__ = _name(f)
    return objective


def _values_only(name: str, graph: Mode, graph_updates: Mode) -> _Door:
    """The door of `vjp` and `jvp`, whose tangents are objects with the structure of the primals."""
    if graph_updates and _Door.of(name, graph, True).updates:
        raise WrongArgument(
            f"{name} with graph_updates=True",
            "a function that changes the structure of its arguments has no tangents to match",
            "",
            "drop graph_updates, or pass graph=False",
        )
    return _Door.of(name, graph, False)


def _pull(pull: Any, ct: Tree) -> Any:
    return nnx.from_tree(pull(nnx.to_tree(ct)))


@_transform(2)
def vjp(
    f: Function,
    *primals: Tree,
    has_aux: bool = False,
    policy: Any = None,
    graph: Mode = None,
    graph_updates: Mode = None,
) -> Any:
    """Evaluate a function of modules and return the map that pulls cotangents back through it.

    Args:
      f: function of modules, Variables and pytrees of arrays.
      *primals: the point. Without them, a function that takes them is returned.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      policy: what is kept for the pullback, of `xform.policies` or `jax.checkpoint_policies`.
      graph: whether objects may be shared; see the module.
      graph_updates: None or False.

    Returns:
      The output and `pull` (and the auxiliary output). `pull` returns a tuple of cotangents like
      `primals`: for a module, a module of the cotangents of all Variables, float0 for integers.

    Raises:
      WrongArgument: `graph_updates=True`, or `f` is a bound method.
      MissingRule: a primitive in `f` has no rule.

    Cost: that of `xform.vjp`.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> y, pull = xform.flax.vjp(nnx.Linear.__call__, model, jnp.ones((3, 2)))
    >>> d_model, d_x = pull(jnp.ones_like(y))
    >>> d_model.bias[...].tolist()
    [3.0]
    """
    door = _values_only("vjp", graph, graph_updates)
    pure = door.enter(primals)
    result: Any = reverse.vjp(_objective(door, f, has_aux), *pure, has_aux=True, policy=policy)
    y, pull, (aux, changes) = result
    y, aux = door.leave((primals, {}), (y, aux), changes)
    # As a Partial the pullback stays a pytree of residuals, which may leave a jitted function.
    pull = jax.tree_util.Partial(_pull, pull)
    return (y, pull, aux) if has_aux else (y, pull)


@_transform(3)
def jvp(
    f: Function,
    primals: Sequence[Tree],
    tangents: Sequence[Tree],
    *,
    has_aux: bool = False,
    graph: Mode = None,
    graph_updates: Mode = None,
) -> Any:
    """Evaluate a function of modules and push tangents forward through it.

    Args:
      f: function of modules, Variables and pytrees of arrays.
      primals: the point, a tuple or list of arguments. Without it and `tangents`, a function that
        takes them is returned.
      tangents: like `primals`: for a module, a module of tangents, float0 for integers.
      has_aux: whether `f` returns a pair, of which the second is passed through.
      graph: whether objects may be shared; see the module.
      graph_updates: None or False.

    Returns:
      The output and its tangent (and the auxiliary output).

    Raises:
      WrongArgument: `graph_updates=True`, or `f` is a bound method.
      WrongTangent: `tangents` do not match `primals`.
      MissingRule: a primitive in `f` has no rule.

    Cost: that of `xform.jvp`.

    >>> from flax import nnx
    >>> scale, tangent = nnx.Param(jnp.float32(3.0)), nnx.Param(jnp.float32(1.0))
    >>> y, dy = xform.flax.jvp(lambda scale: scale[...] ** 2, (scale,), (tangent,))
    >>> float(dy)
    6.0
    """
    door = _values_only("jvp", graph, graph_updates)
    objective, pure = _objective(door, f, has_aux), door.enter(primals)
    y, dy, (aux, changes) = forward.jvp(objective, pure, door.enter(tangents), has_aux=True)
    y, aux = door.leave((primals, {}), (y, aux), changes)
    dy = nnx.from_tree(dy)
    return (y, dy, aux) if has_aux else (y, dy)


@_transform(1)
def remat(
    f: Function,
    *,
    prevent_cse: bool = True,
    static_argnums: int | tuple[int, ...] = (),
    policy: Any = None,
    graph: Mode = None,
    graph_updates: Mode = None,
) -> Function:
    """A function like `f`, of modules, whose intermediate values are recomputed in reverse mode.

    Args:
      f: a method in its class, or a function of modules, Variables and pytrees of arrays; it may
        change the state of its arguments. Without it, a decorator is returned.
      prevent_cse: whether the compiler must be kept from merging the recompute with `f`.
      static_argnums: positions of arguments that are not arrays.
      policy: of `xform.policies` or `jax.checkpoint_policies`; None saves nothing.
      graph: whether objects may be shared; see the module.
      graph_updates: whether changes of structure leave; see the module.

    Returns:
      A function with the arguments and value of `f`, that updates the caller's modules.

    Raises:
      WrongArgument: `f` is a bound method, or `policy` is no policy.

    Cost: under reverse mode, about one more evaluation of `f`, less what the policy saves.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> layer = xform.flax.remat(nnx.Linear.__call__, policy=xform.policies.save_dots)
    >>> xform.flax.grad(lambda m, x: layer(m, x).sum())(model, jnp.ones((3, 2))).bias[...].tolist()
    [3.0]
    """
    door = _Door.of("remat", graph, graph_updates)

    def region(*args: Any, **kwargs: Any) -> tuple[Tree, Tree]:
        (y, _), changes = door.run(f, (args, kwargs))
        return y, changes

    # Marked once, not at each call: JAX keeps a region's trace by the identity of its function.
    region.__name__ = _name(f)
    marked = checkpoint(
        region, prevent_cse=prevent_cse, policy=policy, static_argnums=static_argnums
    )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if door.updates:
            args, kwargs = _resolve(f, args, kwargs)
        with door.open():
            pure, held = door.enter((args, kwargs))
            y, changes = marked(*pure, **held)
            return door.leave((args, kwargs), y, changes)

    return call
