"""`pull.with_refs`: a pullback that adds cotangents to references, returns them, or drops them.

As in JAX, the caller gives one wish for each argument: a `Ref` to add the cotangent to,
`jax.ad.GradValue()` to return it, or `jax.ad.DontWant()` to drop it.
"""

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
from xform.transforms.marks import markers
from xform.transforms.residuals import argument_name


def with_refs(pull: Any, of: Signature, given: Sequence[Any]) -> Callable[[Tree], Tree]:
    """Return a function from a cotangent to a tree of results, as the wishes `given` say.

    Args:
      pull: the pullback.
      of: the types of its function.
      given: trees of wishes, like the arguments of the function.

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
        if isinstance(wish, markers.DontWant):
            dropped.append(i)
        elif _is_reference(wish):
            _check(of, i, wish)
            refs[i] = wish
    return Partial(
        functools.partial(_pull_with_logs, of.in_tree, tuple(refs), tuple(dropped)),
        pull,
        list(refs.values()),
    )


def _is_reference(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.Ref | Tracer) and is_reference(jax.typeof(x))


def reference_argument_error(of: Signature, i: int) -> NotDifferentiable:
    """Return the error for the gradient of an argument that is a reference itself."""
    return NotDifferentiable(
        f"pullback of {of.name}",
        f"{argument_name(of, i)} is a Ref: its gradient can't be returned as a value",
        "",
        "differentiate its value: pass ref[...] to the function; or, if you do not need that "
        "gradient, call pull.with_refs(...) with jax.ad.DontWant() for this argument",
    )


def _check(of: Signature, i: int, ref: Any) -> None:
    """Raise an error unless the cotangent of argument `i` can be added to `ref`."""
    if is_reference(of.primal_avals[i]):
        raise reference_argument_error(of, i)
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


def _pull_with_logs(tree: Any, ref_positions: Sequence[int], dropped: Sequence[int], pull: Any,
                    refs: Sequence[Any], ct: Tree) -> Tree:  # fmt: skip
    """Return the result of `_pull_and_add`, with the logs of the pass if `pull` returns logs."""
    return pull.logged(lambda: _pull_and_add(tree, ref_positions, dropped, pull, refs, ct))


def _pull_and_add(tree: Any, ref_positions: Sequence[int], dropped: Sequence[int], pull: Any,
                  refs: Sequence[Any], ct: Tree) -> Tree:  # fmt: skip
    """Pull a cotangent back, and add the results at `ref_positions` to `refs`.

    Return a tree like the arguments: markers for results that were added or `dropped`, and the
    other results.
    """
    out: list[Value] = pull.flat(ct, dropped)
    for i, ref in zip(ref_positions, refs, strict=True):
        jax.ref.addupdate(ref, ..., out[i])
        out[i] = markers.GradRef()
    for i in dropped:
        out[i] = markers.DidntWant()
    return tree.unflatten(out)
