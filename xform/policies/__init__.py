"""Remat policies: which values a backward pass keeps.

A policy answers, for one equation, whether its outputs are saved. Those here are JAX's, by xform's
names; each is also a callable of JAX's protocol (`policy(primitive, *avals, **params)`), so that
`jax.checkpoint` takes them, and anything that `jax.checkpoint` takes is taken by xform.

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
from xform.policies.regions import open_regions, opening
from xform.program.source import frame
from xform.terminal.text import byte_count

__all__ = [
    "budget",
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
# What the names of `Tagged` start with.
TAG = "xform saves "
Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Constantly:
    """One answer for every value."""

    name: str
    answer: bool

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        return self.answer

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Dots:
    """Matrix products (and convolutions, unless `batch` is False) are saved or offloaded."""

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
class Tagged:
    """A policy that decides for a whole region, and the names that it gave to what it saves.

    xform's transforms plan by the first; JAX's save the names.
    """

    planned: MinCut | Budget
    names: frozenset[str]

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Whether a value bears one of the names."""
        return prim is name_p and params["name"] in self.names

    def __repr__(self) -> str:
        return repr(self.planned)


@dataclasses.dataclass(frozen=True)
class Names:
    """Values named by `checkpoint_name`: `saved`, `offloaded`, or all but the `excluded`."""

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
class Either:
    """Saved if one of two policies saves it."""

    one: Policy
    other: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        answers = [_answer(p, prim, avals, params) for p in (self.one, self.other)]
        if not all(isinstance(a, bool) for a in answers):
            raise WrongArgument(
                "save_from_both_policies",
                "one of the two policies offloads values; 'either' has no meaning for that",
                "",
                "write one callable policy that returns True, False or an Offloadable",
            )
        return any(answers)


save_everything = Constantly("save_everything", True)
"""Everything that the backward pass reads is saved."""
save_nothing = Constantly("save_nothing", False)
"""Nothing but the arguments is saved; on a whole function, loops keep their carries."""
save_dots = Dots("save_dots")
"""Results of matrix products and convolutions are saved."""
save_dots_with_no_batch_dims = Dots("save_dots_with_no_batch_dims", batch=False)
"""Results of matrix products without batch dimensions are saved."""

# Those that need no arguments, by their names: so a command line calls them too.
NAMED: dict[str, Policy] = {
    "min_cut": min_cut,
    "save_everything": save_everything,
    "save_dots": save_dots,
    "save_dots_with_no_batch_dims": save_dots_with_no_batch_dims,
    "save_nothing": save_nothing,
    "auto": fit(),
}
# What command lines called some of them before.
_BEFORE = {
    "default": "min_cut",
    "everything": "save_everything",
    "dots": "save_dots",
    "full": "save_nothing",
}


