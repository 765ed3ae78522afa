"""`StepPlan`: the plans of all derivatives that a step takes, with the bytes of the whole step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from xform._jax import Primitive
from xform.errors import WrongArgument
from xform.planner.plan.plan import Plan
from xform.policies import min_cut
from xform.storage import results
from xform.terminal.notebook import Result
from xform.terminal.text import human_bytes, planning_times, recomputed_flops


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class StepPlan(Result):
    """The plan of a step: one plan for each derivative that the step takes without `policy=`.

    `xform.jit` makes it, see `.plan` there. It prints as the tables of its plans, and iterates over
    them. It can also be passed to `xform.jit` as the policy, for the same step and the same types.
    `xform.jit` then searches for nothing, and compiles the step once.

    Attributes:
      function: the name of the step.
      policy: the policy that chose the plans, as text.
      target: the backend that the step was compiled for.
      plans: the plans, by key. A key is a text that identifies a derivative.
      compiled_bytes: the compiler's peak of the step on each device; None if it is unknown.
      compiles: how many programs were compiled to find the plans, without those that JAX had
        compiled before.
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
        """Answer as `min_cut` does, for code that calls policies by JAX's protocol."""
        return min_cut(prim, *avals, **params)

    @property
    def recompute_flops(self) -> int:
        """FLOPs that all derivatives recompute."""
        return sum(plan.recompute_flops for plan in self)

    def with_compiled_bytes(self, size: int | None) -> StepPlan:
        """This plan, with the compiler's bytes of the step; None if they are unknown."""
        plans = {k: dataclasses.replace(p, compiled_bytes=size) for k, p in self.plans.items()}
        return dataclasses.replace(self, plans=plans, compiled_bytes=size)

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
        work = f", {recomputed_flops(self.recompute_flops)}" if self.plans else ""
        times = planning_times(self.seconds, self.compiles, self.compile_seconds)
        return (
            f"{self.function}, {self.policy}, on {self.target}: {n} derivative{'s' * (n != 1)}, "
            f"{size}{work}{times}"
        )
