"""Trees with the structure of a function's arguments or output: flags from the user, and results.

In this file `tree` is a `PyTreeDef` of JAX. A prefix of a tree has a leaf where the tree may have a
subtree; the leaf stands for all leaves of that subtree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import flatten_one_level, treedef_is_leaf

from xform.errors import WrongArgument
from xform.program.ir import Mask


def mirrored(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree like `tree`, of tuples, lists and dicts, with these leaves.

    Other containers, such as dataclasses, become tuples.
    """
    remaining = iter(leaves)

    def build(subtree: Any) -> Any:
        if (data := subtree.node_data()) is None:
            return next(remaining)
        kind, keys = data
        children = [build(child) for child in subtree.children()]
        if kind is dict:
            return dict(zip(keys, children, strict=True))
        return None if kind is type(None) else children if kind is list else tuple(children)

    return build(tree)


def flags(given: Any, tree: Any, caller: str, name: str) -> Mask:
    """Return one bool for each leaf of `tree`, from the tree of bools `given`, a prefix of it.

    Containers match if they have the same number of children. Two dicts must have the same keys.
    `caller` is the transform and `name` its argument, for messages.

    Raises:
      WrongArgument: `given` is not such a prefix.
    """
    if isinstance(given, bool):
        return (given,) * tree.num_leaves
    error: Callable[[str, str, str], WrongArgument] = lambda path, problem, remedy: WrongArgument(
        f"{caller} with {name}", f"{name}{path} {problem}", "", remedy
    )

    def read(prefix: Any, subtree: Any, path: str) -> Mask:
        if isinstance(prefix, bool):
            return (prefix,) * subtree.num_leaves
        try:
            children = list(flatten_one_level(prefix)[0])
        except ValueError:
            problem = f"is {prefix!r} of type {type(prefix).__name__}"
            raise error(
                path, problem, "give True or False, or a tuple of bools (nested like the argument)"
            ) from None
        if treedef_is_leaf(subtree) and subtree.num_leaves:
            raise error(path, "is a container, but the argument is a leaf", "give one bool there")
        subtrees = subtree.children()
        if len(children) != len(subtrees):
            problem = f"has {len(children)}, but the argument has {len(subtrees)}"
            raise error(
                path, f"has the wrong number of children: it {problem}", "give one bool for each"
            )
        kind, keys = subtree.node_data()
        if type(prefix) is dict and kind is dict and sorted(prefix) != list(keys):
            problem = f"has the keys {sorted(prefix)}, but the argument has {list(keys)}"
            raise error(path, problem, "give a bool for each key of the argument")
        pairs = enumerate(zip(children, subtrees, strict=True))
        return tuple(on for i, (p, t) in pairs for on in read(p, t, f"{path}[{i}]"))

    return read(given, tree, "")
