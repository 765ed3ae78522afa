"""What `vjp` and `linearize` return: a linear map as a pytree of residuals.

Since they are pytrees, such maps may leave a jitted function, be batched, or be carried in a loop.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import jax.ref
import numpy as np

from xform._jax import cotangent_aval, staging, tangent_aval, zeros
from xform.arithmetic import Value, all_arrayed, differentiable, float0_zeros, is_number, laid
from xform.errors import WrongCotangent, WrongTangent
from xform.hijax import is_vector
from xform.interpret import emit
from xform.interpret.joint import Plan
from xform.interpret.node import gather, spread
from xform.ir import seldom_collected
from xform.transforms.function import Function, Signature, Tree, as_array


class Part(abc.ABC):
    """How a linear map is run; all but its arrays."""

    @abc.abstractmethod
    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """Results from cotangents of the outputs (tangents of the primals); None where zero."""

    def settled(self, arrays: Any) -> tuple[Part, Any]:
        """The same part with all of its arrays in the open."""
        return self, arrays


class Planned(Part):
    """The backward part of a planned function; the arrays are what it keeps and reads."""

    def __init__(self, fun: Function, plan: Plan, push: bool):
        self._plan, self._n_consts, self._push = plan, fun.n_consts, push

    def arrays(self, kept: list[Any], args: Sequence[Value]) -> Any:
        """What a forward run leaves, with the inputs that are still read."""
        return kept, gather(args, self._plan.reads)

    def run(self, arrays: Any, seeds: Sequence[Value]) -> list[Value]:
        """The backward part, under its plan."""
        joint, (kept, reads) = self._plan.joint, arrays
        seeds = all_arrayed(seeds)
        if self._push:
            full = [*[None] * self._n_consts, *seeds]
        else:
            full = [*seeds, *[None] * (len(joint.outputs) - len(seeds))]
        args, joint_seeds = spread(reads, self._plan.reads), gather(full, joint.seeded)
        with seldom_collected(staging()):
            results = emit.backward(self._plan, kept, args, joint_seeds, True, whole=True)
        return spread(results, joint.results)[0 if self._push else self._n_consts :]


class LinearMap:
    """A linear map: a part, and its arrays, which are the leaves of the tree."""

    def __init__(self, signature: Signature, part: Part, arrays: Any):
        self._signature, self._part, self._arrays = signature, part, arrays

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Signature, Part]]:
        """The arrays; all else is static."""
        self._part, self._arrays = self._part.settled(self._arrays)
        return (self._arrays,), (self._signature, self._part)

    @classmethod
    def tree_unflatten(cls, static: tuple[Signature, Part], children: tuple[Any]) -> Self:
        """The map with other arrays in its place."""
        return cls(*static, *children)


@jax.tree_util.register_pytree_node_class
class Pullback(LinearMap):
    """The function that `vjp` returns."""

    def __call__(self, ct: Tree, *more: Any) -> tuple[Tree, ...]:
        """Cotangents like the primals, from one like the output."""
        of = self._signature
        if more:
            raise WrongCotangent(
                f"pullback of {of.name}",
                f"it was called with {1 + len(more)} arguments",
                "",
                "pass one cotangent with the tree of the function's output, such as a tuple",
            )
        cts, tree = jax.tree.flatten(ct)
        if tree != of.out_tree:
            raise WrongCotangent(
                f"pullback of {of.name}",
                f"the cotangent's tree is {tree}, the output's is {of.out_tree}",
                "",
                "pass a cotangent with the tree of the function's output",
            )
        checked = [_cotangent(x, a, of.name) for x, a in zip(cts, of.out_avals, strict=True)]
        results = self._part.run(self._arrays, checked)
        avals = map(cotangent_aval, of.primal_avals)
        return of.in_tree.unflatten(map(dense, results, avals))

    def with_refs(self, *refs: Any) -> Callable[[Tree], Tree]:
        """The map that adds a primal's cotangent to its reference, where one is given.

        `refs` are like the primals, with None where the cotangent is to be returned.
        """
        flat_refs = self._signature.in_tree.flatten_up_to(refs)

        def accumulate(ct: Tree) -> Tree:
            leaves = jax.tree.leaves(self(ct))
            for ref, leaf in zip(flat_refs, leaves, strict=True):
                if ref is not None:
                    jax.ref.addupdate(ref, ..., leaf)
            out = (x if r is None else None for r, x in zip(flat_refs, leaves, strict=True))
            return self._signature.in_tree.unflatten(out)

        return accumulate


@jax.tree_util.register_pytree_node_class
class Pushforward(LinearMap):
    """The function that `linearize` returns."""

    def __call__(self, *tangents: Tree) -> Tree:
        """A tangent like the output, from tangents like the primals."""
        of = self._signature
        dxs = check_tangents(of.name, of.in_tree, of.primal_avals, "linearize", tangents)
        results = self._part.run(self._arrays, dxs)
        return of.out_tree.unflatten(map(dense, results, map(tangent_aval, of.out_avals)))


def dense(value: Value, aval: Any) -> Value:
    """A tangent or cotangent of type `aval` with its zeros written out; float0 for integers."""
    if value is not None:
        return value
    if getattr(aval, "dtype", None) == jax.dtypes.float0:
        return float0_zeros(aval.shape)
    return zeros(aval)


def _cotangent(ct: Value, aval: Any, name: str) -> Value:
    """A cotangent, checked against the output that it belongs to."""
    ct_aval = jax.typeof(ct)
    vector = is_vector(aval)
    integer = not vector and not jnp.issubdtype(aval.dtype, np.inexact)
    if vector:
        same = ct_aval == cotangent_aval(aval)
    else:
        same = ct_aval.shape == aval.shape and (ct_aval.dtype == aval.dtype or integer)
    if not same:
        raise WrongCotangent(
            f"pullback of {name}",
            f"a cotangent is {ct_aval.str_short()}, the output it belongs to {aval.str_short()}",
            "",
            "pass a cotangent of the output's shape and dtype",
        )
    if (
        vector or integer or is_number(ct)
    ):  # as in JAX, a user's rule is given a number of Python's as one
        return ct
    return laid(as_array(ct, f"pullback of {name}"), aval, cotangent_aval)


def _check_varying(dx_aval: Any, aval: Any, asked: str, name: str) -> None:
    """Refuse a tangent that differs between devices where its primal does not."""
    axes = tuple(sorted(varying(dx_aval) - varying(aval), key=str))
    if axes:
        raise WrongTangent(
            f"{asked} of {name}",
            f"a tangent varies over {axes} within a shard_map, but its primal is the same there",
            "",
            f"let the primal vary, by applying `jax.lax.pcast(..., {axes}, to='varying')` to the "
            f"primal value passed to `xform.{asked}`",
        )


def varying(aval: Any) -> frozenset[Any]:
    """The axes of a `shard_map` over which a value differs, of a type that says so."""
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else kind.varying


def check_tangents(
    name: str, tree: Any, avals: Sequence[Any], asked: str, tangents: tuple[Tree, ...]
) -> list[Value]:
    """Flat tangents of a function's primals, checked against them; None for integers."""
    leaves, tangent_tree = jax.tree.flatten(tangents)
    if tangent_tree != tree:
        raise WrongTangent(
            f"{asked} of {name}",
            f"the tangents' tree is {tangent_tree}, the primals' is {tree}",
            "",
            "pass tangents with the tree of the primals",
        )
    out: list[Value] = []
    for x, aval in zip(leaves, avals, strict=True):
        dx_aval, active = jax.typeof(x), differentiable(aval)
        if is_vector(aval):
            same = dx_aval == tangent_aval(aval)
        else:
            plain = active and isinstance(aval.dtype, np.dtype)
            wanted = aval.dtype if plain else tangent_aval(aval).dtype
            same = dx_aval.dtype == wanted and dx_aval.shape == aval.shape
        if not same:
            raise WrongTangent(
                f"{asked} of {name}",
                f"a tangent is {dx_aval.str_short()}, but its primal {aval.str_short()} wants "
                f"{tangent_aval(aval).str_short()}",
                "",
                "pass tangents of the primals' shapes and dtypes; for integers, "
                "np.zeros(shape, jax.dtypes.float0)",
            )
        _check_varying(dx_aval, aval, asked, name)
        held = x if is_number(x) or is_vector(aval) else laid(as_array(x, asked), aval)
        out.append(held if active else None)
    return out
