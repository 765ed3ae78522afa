"""A scalar function of NNX modules as a pure function of the states that are differentiated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from xform.errors import NotScalar, WrongArgument
from xform.introspection.callables import function_name
from xform.modules.boundary import Function, ModuleBoundary, Tree, is_node


class ModuleObjective:
    """A function of modules at a point: a pure function of the selected states.

    It returns `(value, (value, auxiliary, changes))`. Make it and call it in one
    `nnx.update_context` of the boundary's name.

    Attributes:
      array_args, array_kwargs: the arguments, with modules converted to arrays.
      wrt: for each differentiated argument, its selected states.

    Args:
      boundary: the conversion of the transform.
      f: the user's function.
      args, kwargs: its arguments.
      selections: for each argument that is differentiated, by its position, the selected states.
      has_aux: whether `f` returns a pair `(value, auxiliary)`.
      caller: what the user asked for, for messages.
      writes_selected: whether new values that `f` itself gives the selected Variables are changes.
    """

    def __init__(self, boundary: ModuleBoundary, f: Function, args: Sequence[Any],
                 kwargs: Mapping[str, Any], selections: Mapping[int, nnx.DiffState],
                 has_aux: bool, caller: str, writes_selected: bool = True) -> None:  # fmt: skip
        # With the prefix, NNX also checks Variables that several arguments share. It raises an
        # error if one of these arguments selects such a Variable and another one does not.
        prefix = tuple(selections.get(i) for i in range(len(args)))
        self.array_args, self.array_kwargs = boundary.enter((args, kwargs), (prefix, None))
        self.wrt = [selected(self.array_args[i]) for i in selections]
        self._boundary, self._has_aux, self._indices = boundary, has_aux, list(selections)
        self._caller, self._writes_selected = caller, writes_selected
        self.__name__ = function_name(f)
        self.__wrapped__ = f  # so that messages name the line of `f`
        if not jax.tree.leaves(self.wrt):
            _refuse_empty_selection(caller, [args[i] for i in selections], selections.values())

    def __call__(self, *wrt: Tree) -> Any:
        """Return the value, and `(value, auxiliary, changes of the modules)`."""
        full = replace_selected(self.array_args, self._indices, wrt)
        fixed = () if self._writes_selected else jax.tree.leaves(wrt)
        pure = self._boundary.pure(self.__wrapped__, self._has_aux, fixed)
        y, (aux, changes) = pure(*full, **self.array_kwargs)
        if is_node(y):
            raise NotScalar(
                f"{self._caller}: gradient only defined for scalar-output functions",
                "it returned a Variable or a module",
                "",
                "return an array, such as variable[...] or jnp.mean(module(x))",
            )
        return y, (y, aux, changes)


def diff_states(boundary: ModuleBoundary, argnums: Any, caller: str) -> list[nnx.DiffState]:
    """Return the states that `argnums` selects: the `nnx.Param`s of modules, or those of a filter.

    Raises:
      WrongArgument: there is a filter, and modules are differentiated as a whole.
    """
    several = list(argnums) if isinstance(argnums, Iterable) else [argnums]
    if not boundary.updates and any(isinstance(x, nnx.DiffState) for x in several):
        raise WrongArgument(
            f"{caller} with an nnx.DiffState in argnums",
            "with graph=False or graph_updates=False, a module is differentiated as a whole",
            "",
            "pass graph=True, graph_updates=True",
        )
    default = nnx.Param if boundary.updates else True
    return [x if isinstance(x, nnx.DiffState) else nnx.DiffState(x, default) for x in several]


def selected(array_arg: Tree) -> Tree:
    """Return the selected states of an argument whose modules were converted to arrays."""
    first = lambda x: x.states[0] if is_node(x) else x
    return jax.tree.map(first, array_arg, is_leaf=is_node)


def replace_selected(
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


def _refuse_empty_selection(
    caller: str, args: Sequence[Tree], selections: Iterable[nnx.DiffState]
) -> None:
    """Raise `WrongArgument` if there are modules and the filters select nothing of them."""
    nodes = [x for _, x in nnx.iter_graph(args, graph=True)]
    if kinds := {type(x).__name__ for x in nodes if isinstance(x, nnx.Variable | nnx.Module)}:
        filters = [getattr(x.filter, "__name__", str(x.filter)) for x in selections]
        raise WrongArgument(
            f"{caller}: there is nothing to differentiate",
            f"{', '.join(filters)} selects nothing of {', '.join(sorted(kinds))}",
            "",
            "pass argnums=nnx.DiffState(position, filter), or another position",
        )
