"""`with_refs` of a pullback: for each cotangent, add it to a reference, return it or drop it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.ref
from jax.tree_util import Partial

from xform._jax import Tracer, cotangent_aval, is_reference
from xform.errors import NotDifferentiable, WrongArgument
from xform.program.arithmetic import Value
from xform.transforms.function import Signature, Tree
from xform.transforms.marks import wishes
from xform.transforms.residuals import argument_name


def with_refs(pull: Any, of: Signature, given: Sequence[Any]) -> Callable[[Tree], Tree]:
    """Return a function that pulls a cotangent back and treats each result as `given` says.

    Raises:
      WrongArgument: `given` does not have the tree of the primals, or a reference has another type.
    """
    flat, tree = jax.tree.flatten(tuple(given))
    if tree != of.in_tree:
        raise WrongArgument(
            f"with_refs of the pullback of {of.name}",
            f"the tree structures differ: the given tree is {tree}, the primals' is {of.in_tree}; "
            "a None (NoneType) is an empty tree and stands for no argument",
            "",
            "give one entry for each array: a Ref, jax.ad.GradValue() or jax.ad.DontWant()",
        )
    refs: dict[int, Any] = {}
    dropped: list[int] = []
    for i, wish in enumerate(flat):
        if isinstance(wish, wishes.DontWant):
            dropped.append(i)
        elif _is_reference(wish):
            _check(of, i, wish)
            refs[i] = wish
    return Partial(
        functools.partial(_pulled, of.in_tree, tuple(refs), tuple(dropped)),
        pull,
        list(refs.values()),
    )


def _is_reference(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.Ref | Tracer) and is_reference(jax.typeof(x))


def reference_argument(of: Signature, i: int) -> NotDifferentiable:
    """Return the error for the gradient of an argument that is a reference itself."""
    return NotDifferentiable(
        f"pullback of {of.name}",
        f"{argument_name(of, i)} is a Ref: its gradient can't be returned as a value",
        "",
        "differentiate its value: pass ref[...] to the function; or, if you do not need that "
        "gradient, call pull.with_refs(...) with jax.ad.DontWant() for this argument",
    )


def _check(of: Signature, i: int, ref: Any) -> None:
    if is_reference(of.primal_avals[i]):
        raise reference_argument(of, i)
    wanted: Any = cotangent_aval(of.primal_avals[i])
    given = jax.typeof(ref)
    if (given.shape, given.dtype) != (wanted.shape, wanted.dtype):
        raise WrongArgument(
            f"with_refs of the pullback of {of.name}",
            f"the reference for {argument_name(of, i)} is {given.str_short()}, and accumulating "
            f"this cotangent requires a ref of type Ref{{{wanted.str_short()}}}",
            "",
            f"pass jax.new_ref(jnp.zeros({wanted.shape}, {str(wanted.dtype)!r}))",
        )


def _pulled(tree: Any, at: Sequence[int], dropped: Sequence[int], pull: Any, refs: Sequence[Any],
            ct: Tree) -> Tree:  # fmt: skip
    return pull.logged(lambda: _added(tree, at, dropped, pull, refs, ct))


def _added(tree: Any, at: Sequence[int], dropped: Sequence[int], pull: Any, refs: Sequence[Any],
           ct: Tree) -> Tree:  # fmt: skip
    out: list[Value] = pull.flat(ct, dropped)
    for i, ref in zip(at, refs, strict=True):
        jax.ref.addupdate(ref, ..., out[i])
        out[i] = wishes.GradRef()
    for i in dropped:
        out[i] = wishes.DidntWant()
    return tree.unflatten(out)
