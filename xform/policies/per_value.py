"""Policies that decide about one value at a time, and the answer of such a policy for an equation.

Each is a callable of JAX's protocol: `policy(primitive, *avals, **params)` returns whether the
outputs of one equation are saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from xform._jax import (
    JaxprEqn,
    Offloadable,
    Primitive,
    conv_general_dilated_p,
    dot_general_p,
    name_p,
    policy_answer,
)
from xform.errors import WrongArgument
from xform.policies.budgets import Budget
from xform.policies.min_cut import MinCut
from xform.program.source import frame

Answer = bool | Offloadable
Policy = Callable[..., Any]
# The prefix of the names that `TaggedPolicy` gives to values.
TAG = "xform saves "


@dataclasses.dataclass(frozen=True)
class ConstantPolicy:
    """A policy that gives the same answer for every value."""

    name: str
    answer: bool

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        return self.answer

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class DotsPolicy:
    """Save or offload matrix products; if `batch`, also batched products and convolutions."""

    name: str
    batch: bool = True
    answer: Answer = True

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim is dot_general_p:
            _, batch_dims = params["dimension_numbers"]
            return self.answer if self.batch or not any(map(len, batch_dims)) else False
        return self.answer if self.batch and prim is conv_general_dilated_p else False

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class TaggedPolicy:
    """A policy that decides for a whole region, with the names that it gave to the saved values.

    xform's transforms use the policy `planned`; JAX's transforms save the values with these names.
    """

    planned: MinCut | Budget
    names: frozenset[str]

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Whether the equation gives a value one of the names."""
        return prim is name_p and params["name"] in self.names

    def __repr__(self) -> str:
        return repr(self.planned)


@dataclasses.dataclass(frozen=True)
class NamePolicy:
    """A policy by names (`checkpoint_name`): `saved`, `offloaded`, or all but the `excluded`."""

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    excluded: frozenset[str] | None = None
    destination: Offloadable | None = None

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim is not name_p:
            return False
        name = params["name"]
        if self.excluded is not None:
            return name not in self.excluded
        if name in self.offloaded and self.destination is not None:
            return self.destination
        return name in self.saved

    def __repr__(self) -> str:
        if self.excluded is not None:
            return f"save_any_names_but_these({', '.join(sorted(self.excluded))})"
        offloaded = f"; offload {', '.join(sorted(self.offloaded))}" if self.offloaded else ""
        return f"save_only_these_names({', '.join(sorted(self.saved))}{offloaded})"


save_everything = ConstantPolicy("save_everything", True)
"""Save everything that the backward pass reads."""
save_nothing = ConstantPolicy("save_nothing", False)
"""Save nothing but the arguments. The loops of a whole function still save their carries."""
save_dots = DotsPolicy("save_dots")
"""Save the results of matrix products and convolutions."""
save_dots_with_no_batch_dims = DotsPolicy("save_dots_with_no_batch_dims", batch=False)
"""Save the results of matrix products without batch dimensions."""


def save_only_these_names(*names: str) -> NamePolicy:
    """Save the values that `jax.ad_checkpoint.checkpoint_name` gave one of `names`."""
    return NamePolicy(saved=_names("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> NamePolicy:
    """Save every named value whose name is not one of `names`."""
    return NamePolicy(excluded=_names("save_any_names_but_these", names))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_src: str,
    offload_dst: str,
) -> NamePolicy:
    """Save values with some names on the device, and offload others to `offload_dst`.

    The memories are JAX's kinds, such as "device" and "pinned_host". XLA:CPU has only one.
    """
    request = "save_and_offload_only_these_names"
    saved, offloaded = names_which_can_be_saved, names_which_can_be_offloaded
    saved, offloaded = _names(request, saved), _names(request, offloaded)
    if in_both := saved & offloaded:
        raise WrongArgument(
            request,
            f"{sorted(in_both)} are in both lists",
            "",
            "put each name into one list: saved or offloaded",
        )
    _names(request, (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return NamePolicy(saved=saved, offloaded=offloaded, destination=where)


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> DotsPolicy:
    """Offload matrix products without batch dimensions to `offload_dst`; recompute the rest."""
    _names("offload_dots_with_no_batch_dims", (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return DotsPolicy("offload_dots_with_no_batch_dims", batch=False, answer=where)


def _names(request: str, names: Any) -> frozenset[str]:
    """Check that `names` is a sequence of strings, and not one string; return them as a set."""
    is_list = not isinstance(names, str) and isinstance(names, Iterable)
    invalid = [n for n in names if not isinstance(n, str)] if is_list else [names]
    if invalid:
        raise WrongArgument(
            request, f"{invalid[0]!r} is not a name of a value", "", "give each name as a string"
        )
    return frozenset(names)


@dataclasses.dataclass(frozen=True)
class EitherPolicy:
    """A policy that saves a value if one of two policies saves it."""

    one: Policy
    other: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        answers = [_answer(p, prim, avals, params) for p in (self.one, self.other)]
        if not all(isinstance(a, bool) for a in answers):
            raise WrongArgument(
                "save_from_both_policies",
                "one of the two policies offloads values, which cannot be combined with saving",
                "",
                "write one callable policy that returns True, False or an Offloadable",
            )
        return any(answers)


def answer_for(policy: Policy, eqn: JaxprEqn) -> Answer:
    """Return a policy's answer for one equation.

    Raises:
      WrongArgument: the answer is not one that JAX accepts; JAX raises a TypeError for it.
    """
    return _answer(policy, eqn.primitive, [v.aval for v in eqn.invars], eqn.params, eqn)


def _answer(policy: Policy, prim: Primitive, avals: Sequence[Any], params: Mapping[str, Any],
            eqn: JaxprEqn | None = None) -> Answer:  # fmt: skip
    answer = policy(prim, *avals, **params)
    if (known := policy_answer(answer)) is not None:
        return known
    raise WrongArgument(
        f"policy={getattr(policy, '__name__', repr(policy))}",
        f"it returned {answer!r}, of type {type(answer).__name__}, for {prim.name}",
        frame(eqn) if eqn else "",
        "call it first: it returns a policy" if callable(answer) else
        "return True (save), False (recompute) or a jax.ad_checkpoint.Offloadable",
    )  # fmt: skip
