"""The derivatives that a computation takes, and the plans that they follow when it is traced.

A training step, or a product with a Hessian, is traced once for each set of plans.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Generator, Mapping
from typing import Any

from xform.errors import OtherProgram
from xform.interpret.joint import analyze
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.plan.plan import Plan
from xform.planner.plan_program import plan_program
from xform.planner.planning import (
    current_planner,
    default_policy,
    use_default_policy,
    use_planner,
)
from xform.planner.problem import Problem
from xform.policies import Policy
from xform.program.fingerprint import fingerprint, text_of
from xform.program.naming import digest

_number = itertools.count()
# For each derivative that a step takes, by its key: the problem, and the plan that it followed.
Seen = dict[str, tuple[Problem, Candidate]]
# A plan for each derivative, by its key.
Candidates = Mapping[str, Candidate]


@dataclasses.dataclass(frozen=True, eq=False)
class Decisions:
    """The plans and the default policy of the derivatives that have no policy of their own.

    It is a policy itself: it marks the derivatives that the planner of `follow` decides about.

    Attributes:
      default: the policy of derivatives without a plan.
      plans: plans by the key of their derivative, see `derivative_key`.
      complete: whether a derivative without a plan is an error.
      retrace: whether JAX must trace the whole step again, with the jitted functions in it, so
        that all its derivatives are seen. The object is then equal to no other.
      has_budget: whether the step has a budget, which all its derivatives share.
    """

    default: Policy
    plans: Mapping[str, Plan]
    complete: bool = False
    retrace: bool = False
    has_budget: bool = False

    @functools.cached_property
    def key(self) -> str:
        """A text that only equal decisions share."""
        records = {k: plan.record for k, plan in self.plans.items()}
        unique = str(next(_number)) if self.retrace else ""
        return digest([text_of(self.default), text_of(records), str(self.complete), unique])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decisions) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        """Answer as the default policy does, for code that calls policies by JAX's protocol."""
        return self.default(prim, *avals, **params)


def derivative_key(problem: Problem) -> str:
    """A text that equal derivatives share: of equal programs, by the same inputs.

    It is that of the program with its derivative, which has the operations of users' rules, and not
    the rules. They are Python functions, and may close over a list that each trace makes longer.
    """
    joint = analyze(problem.marked, problem.active, problem.wanted)
    return digest([fingerprint(joint.program), text_of((problem.active, problem.wanted))])


@contextlib.contextmanager
def follow(decisions: Decisions, seen: Seen | None = None) -> Generator[None]:
    """A context for traces of a step: derivatives without a policy of their own follow `decisions`.

    It is `decide_by`, and makes `decisions` the default policy. The default policy is part of the
    keys of JAX's caches. So jitted functions inside the step are traced again under other plans.
    """
    with decide_by(decisions, seen), use_default_policy(decisions):
        yield


@contextlib.contextmanager
def decide_by(decisions: Decisions, seen: Seen | None = None) -> Generator[None]:
    """A context for traces: derivatives whose policy is `decisions` follow its plans.

    The derivatives of functions that are traced inside are added to `seen`, by their keys, in the
    order of the trace.

    Raises:
      OtherProgram: `decisions` is complete and has no plan for a derivative.
    """
    others = current_planner()

    def planner(problem: Problem, policy: Policy, compiler: Compiler | None) -> Candidate:
        if policy != decisions:
            return others(problem, policy, compiler)
        key = derivative_key(problem)
        plan = decisions.plans.get(key)
        if plan is None and decisions.complete:
            raise OtherProgram(
                f"xform.jit of a step under a StepPlan of {len(decisions.plans)} derivatives",
                "the step takes a derivative that the plan does not have",
                "",
                "make a new plan: give xform.jit a budget, and call the step",
            )
        chosen = plan_program(problem, decisions.default if plan is None else plan)
        if seen is not None:
            seen.setdefault(key, (problem, chosen))
        return chosen

    with use_planner(planner):
        yield


def in_step() -> bool:
    """Whether a step of `xform.jit` is traced or called here."""
    return isinstance(default_policy(), Decisions)


def in_step_with_budget() -> bool:
    """Whether the derivatives that are traced here share the budget of a step of `xform.jit`."""
    decisions = default_policy()
    return isinstance(decisions, Decisions) and decisions.has_budget
