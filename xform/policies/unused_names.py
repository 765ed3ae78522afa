"""Warn of names in a policy that no value of a program has, such as a misspelt one."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any

from xform._jax import JaxprEqn, jaxprs_of, name_p
from xform.policies.per_value import TAG, EitherPolicy, NamePolicy
from xform.program.ir import Program, program
from xform.program.source import frame, user_stacklevel
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
    known = {str(e.params["name"]): frame(e) for e in reversed(equations) if e.primitive is name_p}
    asked = [(policy, f"the policy of {name}", "")]
    for eqn in equations:
        if (own := eqn.params.get("policy")) is not None:
            asked.append((own, "the policy of a remat region", frame(eqn)))
    for own, whose, where in dict.fromkeys((p, w, line) for p, w, line in asked if _hashable(p)):
        unused = sorted(names_in(own) - known.keys())
        if not unused:
            continue
        place = f" at {shorten_place(where)}" if where else ""
        plural = "s" * (len(unused) > 1)
        warnings.warn(f"{whose}{place} has the name{plural} {', '.join(map(repr, unused))}, which "
                      f"no value has. {_listed(known)}", stacklevel=user_stacklevel())  # fmt: skip


def _listed(known: dict[str, str]) -> str:
    """Return a sentence with the names of a program and their lines."""
    if not known:
        return "No value has a name: give names by jax.ad_checkpoint.checkpoint_name"
    texts = [f"{n!r} ({shorten_place(line)})" for n, line in sorted(known.items())]
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


def _hashable(policy: Any) -> bool:
    """Return whether a policy can be a key."""
    try:
        hash(policy)
    except TypeError:
        return False
    return True
