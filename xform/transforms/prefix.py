"""Trees of bools, and other trees, with the structure of a function's arguments or output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.tree_util import flatten_one_level, treedef_is_leaf

from xform.errors import WrongArgument
from xform.program.ir import Mask


def mirrored(tree: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of tuples, lists and dicts like `tree`; other containers become tuples."""
    rest = iter(leaves)

    def build(of: Any) -> Any:
        if (data := of.node_data()) is None:
            return next(rest)
        kind, keys = data
        children = [build(child) for child in of.children()]
        if kind is dict:
            return dict(zip(keys, children, strict=True))
        return None if kind is type(None) else children if kind is list else tuple(children)

    return build(tree)


def flags(given: Any, tree: Any, caller: str, name: str) -> Mask:
    """Return one bool for each leaf of `tree`, from a tree of bools that is a prefix of it.

    Containers match if they have the same number of children. Two dicts must have the same keys.
    """
    if isinstance(given, bool):
        return (given,) * tree.num_leaves
    error: Callable[[str, str, str], WrongArgument] = lambda at, wrong, remedy: WrongArgument(
        f"{caller} with {name}", f"{name}{at} {wrong}", "", remedy
    )

    def read(prefix: Any, of: Any, at: str) -> Mask:
        if isinstance(prefix, bool):
            return (prefix,) * of.num_leaves
        try:
            children = list(flatten_one_level(prefix)[0])
        except ValueError:
            wrong = f"is {prefix!r} of type {type(prefix).__name__}"
            raise error(at, wrong, "give a tuple-tree of bools: tuples with bools") from None
        if treedef_is_leaf(of) and of.num_leaves:
            raise error(at, "is a container, but the argument is a leaf", "give one bool there")
        inner = of.children()
        if len(children) != len(inner):
            wrong = f"has {len(children)}, but the argument has {len(inner)}"
            raise error(at, f"differs in its number of children: it {wrong}", "give one for each")
        kind, keys = of.node_data()
        if type(prefix) is dict and kind is dict and sorted(prefix) != list(keys):
            wrong = f"has the keys {sorted(prefix)}, but the argument has {list(keys)}"
            raise error(at, wrong, "give a bool for each key of the argument")
        pairs = enumerate(zip(children, inner, strict=True))
        return tuple(on for i, (p, t) in pairs for on in read(p, t, f"{at}[{i}]"))

    return read(given, tree, "")
