"""Choose the plans of a step for a byte budget; the compiler of the target decides what fits."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Hashable, Mapping

from xform.errors import BudgetInfeasible
from xform.memory.report import MemoryReport
from xform.memory.targets import Target
from xform.planner.choice import Candidates, Choice
from xform.planner.describe import plan_of_candidate
from xform.planner.measure import Measure
from xform.planner.plan.plan import Plan
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.search import search
from xform.policies import min_cut, policy_name
from xform.policies.budgets import Budget
from xform.program.source import user_stacklevel
from xform.steps.gathers import gathers_more
from xform.steps.processes import agreed
from xform.steps.program import Args, CompiledStep, Kwargs, StepProgram
from xform.steps.step_plan import StepPlan
from xform.terminal import progress_line
from xform.terminal.text import human_bytes, human_seconds
from xform.transforms.recorded import Chosen, Recorded

_LISTED = 3


class _OutOfTime(Exception):
    """The time limit of planning has passed."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Tried:
    """A program that the search compiled: the step under some plans.

    `size` is the compiler's peak on a device; infinite if the compiler refused the program without
    a size. `autotuned` says whether the program was compiled as it will run, see
    `StepProgram.autotunes`.
    """

    choice: Choice
    chosen: Chosen
    compiled: CompiledStep
    size: float
    autotuned: bool


@dataclasses.dataclass(eq=False)
class StepSearch:
    """A search for the plans of one step at one set of types.

    Attributes:
      program: the step.
      args, kwargs: the arguments, as arrays or types.
      budget: the bytes of the step on each device; at most those that the device has.
      recorded: the traced step.
      problems: its derivatives, by key, see `with_outside_bytes`.
      time_limit: seconds after which no further program is compiled; None for no limit.
      start: when planning began, as `time.perf_counter` counts.
    """

    program: StepProgram
    args: Args
    kwargs: Kwargs
    budget: Budget
    recorded: Recorded
    problems: Mapping[str, Problem]
    time_limit: float | None = None
    start: float = dataclasses.field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.asked = self.budget
        self.budget = _within_capacity(self.budget, self.program.target)
        # The programs that were compiled, by their plans.
        self.tried: dict[Hashable, _Tried] = {}
        # The time of each compilation, without programs that JAX had compiled before.
        self.compile_seconds: list[float] = []

    def run(self) -> tuple[StepPlan, Chosen, CompiledStep]:
        """Return the plans, the step under them, and the compiled step.

        Raises:
          BudgetInfeasible: the compiled step exceeds the budget under all plans that were tried.
        """
        default = Choice(self.problems, _default_plans(self.problems, self.budget))
        with progress_line.show(f"planning {self._name}"):
            memory = self.budget
            self.budget = self._try(default).compiled.compilation.limit(memory)
            while True:
                try:
                    best = self._search(default)
                except _OutOfTime:
                    best = self._best_known()
                except BudgetInfeasible as error:
                    if self.budget is memory:
                        raise self._explained(error) from None
                    # The device may have the memory for it, but XLA then recomputes by itself.
                    self.budget = memory
                    continue
                if best.autotuned:
                    return self._finish(best)
                # The program that will run may take a little more. If it exceeds the budget, the
                # search goes on with what is known now.
                best = self._autotune(best)
                if best.size <= self.budget.bytes:
                    return self._finish(best)

    @property
    def _name(self) -> str:
        return self.program.jitted.__name__

    def _search(self, default: Choice) -> _Tried:
        """The step under the plans that recompute least within the budget."""
        if self.problems:
            measure = Measure(self._compiled_bytes)
            chosen = search(self.problems, self.budget, default.candidates, measure)
            return self._try(Choice(self.problems, chosen))
        tried = self._try(default)
        if tried.size <= self.budget.bytes:
            return tried
        raise BudgetInfeasible(
            f"policy={self.budget!r} of {self._name}",
            f"the compiled step takes {human_bytes(int(tried.size))}, and it takes no derivative "
            "without a policy of its own, so there is nothing to plan",
            "",
            "raise the budget, donate arguments, make the batch smaller, or differentiate with "
            "xform.grad (xform.install() replaces jax.grad)",
            int(tried.size),
        )

    def _compiled_bytes(self, choice: Choice) -> float:
        """Bytes of the step that is compiled under some plans; infinite if they are unknown.

        Without `slices`, a refusal names the bytes of a program in slices. That program is compiled
        only if there is time left, and it is never chosen.
        """
        if choice.in_slices and not self.budget.slices:
            return math.inf if self._is_late() else self._compile(choice, False).size
        if choice.key not in self.tried and self._is_late():
            raise _OutOfTime
        return self._try(choice).size

    def _try(self, choice: Choice) -> _Tried:
        """The step under some plans, compiled unless it was before."""
        if choice.key not in self.tried:
            self.tried[choice.key] = self._compile(choice, autotune=False)
        return self.tried[choice.key]

    def _is_late(self) -> bool:
        """Whether the time limit has passed and a program was compiled."""
        spent = time.perf_counter() - self.start
        late = self.time_limit is not None and spent > self.time_limit and bool(self.tried)
        return bool(agreed(late))

    def _autotune(self, tried: _Tried) -> _Tried:
        """Compile a program as it will run; its size replaces the one that was known.

        If the device has too little free memory for autotuning, the size stays. JAX then raises its
        own error when the step is called.
        """
        tuned = self._compile(tried.choice, autotune=True)
        if tuned.size == math.inf:
            tuned = dataclasses.replace(tried, autotuned=True)
        self.tried[tried.choice.key] = tuned
        return tuned

    def _compile(self, choice: Choice, autotune: bool) -> _Tried:
        """Compile the step under some plans."""
        chosen = Chosen(self.recorded, choice.candidates)
        compiled = self.program.compile(chosen, self.args, self.kwargs, autotune)
        if not compiled.compilation.known:
            self.compile_seconds.append(compiled.compilation.compile_seconds)
        size = agreed(compiled.compilation.counted_bytes)
        if choice.in_slices and self._gathers_more(compiled.compilation):
            size = math.inf
        return _Tried(choice, chosen, compiled, size, autotune or not self.program.autotunes)

    def _gathers_more(self, compiled: MemoryReport) -> bool:
        """Whether a step in slices gathers values that no step without slices gathers."""
        whole = [tried for tried in self.tried.values() if not tried.choice.in_slices]
        gathers = (gathers_more(compiled, tried.compiled.compilation) for tried in whole)
        return bool(whole) and all(gathers)

    def _best_known(self) -> _Tried:
        """The program to take when time is over: the least work that fits, else the smallest."""
        every = list(self.tried.values())
        fitting = [tried for tried in every if tried.size <= self.budget.bytes]
        best = (
            min(fitting, key=lambda tried: tried.choice.work)
            if fitting
            else min(every, key=lambda tried: tried.size)
        )
        takes = f"takes {human_bytes(int(best.size))}" if best.size < math.inf else "is refused"
        rest = (
            "A plan with less recomputation may exist."
            if fitting
            else f"The smallest program so far {takes}, which exceeds the budget. Raise time_limit "
            "to search on."
        )
        warnings.warn(
            f"planning {self._name} for {self.budget!r} stopped at its time limit of "
            f"{human_seconds(self.time_limit or 0)}, after {len(every)} compilations. {rest}",
            stacklevel=user_stacklevel(),
        )
        return best

    def _finish(self, best: _Tried) -> tuple[StepPlan, Chosen, CompiledStep]:
        """The result of the search, with the compiler's bytes and the times."""
        compiles, compiling = len(self.compile_seconds), sum(self.compile_seconds)
        total = None if best.size == math.inf else int(best.size)
        policy = policy_name(self.budget)
        made = plans_of(
            best.choice.candidates, self.problems, self._name, policy, self.program.target
        )
        plans = {
            k: dataclasses.replace(plan, compiled_bytes=total, compiles=compiles)
            for k, plan in made.items()
        }
        plan = StepPlan(
            self._name,
            policy,
            self.program.target.name,
            plans,
            total,
            compiles,
            time.perf_counter() - self.start - compiling,
            compiling,
        )
        return plan, best.chosen, best.compiled

    def _explained(self, error: BudgetInfeasible) -> BudgetInfeasible:
        """The error with the budget of the user, and the largest buffers of the smallest step.

        The budget of the search may be the memory of the device, which the error then names.
        """
        request, problem = error.request.replace(repr(self.budget), repr(self.asked)), error.problem
        if buffers := self._largest_buffers():
            problem += f". The largest buffers of that program: {buffers}"
        if self.budget is not self.asked:
            problem += f". On this device a program may take {human_bytes(self.budget.bytes)}"
        return BudgetInfeasible(request, problem, error.where, error.remedy, error.floor_bytes)

    def _largest_buffers(self) -> str:
        """Describe the largest buffers of the smallest program that was compiled."""
        if not self.tried:
            return ""
        smallest = min(self.tried.values(), key=lambda tried: tried.size)
        compiled = smallest.compiled.compilation
        if compiled.module is None:
            return ""
        rows = [row for row in compiled.peak if row.type][:_LISTED]
        texts = (
            f"{human_bytes(r.bytes)} {r.type} {r.maker} ({r.category}) at {r.where}" for r in rows
        )
        return "; ".join(texts)