def save_only_these_names(*names: str) -> Names:
    """Save the values that `jax.ad_checkpoint.checkpoint_name` gave one of `names`."""
    return Names(saved=_names("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> Names:
    """Save every named value whose name is not one of `names`."""
    return Names(excluded=_names("save_any_names_but_these", names))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_src: str,
    offload_dst: str,
) -> Names:
    """Save some names on the device and move others to `offload_dst` until they are needed.

    Memories are JAX's kinds, such as "device" and "pinned_host". XLA:CPU has one memory only.
    """
    asked = "save_and_offload_only_these_names"
    saved, offloaded = names_which_can_be_saved, names_which_can_be_offloaded
    saved, offloaded = _names(asked, saved), _names(asked, offloaded)
    if both := saved & offloaded:
        raise WrongArgument(
            asked,
            f"{sorted(both)} stand in both lists",
            "",
            "name each value once: saved or offloaded",
        )
    _names(asked, (offload_src, offload_dst))
    return Names(
        saved=saved,
        offloaded=offloaded,
        destination=Offloadable(src=offload_src, dst=offload_dst),
    )


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> Dots:
    """Move matrix products without batch dimensions to `offload_dst`; recompute the rest."""
    _names("offload_dots_with_no_batch_dims", (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return Dots("offload_dots_with_no_batch_dims", batch=False, answer=where)


def save_from_both_policies(one: Policy, other: Policy) -> Either:
    """Save what either policy saves."""
    one, other = check(one), check(other)
    for policy in (one, other):
        if isinstance(policy, Budget | Fit):
            raise WrongArgument(
                "save_from_both_policies",
                f"{policy!r} decides for a whole program, not for one value after the other",
                "",
                "give the budget alone, or two policies that answer for each value",
            )
    return Either(one, other)


def _names(asked: str, names: Any) -> frozenset[str]:
    """Names of values; a text alone, or a list among them, is not meant."""
    several = not isinstance(names, str) and isinstance(names, Iterable)
    wrong = [n for n in names if not isinstance(n, str)] if several else [names]
    if wrong:
        raise WrongArgument(
            asked, f"{wrong[0]!r} stands where names are meant", "", "give each name as a string"
        )
    return frozenset(names)


def said(policy: Any) -> str:
    """What a policy is called."""
    return getattr(policy, "__name__", repr(policy))


def as_code(policy: Any) -> str:
    """A policy as Python, exact to the byte; empty for one that Python has no short text for.

    >>> from xform.policies import as_code, budget, save_dots
    >>> as_code(save_dots), as_code(budget("1 kB", of="saved"))
    ('xform.policies.save_dots', "xform.policies.budget(1000, of='saved')")
    """
    if opening(policy) == "open":
        inside = as_code(dataclasses.replace(policy, regions="marked"))
        return inside and f"xform.policies.open_regions({inside})"
    if isinstance(policy, Budget):
        return f"xform.policies.budget({policy.bytes}{policy.options})"
    names = (name for name, known in NAMED.items() if policy == known)
    return next((f"xform.policies.{n}" for n in names if n != "auto"), "")


def ask(policy: Policy, eqn: JaxprEqn) -> Answer:
    """A policy's answer for one equation.

    Raises:
      WrongArgument: it is none of JAX's, which raises a TypeError there.
    """
    return _answer(policy, eqn.primitive, [v.aval for v in eqn.invars], eqn.params, eqn)


def _answer(policy: Policy, prim: Primitive, avals: Sequence[Any], params: Mapping[str, Any],
            eqn: JaxprEqn | None = None) -> Answer:  # fmt: skip
    answer = policy(prim, *avals, **params)
    if (known := policy_answer(answer)) is not None:
        return known
    raise WrongArgument(
        f"policy={said(policy)}",
        f"it answered {answer!r}, of type {type(answer).__name__}, for {prim.name}",
        frame(eqn) if eqn else "",
        "call it: what it returns is a policy" if callable(answer) else
        "answer True (save), False (recompute) or a jax.ad_checkpoint.Offloadable",
    )  # fmt: skip


def parse(text: str, asked: str = "") -> Policy:
    """The policy that a text names, as on command lines, for what was `asked`.

    Raises:
      WrongArgument: it names none; one that it named before is answered with the new name.

    >>> from xform.policies import parse
    >>> parse("save_dots"), parse("saved:2GiB")
    (save_dots, budget('2.0 GiB', of='saved'))
    """
    given: Any = text
    if not isinstance(given, str):
        raise WrongArgument(
            asked or f"policies.parse({given!r})",
            f"it has type {type(given).__name__}, and must be text such as 'save_dots'",
            "",
            _as_budget(given) or "give the name of a policy; a policy needs no parsing",
        )
    kind, colon, amount = text.partition(":")
    if kind in ("budget", "saved") and colon:
        return budget(amount, of="peak" if kind == "budget" else "saved")
    if text in NAMED:
        return NAMED[text]
    if kind == "open" and colon:
        return open_regions(parse(amount, asked))
    now = _BEFORE.get(text)
    raise WrongArgument(
        asked or f"the policy {text!r}",
        f"it is now called {now!r}" if now else "it is not known",
        "",
        f"give {now}"
        if now
        else f"give {', '.join(NAMED)}, budget:8GiB (of the peak) or "
        "saved:8GiB (of what waits for the backward pass)",
    )


def check(policy: Any) -> Policy:
    """The policy itself (None: save everything; "auto": `fit()`), or an error if it is none."""
    if policy is None or policy is jax.checkpoint_policies.everything_saveable:
        return save_everything
    if isinstance(policy, str) and policy == "auto":
        return NAMED[policy]
    if isinstance(policy, Tagged):
        return policy.planned
    if not callable(policy):
        raise WrongArgument(
            f"policy={policy!r}",
            "a policy is a callable of a primitive, its input types and parameters",
            "",
            _as_policy(policy) or "take one of xform.policies or jax.checkpoint_policies",
        )
    given = next((given for maker, given in _MAKERS.items() if policy is maker), None)
    if given is not None or isinstance(policy, type):
        raise WrongArgument(
            f"policy={policy.__name__}",
            "it makes policies, and is none",
            "",
            f"call it, such as policy={policy.__name__}({'...' if given is None else given})",
        )
    return policy


def _as_policy(given: Any) -> str:
    """How to write the policy that a text or a number stands for; empty if it stands for none."""
    if not isinstance(given, str):
        return _as_budget(given)
    if (now := _BEFORE.get(given, given)) in NAMED:
        return f"take xform.policies.{now}"
    try:
        parse(given)
    except WrongArgument:
        return _as_budget(given)
    return f"write xform.policies.parse({given!r}), which reads what command lines take"


def _as_budget(given: Any) -> str:
    """How to write a number of bytes as a policy; empty for anything else."""
    try:
        byte_count(given)
    except (TypeError, ValueError):
        return ""
    return f"write xform.policies.budget({given!r})"


# What makes a policy, xform's and JAX's, with what it is given.
_MAKERS: dict[Any, str] = {
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
