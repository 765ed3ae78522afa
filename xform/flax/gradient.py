"""`xform.flax.grad` and `value_and_grad`: gradients of scalar functions of Flax NNX modules.

`ModuleBoundary` converts the modules among the arguments to arrays. Each module that is
differentiated is split into two states: the Variables that its `nnx.DiffState` selects, and the
rest. xform's own transform then differentiates a pure function of the selected states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx

from xform.errors import NotScalar, WrongArgument
from xform.flax.boundary import Function, Mode, ModuleBoundary, is_node
from xform.flax.calls import accepts_nnx_calls, positional
from xform.introspection.callables import function_name
from xform.transforms import reverse
from xform.transforms.function import Tree, distinct, numbers, positions

Argnum = int | nnx.DiffState


@accepts_nnx_calls(n_required=1)
def value_and_grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
                   holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
                   graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes a scalar function of modules and its gradient.

    Args:
      f: function of modules, Variables and pytrees of arrays that returns a scalar; it may change
        the state of its arguments. Without `f`, a decorator is returned.
      argnums: position or positions of the arguments to differentiate. A module is differentiated
        with respect to its `nnx.Param`s. `nnx.DiffState(position, filter)` in place of a position
        selects other Variables of the module. Arguments of arrays are differentiated as in
        `xform.value_and_grad`.
      has_aux: whether `f` returns a pair `(value, auxiliary)`.
      holomorphic: whether `f` is complex-differentiable; inputs and output must be complex.
      allow_int: whether integer inputs are allowed; their gradients have dtype float0.
      policy: which values are saved for the backward pass: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots". None is the default of
        `xform.value_and_grad`.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: whether changes of a module's structure, such as a new Variable, are written
        back; None for NNX's setting (`nnx.set_graph_updates`). If `graph_updates` or `graph` is
        False, a module is differentiated with respect to all its Variables, and its gradient is a
        module.

    Returns:
      A function with the arguments of `f` that returns `(value, gradient)` or
      `((value, auxiliary), gradient)`, and updates the caller's modules. The gradient with respect
      to a module is an `nnx.State`, as `nnx.Optimizer` takes it. For a sequence of `argnums` the
      gradient is a tuple.

    Raises:
      WrongArgument: there is nothing to differentiate, or `f` is a bound method.
      NotScalar, WrongDtype, MissingRule: as in `xform.value_and_grad`.

    Cost: three to four times the FLOPs of `f`, plus what the policy recomputes.

    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> loss = lambda model, x: model(x).sum()
    >>> value, g = xform.flax.value_and_grad(loss)(model, jnp.ones((3, 2)))
    >>> g.bias[...].tolist()
    [3.0]
    """
    boundary = ModuleBoundary.of("value_and_grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


@accepts_nnx_calls(n_required=1)
def grad(f: Function, argnums: Argnum | Sequence[Argnum] = 0, has_aux: bool = False,
         holomorphic: bool = False, allow_int: bool = False, *, policy: Any = None,
         graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a function that computes the gradient of a scalar function of modules.

    Arguments, errors and cost are the same as for `xform.flax.value_and_grad`. Only the gradient is
    returned, or with `has_aux` a pair `(gradient, auxiliary)`.

    >>> from flax import nnx
    >>> scale = nnx.Param(jnp.float32(3.0))
    >>> float(xform.flax.grad(lambda scale: scale[...] ** 2)(scale)[...])
    6.0
    """
    boundary = ModuleBoundary.of("grad", graph, graph_updates)
    return _gradient(boundary, f, argnums, has_aux, holomorphic, allow_int, policy)


def _gradient(boundary: ModuleBoundary, f: Function, argnums: Any, has_aux: bool,
              holomorphic: bool, allow_int: bool, policy: Any) -> Function:  # fmt: skip
    """Return the function that `grad` or `value_and_grad`, whichever `boundary` names, returns."""
    caller = f"{boundary.name} of {function_name(f)}"
    is_single = not isinstance(argnums, Iterable)
    selections = [argnums] if is_single else list(argnums)
    argnum_list = [x.argnum if isinstance(x, nnx.DiffState) else x for x in selections]
    distinct(numbers(argnum_list, caller, "argnums"), caller, argnum_list)
    if not boundary.updates and any(isinstance(x, nnx.DiffState) for x in selections):
        raise WrongArgument(
            f"{caller} with an nnx.DiffState in argnums",
            "with graph=False or graph_updates=False, a module is differentiated as a whole",
            "",
            "pass graph=True, graph_updates=True",
        )
    default = nnx.Param if boundary.updates else True
    diff_states = [
        x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, default) for x in selections
    ]

    @functools.wraps(f, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = positional(f, args, kwargs) if boundary.updates else (args, kwargs)
        indices = positions([x.argnum for x in diff_states], len(args), boundary.name)

        def objective(*wrt: Tree) -> Any:
            """Return the value, and `(value, auxiliary, changes of the modules)`."""
            full = _replace_selected(array_args, indices, wrt)
            y, (aux, changes) = boundary.pure(f, has_aux)(*full, **array_kwargs)
            if is_node(y):
                raise NotScalar(
                    f"{caller}: gradient only defined for scalar-output functions",
                    "it returned a Variable or a module",
                    "",
                    "return an array, such as variable[...] or jnp.mean(module(x))",
                )
            return y, (y, aux, changes)

        objective.__name__ = function_name(f)
        with nnx.update_context(boundary.name):
            # With the prefix, NNX also checks Variables that several arguments share. It raises an
            # error if one of these arguments selects such a Variable and another one does not.
            by_index = dict(zip(indices, diff_states, strict=True))
            prefix = tuple(by_index.get(i) for i in range(len(args)))
            array_args, array_kwargs = boundary.enter((args, kwargs), (prefix, None))
            selected = lambda x: x.states[0] if is_node(x) else x
            wrt = [jax.tree.map(selected, array_args[i], is_leaf=is_node) for i in indices]
            if not jax.tree.leaves(wrt):
                _refuse_empty_selection(caller, [args[i] for i in indices], diff_states)
            transform = getattr(reverse, boundary.name)
            out = transform(
                objective, range(len(indices)), True, holomorphic, allow_int, policy=policy
            )(*wrt)
            g, (y, aux, changes) = out if boundary.name == "grad" else (out[1], out[0][1])
            aux = boundary.leave(aux, changes)
        if not boundary.updates:
            # All gradients are converted to modules in one call, so that they share parts as the
            # arguments do.
            modules = nnx.from_tree(_replace_selected(array_args, indices, g))
            g = [modules[i] for i in indices]
        g = g[0] if is_single else tuple(g)
        if boundary.name == "grad":
            return (g, aux) if has_aux else g
        return ((y, aux) if has_aux else y), g

    return gradient


def _refuse_empty_selection(
    caller: str, args: Sequence[Tree], diff_states: Sequence[nnx.DiffState]
) -> None:
    """Raise `WrongArgument` if there are modules and the filters select nothing of them."""
    nodes = [x for _, x in nnx.iter_graph(args, graph=True)]
    if kinds := {type(x).__name__ for x in nodes if isinstance(x, nnx.Variable | nnx.Module)}:
        filters = [getattr(x.filter, "__name__", str(x.filter)) for x in diff_states]
        raise WrongArgument(
            f"{caller}: there is nothing to differentiate",
            f"{', '.join(filters)} selects nothing of {', '.join(sorted(kinds))}",
            "",
            "pass argnums=nnx.DiffState(position, filter), or another position",
        )


def _replace_selected(
    array_args: Sequence[Tree], indices: Sequence[int], new_states: Sequence[Tree]
) -> list[Tree]:
    """Return `array_args` with new selected states in the arguments at `indices`.

    `array_args` are arguments whose modules `ModuleBoundary.enter` converted to arrays.
    """
    put = lambda old, new: old.replace(states=(new, *old.states[1:])) if is_node(old) else new
    full = list(array_args)
    for i, state in zip(indices, new_states, strict=True):
        full[i] = jax.tree.map(put, full[i], state, is_leaf=is_node)
    return full