def search_without_compiler(
    problems: Mapping[str, Problem], budget: Budget, target: Target
) -> Candidates:
    """Return the plans of a step that recompute least within a budget, by simulation alone.

    Raises:
      BudgetInfeasible: the simulated peak exceeds the budget under all plans that were tried.
    """
    budget = _within_capacity(budget, target)
    return search(problems, budget, _default_plans(problems, budget)) if problems else {}


def _default_plans(problems: Mapping[str, Problem], budget: Budget) -> Candidates:
    """Return the plans of the default policy, which keeps or dissolves remat regions as asked."""
    policy = dataclasses.replace(min_cut, regions=budget.regions)
    return {k: plan_program(problem, policy) for k, problem in problems.items()}


def _within_capacity(budget: Budget, target: Target) -> Budget:
    """Return the budget, or the memory of the device if that is smaller.

    The compiler refuses a larger program, and yet says how many bytes it needs.
    """
    capacity = target.device.capacity_bytes
    if capacity is None or capacity >= budget.bytes:
        return budget
    return dataclasses.replace(budget, bytes=capacity)


def plans_of(
    candidates: Candidates, problems: Mapping[str, Problem], step: str, policy: str, target: Target
) -> dict[str, Plan]:
    """A `Plan` of each derivative in a step; `policy` is the name of the policy that chose them."""
    return {
        k: plan_of_candidate(
            f"a derivative in {step}", "the whole step", problems[k], policy, c, target.name
        )
        for k, c in candidates.items()
    }
