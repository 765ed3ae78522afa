"""A loss of NNX modules as a pure function of pytrees of arrays, to plan or measure it.

Its derivative is the program that `xform.flax.value_and_grad` of the loss plans, so a plan for one
is a plan for the other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from xform.introspection.argnums import positions
from xform.introspection.callables import argument_names, function_name
from xform.modules.boundary import ModuleBoundary, Tree, is_node, split
from xform.modules.loss_call import LossCall
from xform.modules.objective import ModuleObjective, diff_states, selected


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class ModuleArrays:
    """Arrays of a module, as a pytree whose paths are the names of the module's attributes.

    Attributes:
      names: the name of each array, such as "layers[0].kernel".
      arrays: the arrays, or their types.
      tree: the structure of the state that `state` returns.
    """

    names: tuple[str, ...]
    arrays: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, state: Tree) -> ModuleArrays:
        """Take the arrays out of a state of a module, or out of several (`nnx.NodeStates`)."""
        paths, tree = jax.tree.flatten_with_path(state)
        return cls(tuple(_name(p) for p, _ in paths), tuple(x for _, x in paths), tree)

    def state(self) -> Tree:
        """Return the state, with these arrays."""
        return jax.tree.unflatten(self.tree, self.arrays)

    def tree_flatten_with_keys(self) -> Any:
        """Return the arrays, each with its name, and the static part."""
        pairs = zip(self.names, self.arrays, strict=True)
        return [(GetAttrKey(name), x) for name, x in pairs], (self.names, self.tree)

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Iterable[Any]) -> ModuleArrays:
        """Make it from the static part and the arrays."""
        names, tree = static
        return cls(names, tuple(arrays), tree)


def _name(path: Sequence[Any]) -> str:
    """Return the name of an array by its path in a state."""
    keys = [k for k in path if isinstance(k, DictKey | SequenceKey)]
    if isinstance(path[0], GetAttrKey) and path[0].name == "states":
        keys = keys[1:]  # the first one tells which of several states has it
    names = [k.key if isinstance(k, DictKey) else k.idx for k in keys]
    texts = [f"[{name}]" if isinstance(name, int) else f".{name}" for name in names]
    return "".join(texts).removeprefix(".") or "value"


@dataclasses.dataclass(frozen=True, eq=False)
class _SplitArgument:
    """An argument that is differentiated, in two parts: selected arrays, and the others.

    Attributes:
      tree: the structure of the argument, with modules as leaves.
      nodes: for each leaf its `nnx.NodeStates`, or None if it is no module.
    """

    tree: Any
    nodes: list[Any]

    @classmethod
    def of(cls, array_arg: Tree) -> _SplitArgument:
        leaves, tree = jax.tree.flatten(array_arg, is_leaf=is_node)
        return cls(tree, [x if is_node(x) else None for x in leaves])

    def others(self) -> list[Tree]:
        """Return the arrays of each module that are not selected."""
        return [ModuleArrays.of(x.replace(states=((), *x.states[1:]))) for x in self.nodes if x]

    def joined(self, wrt: Tree, others: Sequence[ModuleArrays]) -> Tree:
        """Return the argument from its two parts, as `selected` and `others` return them."""
        rest = iter(others)
        leaves = []
        for x, node in zip(self.tree.flatten_up_to(wrt), self.nodes, strict=True):
            if node is None:
                leaves.append(x)
            else:
                node = next(rest).state()
                leaves.append(node.replace(states=(x, *node.states[1:])))
        return self.tree.unflatten(leaves)


def array_loss(call: LossCall, caller: str) -> LossCall:
    """Return the call of a loss of modules as the call of a pure function of arrays.

    Each argument keeps its position. If it is differentiated, the selected arrays stand in place of
    its modules, and the others are one more argument, after the given ones.
    """
    f, args, n = call.f, tuple(call.args), len(call.args)
    request = f"{caller} of {function_name(f)}"
    boundary = ModuleBoundary.of(caller, None, None)
    if call.argnums is None:  # every argument, as `xform.flax.vjp` differentiates them
        boundary = dataclasses.replace(boundary, updates=False)
    selections = diff_states(boundary, range(n) if call.argnums is None else call.argnums, request)
    indices = positions([x.argnum for x in selections], n, caller)
    by_index = dict(zip(indices, selections, strict=True))
    prefix = tuple(by_index.get(i) for i in range(n))
    array_args = nnx.to_tree(args, prefix=prefix, split_fn=split)
    parts = {i: _SplitArgument.of(array_args[i]) for i in indices}

    @functools.wraps(f, updated=())
    def run(*arrays: Tree) -> Any:
        full, others = [_states(x) for x in arrays[:n]], arrays[n:]
        for (i, part), rest in zip(parts.items(), others, strict=True):
            full[i] = part.joined(full[i], rest)
        copies = nnx.from_tree(tuple(full))
        with nnx.update_context(caller):
            objective = ModuleObjective(boundary, f, copies, {}, by_index, call.has_aux, request)
            return objective(*objective.wrt)

    names = [re.sub(r"\W+", "_", name).strip("_") for name in argument_names(f, n)]
    names += [f"{names[i]}_state" for i in indices]
    vars(run)["__signature__"] = _signature(names)
    given = [_arrays(selected(x) if i in parts else x) for i, x in enumerate(array_args)]
    donate = (*call.donate, *(n + k for k, i in enumerate(indices) if i in call.donate))
    argnums = None if call.argnums is None else indices
    if isinstance(call.argnums, int | nnx.DiffState):
        argnums = indices[0]
    others = [part.others() for part in parts.values()]
    return LossCall(run, (*given, *others), argnums, True, donate)


def _arrays(tree: Tree) -> Tree:
    """Replace the states of modules in a tree by their arrays."""
    is_state = lambda x: is_node(x) or isinstance(x, nnx.State)
    return jax.tree.map(lambda x: ModuleArrays.of(x) if is_state(x) else x, tree, is_leaf=is_state)


def _states(tree: Tree) -> Tree:
    """Replace the arrays of modules in a tree by the states: the inverse of `_arrays`."""
    is_arrays = lambda x: isinstance(x, ModuleArrays)
    return jax.tree.map(lambda x: x.state() if is_arrays(x) else x, tree, is_leaf=is_arrays)


def _signature(names: Sequence[str]) -> inspect.Signature:
    """Return a signature of positional parameters."""
    unique: list[str] = []
    for name in names:
        unique.append(name + "_" * unique.count(name))
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in unique])
