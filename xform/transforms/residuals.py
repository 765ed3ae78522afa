"""The arrays of a pullback, in two groups: arguments of the function, and all others.

`jax.vjp` returns an object with attributes `args_res` and `opaque_residuals`: the arrays that it
reads, which a user may replace. For instance, a user drops a gathered weight after the forward
pass, and gathers it again for the backward pass. This file separates the arrays of xform's pullback
in the same way, and puts them together again when it is called.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.tree_util import keystr

from xform.errors import WrongArgument
from xform.program.arithmetic import Value
from xform.program.ir import Mask
from xform.transforms.function import Signature
from xform.transforms.marks import NotNeeded, NotSaveable
from xform.transforms.prefix import mirrored

_MARKERS = NotNeeded, NotSaveable


class Primals:
    """Weak references to the arguments of a function, and which of them may be saved."""

    def __init__(self, values: Sequence[Value], saveable: Mask):
        self._refs, self.saveable = list(map(_weak_reference, values)), saveable

    def positions(self) -> dict[int, int]:
        """Map the `id` of each argument that is still alive to its position."""
        alive = [ref() for ref in self._refs]
        return {id(x): i for i, x in enumerate(alive) if x is not None}


def _weak_reference(x: Value) -> Callable[[], Value]:
    """Return a function that returns `x` while `x` is alive, and None after that."""
    try:
        return weakref.ref(x)
    except TypeError:  # a value of another type than JAX's arrays
        return lambda: x


@dataclasses.dataclass
class PullbackResiduals:
    """The arrays that a pullback reads: arguments of the function, and all others.

    Attributes:
      tree: the tree of all arrays, in the order in which the pullback takes them.
      positions: for each of these arrays, the position of the argument that it is; None if it is
        no argument.
      args: a list like the arguments, with NotNeeded for an argument that the pullback does not
        read, and NotSaveable for an argument that the user must restore.
      opaque: the other arrays, in order.
    """

    tree: Any
    positions: tuple[int | None, ...]
    args: Any
    opaque: Any

    def arrays(self, of: Signature) -> Any:
        """Return all arrays as one tree, for a call of the pullback of a function with types `of`.

        Raise WrongArgument if `args` lacks an argument that the pullback reads, or has one of
        another shape.
        """
        n = of.in_tree.num_leaves
        given = jax.tree.leaves(self.args, is_leaf=lambda x: isinstance(x, _MARKERS))
        others = iter(jax.tree.leaves(self.opaque))
        read = sorted({i for i in self.positions if i is not None})
        if read and len(given) != n:
            raise WrongArgument(
                f"pullback of {of.name}",
                f"its args_res holds {len(given)} values, but the function has {n} arguments that "
                f"are arrays, and the pullback reads {_argument_names(of, read)}",
                "",
                "assign each of them to args_res before the pullback is called",
            )
        if missing := [i for i in read if isinstance(given[i], NotSaveable)]:
            raise WrongArgument(
                f"pullback of {of.name}",
                f"its not-saveable arguments were not restored: {_argument_names(of, missing)}",
                "",
                "assign each of them to args_res before the pullback is called",
            )
        for i in read:
            if jax.typeof(given[i]).shape != of.primal_avals[i].shape:
                raise WrongArgument(
                    f"pullback of {of.name}",
                    f"args_res has a value of type {jax.typeof(given[i]).str_short()} for "
                    f"{_argument_names(of, [i])}, which is {of.primal_avals[i].str_short()}",
                    "",
                    "restore the argument that the function was called with",
                )
        return self.tree.unflatten(next(others) if i is None else given[i] for i in self.positions)


def split_residuals(arrays: Any, primals: Primals, in_tree: Any) -> PullbackResiduals:
    """Separate the arrays of a pullback into arguments of the function, and all others.

    An array is an argument if it is the same object as one of `primals`. `in_tree` is the tree of
    the arguments.
    """
    leaves, tree = jax.tree.flatten(arrays)
    position_of_id = primals.positions()
    positions = tuple(position_of_id.get(id(x)) for x in leaves)
    read_args = {i: x for i, x in zip(positions, leaves, strict=True) if i is not None}

    def argument(i: int) -> Any:
        if i not in read_args:
            return NotNeeded()
        return read_args[i] if primals.saveable[i] else NotSaveable()

    args = mirrored(in_tree, [argument(i) for i in range(in_tree.num_leaves)])
    opaque = [x for i, x in zip(positions, leaves, strict=True) if i is None]
    return PullbackResiduals(tree, positions, list(args), opaque)


def argument_name(of: Signature, i: int) -> str:
    """Return the name of the argument at position `i` of the flat arguments: `args[0]['w']`."""
    leaves = jax.tree_util.tree_leaves_with_path(mirrored(of.in_tree, range(of.in_tree.num_leaves)))
    return f"args{keystr(leaves[i][0])}"


def _argument_names(of: Signature, positions: Sequence[int]) -> str:
    return ", ".join(argument_name(of, i) for i in positions)
