"""`StepPlan`: the plans of all derivatives that a step takes, with the bytes of the whole step."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from xform._jax import Primitive
from xform.errors import WrongArgument
from xform.memory.report import MemoryReport
from xform.planner.plan.plan import Plan, bound_text
from xform.planner.report.picture import draw_live_bytes
from xform.policies import min_cut
from xform.slices.decision import Slices
from xform.storage import results
from xform.terminal.notebook import Result
from xform.terminal.text import human_bytes, human_flops, planning_times, recomputed_flops


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepPlan(Result):
    """The plan of a step: one plan for each derivative that the step takes without `policy=`.

    `xform.plan` and `xform.jit` make it. It prints as the tables of its plans, and iterates over
    them. It can also be passed to `xform.jit` as the policy, for the same step and the same types.
    `xform.jit` then searches for nothing, and compiles the step once.

    Attributes:
      function: the name of the step.
      policy: the policy that chose the plans, as text.
      target: the backend that the step was compiled for.
      plans: the plans, by key. A key is a text that identifies a derivative.
      compiled_bytes: the compiler's peak of the step on each device; None if it is unknown.
      compiles: how many programs were compiled for the plans, without those that JAX had compiled
        before.
      seconds: the time of planning without compilations; 0 if the plan was read from a file.
      compile_seconds: the time of these compilations; 0 if the plan was read from a file.
    """

    function: str
    policy: str
    target: str
    plans: dict[str, Plan]
    compiled_bytes: int | None
    compiles: int
    seconds: float = dataclasses.field(default=0.0, metadata=results.NOT_STORED)
    compile_seconds: float = dataclasses.field(default=0.0, metadata=results.NOT_STORED)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans.values())

    def __len__(self) -> int:
        return len(self.plans)

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Any:
        """Answer for one equation as the default policy does.

        So a `StepPlan` is accepted wherever a policy is.
        """
        return min_cut(prim, *avals, **params)

    @property
    def predicted_bytes(self) -> int:
        """Simulated peak of the step on each device; 0 if it takes no derivative."""
        return max((plan.predicted_bytes for plan in self), default=0)

    @property
    def saved_bytes(self) -> int:
        """Bytes that all derivatives save for their backward passes, on each device."""
        return sum(plan.saved_bytes for plan in self)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of the values that wait in the memory of the host, for each device."""
        return sum(plan.offloaded_bytes for plan in self)

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward passes of all derivatives."""
        return sum(plan.forward_flops for plan in self)

    @property
    def recompute_flops(self) -> int:
        """FLOPs that all derivatives recompute."""
        return sum(plan.recompute_flops for plan in self)

    @property
    def least_flops(self) -> int | None:
        """Lower bound on the FLOPs that plans within the budget recompute, see `Plan`.

        Only `xform.plan` computes it. It is None if it was not computed, or without a budget.
        """
        bounds = [plan.least_flops for plan in self]
        known = [n for n in bounds if n is not None]
        return sum(known) if known and len(known) == len(bounds) else None

    @property
    def slices(self) -> Slices:
        """The regions of the step that run in slices."""
        return tuple(decision for plan in self for decision in plan.slices)

    def with_compilation(self, compiled: MemoryReport) -> StepPlan:
        """Return this plan with the compiled bytes and the compile time of the step under it."""
        size, compiles = compiled.total_bytes, 0 if compiled.known else 1
        plans = {
            k: dataclasses.replace(p, compiled_bytes=size, refused=size is None, compiles=compiles)
            for k, p in self.plans.items()
        }
        seconds = 0.0 if compiled.known else compiled.compile_seconds
        return dataclasses.replace(
            self, plans=plans, compiled_bytes=size, compiles=compiles, compile_seconds=seconds
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the live bytes over the steps of the program, with the saved values in colour.

        The derivatives run one after another, and are drawn so. The suffix of `path` chooses the
        format: PNG, SVG or PDF.
        """
        # The bytes outside each derivative. Their minimum is drawn as a base.
        fixed = [plan.predicted_bytes - max(plan.live, default=0) for plan in self]
        least = min(fixed, default=0)
        live = [n + own - least for plan, own in zip(self, fixed, strict=True) for n in plan.live]
        saved = [n for plan in self for n in plan.saved]
        draw_live_bytes(path, f"{self.function}, {self.policy}", live, saved, least)

    def explain(self, value: str) -> str:
        """Explain why a value is saved or not, see `Plan.explain`.

        Raises:
          WrongArgument: no plan has a row of this name.
        """
        texts: list[str] = []
        errors: list[WrongArgument] = []
        for plan in self:
            try:
                texts.append(plan.explain(value))
            except WrongArgument as error:
                errors.append(error)
        if not texts:
            raise (
                errors[0]
                if errors
                else WrongArgument(
                    f"explain({value!r})",
                    f"{self.function} has no derivative that xform.jit planned: it takes none, or "
                    "each has its own policy",
                    "",
                    "call explain on the plan of a step that takes a derivative without policy=",
                )
            )
        return "\n".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data. The times of planning are left out."""
        return results.to_data(self)

    def __repr__(self) -> str:
        peak = "" if self.compiled_bytes is None else f", peak {human_bytes(self.compiled_bytes)}"
        return f"<StepPlan of {self.function}, {self.policy}{peak}>"

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self), self.summary])

    @property
    def summary(self) -> str:
        """One line: the derivatives, the bytes of the step, and the times."""
        n = len(self)
        size = (
            "not compiled"
            if self.compiled_bytes is None
            else f"{human_bytes(self.compiled_bytes)} on each device"
        )
        work = f", {self.work}" if self.plans else ""
        return (
            f"{self.function}, {self.policy}, on {self.target}: {n} derivative{'s' * (n != 1)}, "
            f"{size}{work}{self._times}"
        )

    @property
    def work(self) -> str:
        """The recomputed FLOPs of all derivatives as text, with a lower bound if it is known."""
        return recomputed_flops(self.recompute_flops) + bound_text(
            self.least_flops, self.recompute_flops
        )

    @property
    def planning(self) -> str:
        """One line for a report: the work and the slices of all derivatives, and the times."""
        if not self.plans:
            return ""
        regions = [text for plan in self for text in plan.sliced_regions]
        slices = "".join(f", {text.partition(' (')[0]}" for text in regions)
        forward = f", {human_flops(self.forward_flops)} in the forward pass"
        return f"{self.work}{forward}{slices}{self._times}"

    @property
    def _times(self) -> str:
        return planning_times(self.seconds, self.compiles, self.compile_seconds)
