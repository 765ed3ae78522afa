"""A budget of the peak, held against the compiler.

The simulation says which plan to compile; what the compiler says of that one scales the simulation
of those like it. What it said is kept in the process, which saves time and changes no plan: a
search goes by what it asked itself, as if it were the first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable

from xform.fingerprint import fingerprint, said
from xform.interpret.joint import Joint, Plan
from xform.naming import digest
from xform.planner.budget import again_flops
from xform.planner.choice import choice_of
from xform.planner.nested import Whole, search
from xform.planner.peak import infeasible
from xform.planner.record import record
from xform.policies import Budget, min_cut
from xform.recent import Recent
from xform.text import human_bytes
from xform.transforms.inspect import At

# How many programs are compiled, at most, to find a plan for a budget.
_COMPILES = 3
# How much of the scaled simulation has to fit: at first, for a plan with less work where one is
# found already, and after one that was over the budget.
_NEAR, _BOLD, _SAFE = 0.97, 0.92, 1.05
# A plan that is predicted to be over the budget by less than this factor is compiled all the same,
# before the budget is refused.
_OFF = 1.15


@dataclasses.dataclass(frozen=True)
class _Said:
    """What the compiler said of a plan: of which loops, and of how many bytes by simulation.

    Of a plan that it refused, without a word of the size, `bytes` are infinite.
    """

    as_written: bool
    predicted: int
    bytes: float


# Bytes of compiled plans, by program and plan.
_remembered: Recent[Hashable, dict[str, float]] = Recent(64)


class Compiler:
    """What the compiler says of plans of one program.

    Args:
      as_written: the program, with its loops as they are.
      peak: bytes of a plan by the simulation.
      measure: bytes of a plan by the compiler, which is run for it; None if it does not say them.
      decides: what a plan's bytes depend on besides the plan: the backend, what is donated.

    Attributes:
      compiles: how many programs were compiled; others had been, in this process.
    """

    def __init__(self, as_written: Joint, peak: Callable[[Plan], int],
                 measure: Callable[[Whole], int | None], *decides: Hashable) -> None:  # fmt: skip
        self.peak, self._measure, self._joint = peak, measure, as_written
        program = fingerprint(as_written.program), as_written.active, as_written.seconds
        key = (*program, *decides)
        _remembered[key] = self._answers = _remembered.get(key, {})
        self._said: dict[str, _Said] = {}
        self.compiles = 0

    @property
    def asked(self) -> int:
        """Of how many plans was asked."""
        return len(self._said)

    def bytes(self, whole: Whole) -> float:
        """Bytes of a plan's program, compiled; infinite if the compiler refuses it without them."""
        how, key = whole.how, _key(whole.how)
        if key not in self._answers:
            said = self._measure(whole)
            self._answers[key] = math.inf if said is None else said
            self.compiles += 1
        size = self._answers[key]
        self._said[key] = _Said(how.joint is self._joint, self.peak(how), size)
        return size

    def known(self, how: Plan) -> float | None:
        """The bytes of a plan of which was asked."""
        said = self._said.get(_key(how)) if self._said else None
        return said and said.bytes

    def scaled(self, how: Plan) -> float:
        """Bytes by the simulation, as far off as for the plan like it that was compiled."""
        size, like = self.peak(how), [s for s in self._said.values() if s.bytes < math.inf]
        like = [s for s in like if s.as_written == (how.joint is self._joint)] or like
        near = min(like, key=lambda s: abs(s.predicted - size), default=None)
        return size * near.bytes / max(near.predicted, 1) if near else size


def within(at: At, budget: Budget, compiler: Compiler, hidden: bool) -> Whole:
    """The plan that the compiler puts within the budget, or `BudgetInfeasible`.

    One with less work is tried where the compiler leaves room. `hidden` says that arguments are
    sharded in ways that the simulation cannot see: the default is then compiled to scale it.
    """
    default = whole = at.planned(min_cut)
    likely = hidden or compiler.peak(whole.how) < _OFF * budget.bytes
    if likely and compiler.bytes(whole) <= budget.bytes:
        return whole
    part = _NEAR

    def expected(how: Plan) -> float:
        said = compiler.known(how)
        return part * compiler.scaled(how) if said is None else said

    found: Whole | None = None
    tried: list[Whole] = []
    while True:
        whole = search(*at.ends, budget, expected)
        known, size = compiler.known(whole.how), expected(whole.how)
        if found and (again_flops(whole.how) >= again_flops(found.how) or size > budget.bytes):
            return found
        if known is not None and known <= budget.bytes:
            return whole
        if known is not None or size > _OFF * budget.bytes or compiler.asked == _COMPILES:
            break
        tried.append(whole)
        if compiler.bytes(whole) <= budget.bytes:
            found, part = whole, _BOLD
        else:
            part = _SAFE
    if found:
        return found
    # The floor does not depend on the budget: two plans are compiled for it, whatever was tried.
    floor = search(*at.ends, dataclasses.replace(budget, bytes=0), compiler.peak)
    least = min((floor, default, *tried), key=compiler.bytes)
    size, simulated = compiler.bytes(least), compiler.peak(floor.how)
    if size <= budget.bytes:
        return least
    if size == math.inf:
        raise infeasible(budget, floor.how, simulated, "simulated; the compiler refuses it")
    by = f"compiled; {human_bytes(simulated)} simulated"
    raise infeasible(budget, least.how, int(size), by)


def _key(how: Plan) -> str:
    """The same for equal plans of equal programs."""
    if "key" not in how.cache:
        how.cache["key"] = digest([said(record(choice_of(how), how.joint, {}))])
    return how.cache["key"]
