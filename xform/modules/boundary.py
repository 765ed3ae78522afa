"""Pass NNX modules into a pure function as arrays, and the changes of their state back out.

xform's transforms take pure functions of arrays. A user's function of modules becomes one in four
steps:

1. `enter` converts the caller's modules to arrays.
2. Inside the pure function, copies of the modules are made from these arrays.
3. The user's function runs on the copies. Variables that it changed are additional outputs.
4. `leave` writes these outputs to the caller's modules.

NNX pairs the modules outside with their copies inside, in `nnx.update_context(name)`. So steps 1
to 4 of one call must run in one such context.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from xform.errors import WrongArgument
from xform.introspection.callables import function_name

Tree = Any
Function = Callable[..., Any]
# The attribute of a module in which NNX keeps an object for itself.
_OF_NNX = "_pytree__state"
# An option `graph` or `graph_updates`; None means NNX's own setting.
Mode = bool | None


@dataclasses.dataclass(frozen=True)
class ModuleBoundary:
    """The conversion of one transform's modules to arrays and back.

    Attributes:
      name: the name of the transform, which is also the name of its `nnx.update_context`.
      graph: whether modules may share Variables.
      updates: whether changes of structure are written back.
    """

    name: str
    graph: bool
    updates: bool

    @classmethod
    def of(cls, name: str, graph: Mode, updates: Mode) -> ModuleBoundary:
        """Make the boundary for a transform called with these options."""
        graph = bool(nnx.set_graph_mode.current_value() if graph is None else graph)
        updates = bool(nnx.set_graph_updates.current_value() if updates is None else updates)
        return cls(name, graph, graph and updates)

    @classmethod
    def without_updates(cls, name: str, graph: Mode, updates: Mode) -> ModuleBoundary:
        """Make the boundary for a transform that cannot write back changes of structure.

        Raises:
          WrongArgument: the options request such changes.
        """
        if updates and cls.of(name, graph, True).updates:
            raise WrongArgument(
                f"{name} with graph_updates=True",
                "tangents have the structure of the primals, so the function may not change it",
                "",
                "drop graph_updates, or pass graph=False",
            )
        return cls.of(name, graph, False)

    def enter(self, tree: Tree, prefix: Tree = None) -> Tree:
        """Convert the modules of a tree to `nnx.NodeStates`, which are pytrees of arrays.

        `prefix` is None, or a prefix of the tree with `nnx.DiffState`s. A DiffState splits the
        arrays of its modules in two: the state that it selects, and the rest. All modules that
        share a Variable must have the same DiffState.
        """
        return nnx.to_tree(tree, prefix=prefix, split_fn=split, ctxtag=self.name)

    def pure(self, f: Function, has_aux: bool = False, fixed: Sequence[Any] = ()) -> Function:
        """Make `f` a pure function of arguments that `enter` has converted.

        It returns `(output, (auxiliary, changes))`. `auxiliary` is `()` without `has_aux`.
        `changes` is what `leave` writes back. New values of Variables that hold the arrays `fixed`
        before the call are not written back.
        """
        fixed_ids = set(map(id, fixed))

        def pure_function(*array_args: Tree, **array_kwargs: Tree) -> Any:
            converted = array_args, array_kwargs
            args, kwargs = nnx.from_tree(converted, ctxtag=self.name, is_inner=True)
            # `f` may change a container of modules, so the modules are collected before it runs.
            pick = lambda node_states, x: x if is_node(node_states) else None
            modules = jax.tree.map(pick, converted, (args, kwargs), is_leaf=is_node)
            before = self._parts(modules)
            old_values = [
                (part, *jax.tree.flatten(part))
                for _, part in before
                if isinstance(part, nnx.Variable)
            ]
            out = f(*args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise WrongArgument(
                    f"{self.name} with has_aux=True",
                    f"{function_name(f)} returned {type(out).__name__}, "
                    "not a pair (output, auxiliary)",
                    "",
                    "return a pair, or drop has_aux",
                )
            if self.updates and not _same_parts(before, self._parts(modules)):
                changes = modules
            else:
                changes = [
                    variable
                    for variable, leaves, tree in old_values
                    if _changed(variable, leaves, tree)
                    and not fixed_ids.issuperset(map(id, leaves))
                ]
            changes, out = nnx.to_tree((changes, out), split_fn=split, ctxtag=self.name)
            output, auxiliary = out if has_aux else (out, ())
            return output, (auxiliary, changes)

        pure_function.__name__ = function_name(f)
        return pure_function

    def call(self, transformed: Function, args: Any, kwargs: Any) -> Any:
        """Call a transform of `pure(f)` as `f`, whose changes reach the caller's modules."""
        with nnx.update_context(self.name):
            array_args, array_kwargs = self.enter((args, kwargs))
            y, (_, changes) = transformed(*array_args, **array_kwargs)
            return self.leave(y, changes)

    def ask(self, query: Function, args: Any, kwargs: Any) -> Any:
        """Call a function that traces `pure(f)` and returns no module."""
        with nnx.update_context(self.name):
            array_args, array_kwargs = self.enter((args, kwargs))
            return query(*array_args, **array_kwargs)

    def leave(self, out: Tree, changes: Tree) -> Tree:
        """Write `changes` to the caller's modules, and return `out` with modules, not arrays."""
        return nnx.from_tree((changes, out), ctxtag=self.name, is_inner=False)[1]

    def _parts(self, tree: Tree) -> list[tuple[Any, Any]]:
        """List modules, Variables and all their parts as `(path, part)`, each part once.

        Without `graph`, a part that occurs twice is an error. The objects that NNX keeps in each
        module for itself are left out: `nnx.scan` replaces them, which is no change of a module.
        """
        parts = nnx.iter_graph(tree, graph=self.graph)
        return [(path, x) for path, x in parts if path[-1:] != (_OF_NNX,)]


def is_node(x: Any) -> bool:
    """Return whether `x` is a module or Variable converted to arrays."""
    return isinstance(x, nnx.NodeStates)


def split(ctx: Any, path: Any, prefix: Any, node: Any) -> nnx.NodeStates:
    """Split a module into its definition and its arrays; NNX calls this for each module.

    If `prefix` is a DiffState, the selected arrays are one state, and the rest is another.
    """
    unsplit = not isinstance(prefix, nnx.DiffState) or isinstance(node, nnx.Variable)
    filters = () if unsplit else (prefix.filter, ...)
    return nnx.NodeStates.from_split(*ctx.split(node, *filters))


def _same_parts(before: list[tuple[Any, Any]], after: list[tuple[Any, Any]]) -> bool:
    """Return whether two results of `_parts` have the same objects at the same paths."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(p == q and x is y for (p, x), (q, y) in pairs)


def _changed(variable: nnx.Variable[Any], old_leaves: list[Any], old_tree: Any) -> bool:
    """Return whether a Variable now holds other arrays than the old ones."""
    leaves, tree = jax.tree.flatten(variable)
    return tree != old_tree or any(a is not b for a, b in zip(leaves, old_leaves, strict=True))
