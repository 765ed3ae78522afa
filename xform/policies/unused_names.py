"""Warn of names in a policy that no value of a program has, such as a misspelt one."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from xform._jax import JaxprEqn, jaxprs_of
from xform.policies.per_value import TAG, EitherPolicy, NamePolicy
from xform.program.ir import Program, program
from xform.program.source import frame, user_stacklevel
from xform.registry.table import label
from xform.terminal.text import shorten_place

# So many names of the program are listed.
_MOST_NAMES = 8


def warn_of_unused_names(policy: Any, prog: Program, name: str) -> None:
    """Warn if a policy, or one of a remat region of the program, has names that no value has.

    Args:
      policy: the policy of the derivative.
      prog: the program that is differentiated.
      name: its name, for the warning.
    """
    equations = list(_all_equations(prog.equations))
    named = [(given, e) for e in equations if (given := label(e.primitive, e.params))]
    known = {given for given, _ in named}
    texts: dict[str, None] = {}  # equal regions are one text
    for own, region in ((policy, None), *((e.params.get("policy"), e) for e in equations)):
        if unused := sorted(names_in(own) - known):
            where = "" if region is None else frame(region)
            whose = name if region is None else "a remat region"
            place = f" at {shorten_place(where)}" if where else ""
            plural = "s" * (len(unused) > 1)
            texts[f"the policy of {whose}{place} has the name{plural} "
                  f"{', '.join(map(repr, unused))}, which no value has"] = None  # fmt: skip
    for text in texts:
        warnings.warn(f"{text}. {_listed(named)}", stacklevel=user_stacklevel())


def _listed(named: Sequence[tuple[str, JaxprEqn]]) -> str:
    """Return a sentence with the names of a program and their lines."""
    if not named:
        return "No value has a name: give names by jax.ad_checkpoint.checkpoint_name"
    places = {name: shorten_place(frame(e)) for name, e in reversed(named)}
    texts = [f"{n!r} ({place})" for n, place in sorted(places.items())]
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return f"The names are {', '.join(texts[:_MOST_NAMES])}{more}"


def _all_equations(equations: Any) -> Iterator[JaxprEqn]:
    """Yield the equations of a program and of the programs in it."""
    for eqn in equations:
        yield eqn
        for jaxpr in jaxprs_of(eqn):
            yield from _all_equations(program(jaxpr).equations)


def names_in(policy: Any) -> frozenset[str]:
    """Return the names that a policy of xform or of JAX decides by."""
    match policy:
        case NamePolicy():
            return policy.saved | policy.offloaded | (policy.excluded or frozenset())
        case EitherPolicy():
            return names_in(policy.one) | names_in(policy.other)
        case types.FunctionType() if policy.__module__.startswith("jax."):
            parts = inspect.getclosurevars(policy).nonlocals.values()
        case _ if type(policy).__module__.startswith("jax."):
            parts = getattr(policy, "__dict__", {}).values()
        case _:
            return frozenset()  # a user's function may hold other texts
    found: set[str] = set()
    for part in parts:
        if isinstance(part, frozenset | set | tuple | list):
            found |= {x for x in part if isinstance(x, str) and not x.startswith(TAG)}
        elif callable(part):
            found |= names_in(part)
    return frozenset(found)
