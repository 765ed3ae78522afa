"""Remat policies: which values a backward pass saves.

A policy says, for one equation, whether its outputs are saved. This module has JAX's policies under
xform's names, and xform's own. Each is a callable of JAX's protocol (`policy(primitive, *avals,
**params)`). So `jax.checkpoint` accepts them, and xform accepts any policy of `jax.checkpoint`.

>>> import xform
>>> xform.policies.save_only_these_names("hidden") == xform.policies.save_only_these_names("hidden")
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

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
from xform.policies.budgets import Budget, Fit, budget, fit
from xform.policies.min_cut import MinCut, min_cut
from xform.policies.regions import open_regions, regions_of
from xform.policies.while_loop import checkpoints_per_while_loop
from xform.program.source import frame
from xform.terminal.text import byte_count

__all__ = [
    "budget",
    "checkpoints_per_while_loop",
    "fit",
    "min_cut",
    "offload_dots_with_no_batch_dims",
    "open_regions",
    "parse",
    "save_and_offload_only_these_names",
    "save_any_names_but_these",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_everything",
    "save_from_both_policies",
    "save_nothing",
    "save_only_these_names",
]

Answer = bool | Offloadable
# The prefix of the names that `Tagged` gives to values.
TAG = "xform saves "
Policy = Callable[..., Any]


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


save_everything = ConstantPolicy("save_everything", True)
"""Save everything that the backward pass reads."""
save_nothing = ConstantPolicy("save_nothing", False)
"""Save nothing but the arguments. The loops of a whole function still save their carries."""
save_dots = DotsPolicy("save_dots")
"""Save the results of matrix products and convolutions."""
save_dots_with_no_batch_dims = DotsPolicy("save_dots_with_no_batch_dims", batch=False)
"""Save the results of matrix products without batch dimensions."""

# The policies without arguments, by the names that command lines use too.
NAMED: dict[str, Policy] = {
    "min_cut": min_cut,
    "save_everything": save_everything,
    "save_dots": save_dots,
    "save_dots_with_no_batch_dims": save_dots_with_no_batch_dims,
    "save_nothing": save_nothing,
    "auto": fit(),
}
# Names that users may try, each with the name of the policy.
_SIMILAR_NAMES = {
    "default": "min_cut",
    "everything": "save_everything",
    "dots": "save_dots",
    "full": "save_nothing",
}


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
    asked = "save_and_offload_only_these_names"
    saved, offloaded = names_which_can_be_saved, names_which_can_be_offloaded
    saved, offloaded = _names(asked, saved), _names(asked, offloaded)
    if in_both := saved & offloaded:
        raise WrongArgument(
            asked,
            f"{sorted(in_both)} are in both lists",
            "",
            "put each name into one list: saved or offloaded",
        )
    _names(asked, (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return NamePolicy(saved=saved, offloaded=offloaded, destination=where)


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> DotsPolicy:
    """Offload matrix products without batch dimensions to `offload_dst`; recompute the rest."""
    _names("offload_dots_with_no_batch_dims", (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return DotsPolicy("offload_dots_with_no_batch_dims", batch=False, answer=where)


def save_from_both_policies(one: Policy, other: Policy) -> EitherPolicy:
    """Save what either policy saves."""
    one, other = check(one), check(other)
    for policy in (one, other):
        if isinstance(policy, Budget | Fit):
            raise WrongArgument(
                "save_from_both_policies",
                f"{policy!r} decides about a whole program, not about one value at a time",
                "",
                "use the budget alone, or two policies that decide about one value at a time",
            )
    return EitherPolicy(one, other)


def _names(asked: str, names: Any) -> frozenset[str]:
    """Check that `names` is a sequence of strings, and not one string; return them as a set."""
    is_list = not isinstance(names, str) and isinstance(names, Iterable)
    invalid = [n for n in names if not isinstance(n, str)] if is_list else [names]
    if invalid:
        raise WrongArgument(
            asked, f"{invalid[0]!r} is not a name of a value", "", "give each name as a string"
        )
    return frozenset(names)


def policy_name(policy: Any) -> str:
    """The name of a policy."""
    return getattr(policy, "__name__", repr(policy))


def as_code(policy: Any) -> str:
    """The policy as Python source, exact to the byte; "" if it has no short source.

    >>> from xform.policies import as_code, budget, save_dots
    >>> as_code(save_dots), as_code(budget("1 kB", of="saved"))
    ('xform.policies.save_dots', "xform.policies.budget(1000, of='saved')")
    """
    if regions_of(policy) == "open":
        inner = as_code(dataclasses.replace(policy, regions="marked"))
        return inner and f"xform.policies.open_regions({inner})"
    if isinstance(policy, Budget):
        return f"xform.policies.budget({policy.bytes}{policy.options})"
    names = (name for name, known in NAMED.items() if policy == known)
    return next((f"xform.policies.{n}" for n in names if n != "auto"), "")


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
        f"policy={policy_name(policy)}",
        f"it returned {answer!r}, of type {type(answer).__name__}, for {prim.name}",
        frame(eqn) if eqn else "",
        "call it first: it returns a policy" if callable(answer) else
        "return True (save), False (recompute) or a jax.ad_checkpoint.Offloadable",
    )  # fmt: skip


def parse(text: str, asked: str = "") -> Policy:
    """Return the policy that a text names, as on command lines; `asked` is the request, for errors.

    Raises:
      WrongArgument: no policy has this name; for an old name, the message has the new one.

    >>> from xform.policies import parse
    >>> parse("save_dots"), parse("saved:2GiB")
    (save_dots, budget('2.0 GiB', of='saved'))
    """
    value: Any = text
    if not isinstance(value, str):
        raise WrongArgument(
            asked or f"policies.parse({value!r})",
            f"it has type {type(value).__name__}, and must be text such as 'save_dots'",
            "",
            _suggest_budget(value) or "give the name of a policy, or use the policy as it is",
        )
    kind, colon, amount = text.partition(":")
    if kind in ("budget", "saved") and colon:
        return budget(amount, of="peak" if kind == "budget" else "saved")
    if text in NAMED:
        return NAMED[text]
    if kind == "open" and colon:
        return open_regions(parse(amount, asked))
    meant = _SIMILAR_NAMES.get(text)
    raise WrongArgument(
        asked or f"the policy {text!r}",
        "no policy has this name",
        "",
        f"use {meant}"
        if meant
        else f"use {', '.join(NAMED)}, budget:8GiB (of the peak) or "
        "saved:8GiB (of the values saved for the backward pass)",
    )


def check(policy: Any) -> Policy:
    """Return the policy (None: save everything; "auto": `fit()`), or raise if it is not one."""
    if policy is None or policy is jax.checkpoint_policies.everything_saveable:
        return save_everything
    if isinstance(policy, str) and policy == "auto":
        return NAMED[policy]
    if isinstance(policy, TaggedPolicy):
        return policy.planned
    if not callable(policy):
        raise WrongArgument(
            f"policy={policy!r}",
            "a policy is a callable of a primitive, its input types and parameters",
            "",
            _suggest_policy(policy) or "use one of xform.policies or jax.checkpoint_policies",
        )
    example = next((example for factory, example in _FACTORIES.items() if policy is factory), None)
    if example is not None or isinstance(policy, type):
        raise WrongArgument(
            f"policy={policy.__name__}",
            "it is a function that returns a policy, not a policy",
            "",
            f"call it, such as policy={policy.__name__}({'...' if example is None else example})",
        )
    return policy


def _suggest_policy(value: Any) -> str:
    """How to write the policy that a string or a number means; "" if it means none."""
    if not isinstance(value, str):
        return _suggest_budget(value)
    if (name := _SIMILAR_NAMES.get(value, value)) in NAMED:
        return f"use xform.policies.{name}"
    try:
        parse(value)
    except WrongArgument:
        return _suggest_budget(value)
    return f"use xform.policies.parse({value!r}), which reads policies as command lines do"


def _suggest_budget(value: Any) -> str:
    """How to write a number of bytes as a policy; "" for anything else."""
    try:
        byte_count(value)
    except (TypeError, ValueError):
        return ""
    return f"use xform.policies.budget({value!r})"


# Functions that return a policy, xform's and JAX's, with example arguments.
_FACTORIES: dict[Any, str] = {
    budget: "'6 GiB'",
    fit: "",
    save_only_these_names: "'name'",
    save_any_names_but_these: "'name'",
    save_from_both_policies: "one, other",
    offload_dots_with_no_batch_dims: "'device', 'pinned_host'",
    save_and_offload_only_these_names: "...",
    jax.checkpoint_policies.save_only_these_names: "'name'",
    jax.checkpoint_policies.save_any_names_but_these: "'name'",
    jax.checkpoint_policies.save_from_both_policies: "one, other",
    jax.checkpoint_policies.offload_dot_with_no_batch_dims: "'device', 'pinned_host'",
    jax.checkpoint_policies.save_and_offload_only_these_names: "...",
}
