"""The planner that reverse mode calls: `plan_program`, or a function that replaces it.

A replacement usually calls the planner that it replaces, and observes the plans.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax

from xform.planner.candidate import Candidate
from xform.planner.measure import Measure
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.policies import Policy, min_cut

# Returns the plan of a derivative (`Problem`) under a policy. Without a `Measure`, which compiles
# plans, they are simulated.
Planner = Callable[[Problem, Policy, Measure | None], Candidate]

_PLANNER: contextvars.ContextVar[Planner] = contextvars.ContextVar("planner", default=plan_program)
# The policy that reverse mode uses if the user gives none. A trace depends on it, so it is part of
# the keys of JAX's caches.
_default: Any = jax.make_user_context(min_cut)


def current_planner() -> Planner:
    """Return the planner in use: `plan_program`, unless `use_planner` has replaced it."""
    return _PLANNER.get()


@contextmanager
def use_planner(planner: Planner) -> Generator[None]:
    """Make reverse mode call `planner` inside this context."""
    token = _PLANNER.set(planner)
    try:
        yield
    finally:
        _PLANNER.reset(token)


def default_policy() -> Policy:
    """Return the policy that reverse mode uses if the user gives none.

    It is `min_cut`, or the policy of `use_default_policy`.
    """
    return _default.value


def use_default_policy(policy: Policy) -> AbstractContextManager[None]:
    """Return a context manager: reverse mode inside it uses this policy if the user gives none."""
    return _default(policy)
