"""Policies as text: `parse` reads a policy from text, and `policy_name` writes it as text.

Every function, command and setting that takes a policy calls `parse`, so all of them understand the
same texts.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

import jax

from xform.errors import WrongArgument
from xform.policies.budgets import Budget, Fit, budget, bytes_of, fit
from xform.policies.min_cut import MinCut, min_cut
from xform.policies.per_value import (
    NamePolicy,
    Policy,
    TaggedPolicy,
    offload_dots_with_no_batch_dims,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_dots,
    save_dots_with_no_batch_dims,
    save_everything,
    save_nothing,
    save_only_these_names,
)
from xform.policies.regions import open_regions_of, regions_of, slices_of
from xform.terminal.text import byte_count

# The policies without arguments, by name.
NAMED: dict[str, Policy] = {
    "min_cut": min_cut,
    "save_everything": save_everything,
    "save_dots": save_dots,
    "save_dots_with_no_batch_dims": save_dots_with_no_batch_dims,
    "save_nothing": save_nothing,
    "auto": fit(),
}


def _budget(of: str) -> Callable[[str, str], Policy]:
    """Return a function that reads a budget of the peak or of the saved values."""

    def read(amount: str, request: str) -> Policy:
        bytes_of(amount, request)  # an error names the request
        return budget(amount, of=of)

    return read


def _by_names(make: Callable[..., Policy]) -> Callable[[str, str], Policy]:
    """Return a function that reads names joined by "+" and passes them to `make`."""

    def read(text: str, request: str) -> Policy:
        names = text.split("+")
        if not all(names):
            raise WrongArgument(
                request, "a name of a value is empty", "", f"write {make.__name__}:a+b"
            )
        return make(*names)

    return read


# For each prefix, a function that reads the text after "prefix:". It takes that text and the first
# line of an error, and returns a policy. `planner/plan/plan.py` adds "plan".
PREFIXES: dict[str, Callable[[str, str], Policy]] = {
    "budget": _budget("peak"),
    "saved": _budget("saved"),
    "slices": lambda text, request: slices_of(parse(text, request), request),
    "open": lambda text, request: open_regions_of(parse(text, request), request),
    "save_only_these_names": _by_names(save_only_these_names),
    "save_any_names_but_these": _by_names(save_any_names_but_these),
}
# The texts that `parse` understands, for messages and for the help of commands.
TEXTS = (
    f"{', '.join(name for name in NAMED if name != 'auto')}, auto (fits the device's memory), "
    "budget:6GiB (limit on the peak memory), saved:6GiB (limit on the saved values), "
    "save_only_these_names:a+b, save_any_names_but_these:a+b, plan:FILE (a saved xform.Plan); "
    "with open:, such as open:min_cut, the policy also decides inside the program's remat regions; "
    "with slices:, such as slices:budget:6GiB, regions of the program may run in slices"
)
# Texts that `parse` does not read, but users may try. Each has the text that is probably meant.
_SIMILAR_TEXTS = {
    "default": "min_cut",
    "everything": "save_everything",
    "dots": "save_dots",
    "full": "save_nothing",
    "nothing": "save_nothing",
    "fit": "auto",
    "everything_saveable": "save_everything",
    "dots_saveable": "save_dots",
    "checkpoint_dots": "save_dots",
    "dots_with_no_batch_dims_saveable": "save_dots_with_no_batch_dims",
    "checkpoint_dots_with_no_batch_dims": "save_dots_with_no_batch_dims",
    "nothing_saveable": "save_nothing",
    "budget": "budget:6GiB",
    "saved": "saved:6GiB",
    "open": "open:min_cut",
    "open_regions": "open:min_cut",
    "plan": "plan:FILE",
    "save_only_these_names": "save_only_these_names:a+b",
    "save_any_names_but_these": "save_any_names_but_these:a+b",
}


def parse(policy: Any, request: str = "") -> Any:
    """Return the policy that a text names; a policy and None are returned unchanged.

    All functions, commands and settings of xform that take a policy read its text in this way, so
    `xform.grad(f, policy="budget:6GiB")` needs no call of `parse`.

    Args:
      policy: the text of a policy, such as `"save_dots"`, `"budget:6GiB"`, `"auto"` or
        `"open:min_cut"`; or a policy of `xform.policies` or `jax.checkpoint_policies`.
      request: the first line of an error, such as "--policy dots"; by default `policy=...`.

    Returns:
      A policy, or None for None: each function has its own default.

    Raises:
      WrongArgument: there is no such policy. The message lists the texts of all policies, and the
        one that was probably meant.

    >>> from xform.policies import parse
    >>> parse("save_dots"), parse("saved:2GiB")
    (save_dots, budget('2GiB', of='saved'))
    """
    if isinstance(policy, str):
        return _parse_text(policy, request or f"policy={policy!r}")
    if policy is jax.checkpoint_policies.everything_saveable:
        return save_everything
    if isinstance(policy, TaggedPolicy):
        return policy.planned
    if policy is None or (callable(policy) and not _makes_policies(policy)):
        return policy
    if not callable(policy):
        raise WrongArgument(
            request or f"policy={policy!r}",
            f"a value of type {type(policy).__name__} is not a policy",
            "",
            f"{_suggestion(policy)}use a policy of xform.policies, or one of these texts: {TEXTS}",
        )
    example = FACTORIES.get(policy, "...")
    raise WrongArgument(
        f"policy={policy.__name__}",
        "it is a function that returns a policy, not a policy",
        "",
        f"call it, such as policy={policy.__name__}({example})",
    )


def _parse_text(text: str, request: str) -> Policy:
    """Return the policy that a text names, or raise `WrongArgument`."""
    if text in NAMED:
        return NAMED[text]
    prefix, colon, rest = text.partition(":")
    if colon and prefix in PREFIXES:
        return PREFIXES[prefix](rest, request)
    if text in {make.__name__ for make in FACTORIES} - _SIMILAR_TEXTS.keys():
        raise WrongArgument(
            request,
            f"the policy {text} needs arguments, which cannot be written in this text",
            "",
            f"call xform.policies.{text}(...) in Python, and pass the policy that it returns",
        )
    raise WrongArgument(
        request, f"no policy has the name {text!r}", "", f"{_suggestion(text)}use one of {TEXTS}"
    )


def _suggestion(value: Any) -> str:
    """Return "did you mean ...? Or " with the policy that a text or number may mean; else ""."""
    meant = _SIMILAR_TEXTS.get(value) if isinstance(value, str) else None
    if meant is None:
        try:
            byte_count(value)
            meant = f"budget:{value}"
        except (TypeError, ValueError):
            prefix, colon, rest = str(value).partition(":")
            typed = difflib.get_close_matches(prefix, PREFIXES, 1)
            if colon and typed:
                return f"did you mean {f'{typed[0]}:{rest}'!r}? Or "
            known = [*NAMED, *PREFIXES, *_SIMILAR_TEXTS]
            close = difflib.get_close_matches(value, known, 1) if isinstance(value, str) else []
            meant = next((_SIMILAR_TEXTS.get(name, name) for name in close), "")
    return f"did you mean {meant!r}? Or " if meant else ""


def policy_name(policy: Any) -> str:
    """Return the text from which `parse` makes this policy.

    For a policy that has no such text, return its name or Python source.

    >>> from xform.policies import budget, policy_name, save_dots, open_regions
    >>> policy_name(save_dots), policy_name(open_regions(budget("6GiB")))
    ('save_dots', 'open:budget:6GiB')
    >>> policy_name(budget("6GiB", batch_size=8))
    "budget('6GiB', batch_size=8)"
    """
    if regions_of(policy) == "open" and isinstance(policy, MinCut | Budget | Fit):
        return f"open:{policy_name(dataclasses.replace(policy, regions='marked'))}"
    if isinstance(policy, Budget) and policy.slices:
        text = policy_name(dataclasses.replace(policy, slices=False))
        return f"slices:{text}" if text.startswith("budget:") else repr(policy)
    if isinstance(policy, Budget) and policy.options in ("", ", of='saved'") and not policy.device:
        # Without a space, a text needs no quotes on a command line.
        amount = policy.amount if policy.typed else policy.amount.replace(" ", "")
        return f"{'budget' if policy.of == 'peak' else 'saved'}:{amount}"
    if isinstance(policy, NamePolicy) and not policy.offloaded:
        function = save_only_these_names if policy.excluded is None else save_any_names_but_these
        names = sorted(policy.saved if policy.excluded is None else policy.excluded)
        if names and not any("+" in name for name in names):
            return f"{function.__name__}:{'+'.join(names)}"
    return getattr(policy, "__name__", repr(policy))


def as_code(policy: Any) -> str:
    """Return the policy as Python source, exact to the byte; "" if it has no short source.

    >>> from xform.policies import as_code, budget, save_dots
    >>> as_code(save_dots), as_code(budget("1 kB", of="saved"))
    ('xform.policies.save_dots', "xform.policies.budget('1 kB', of='saved')")
    """
    if regions_of(policy) == "open" and isinstance(policy, MinCut | Budget | Fit):
        inner = as_code(dataclasses.replace(policy, regions="marked"))
        return inner and f"xform.policies.open_regions({inner})"
    if isinstance(policy, Budget):
        return f"xform.policies.budget({policy.exact_amount!r}{policy.options})"
    names = (name for name, known in NAMED.items() if policy == known)
    return next((f"xform.policies.{n}" for n in names if n != "auto"), "")


def _makes_policies(policy: Callable[..., Any]) -> bool:
    """Return whether a callable is a function or a class that returns policies."""
    return isinstance(policy, type) or any(policy is make for make in FACTORIES)


# Functions that return a policy, xform's and JAX's, with example arguments. `combined.py` adds two.
FACTORIES: dict[Any, str] = {
    budget: "'6 GiB'",
    fit: "",
    save_only_these_names: "'name'",
    save_any_names_but_these: "'name'",
    offload_dots_with_no_batch_dims: "'device', 'pinned_host'",
    save_and_offload_only_these_names: "...",
    jax.checkpoint_policies.save_only_these_names: "'name'",
    jax.checkpoint_policies.save_any_names_but_these: "'name'",
    jax.checkpoint_policies.save_from_both_policies: "policy_1, policy_2",
    jax.checkpoint_policies.offload_dot_with_no_batch_dims: "'device', 'pinned_host'",
    jax.checkpoint_policies.save_and_offload_only_these_names: "...",
}
