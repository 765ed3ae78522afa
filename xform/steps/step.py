"""`TrainingStep`: what `xform.jit` returns, and `xform.flax.jit` and `xform.equinox.filter_jit`.

`xform.plan`, `xform.compare` and `xform.pareto` take a `TrainingStep` as a step, and any other
function as a loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from xform.errors import WrongArgument
from xform.introspection.callables import definition_site, function_name
from xform.memory.analysis import subject_of
from xform.memory.description import Description
from xform.memory.report import MemoryReport


class TrainingStep:
    """A compiled function that chooses plans for the derivatives inside it."""

    # Whether the user asked for plans, with a function of xform.
    _is_declared = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; at the first call with some types, plan and compile it."""
        raise NotImplementedError

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> Any:
        """Return this step under another policy, or for other devices.

        Args:
          policy: as for `xform.jit`; None keeps the policy of the step.
          target: the name of the devices; None keeps those of the step.
          verify: whether the compiler measures the plans of a budget.
        """
        raise NotImplementedError

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Plan for arrays or types; return the lowered step, which has the plan and a report."""
        raise NotImplementedError

    def report_for(
        self, target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MemoryReport:
        """Return the memory report of the step, planned and compiled for a target."""
        report = self.under(None, target).lower(*args, **kwargs).memory_analysis()
        subject = subject_of(self, args, kwargs)  # of the step, not of its function of arrays
        given: Description = subject["description"]
        description = dataclasses.replace(
            report.description, transform=given.transform, arguments=given.arguments
        )
        return dataclasses.replace(report, shapes=subject["shapes"], description=description)


def refuse_loss_options(step: TrainingStep, caller: str, **given: bool) -> None:
    """Raise WrongArgument if an option of a loss, such as `argnums`, is given for a step.

    `given` says for each option whether it is given, and `caller` names the public function.
    """
    for option in (name for name, is_given in given.items() if is_given):
        raise WrongArgument(
            f"{caller} of {function_name(step)}, a function of xform.jit, with {option}=",
            "a step chooses itself what it differentiates",
            definition_site(step),
            f"leave out {option}, or pass the loss",
        )


def is_step(f: Any) -> TypeGuard[TrainingStep]:
    """Return whether a function is a step: whether it was made by `xform.jit`, or one like it.

    A function of `jax.jit` is not a step, even if `xform.install` plans it.
    """
    return isinstance(f, TrainingStep) and f._is_declared  # pyright: ignore[reportPrivateUsage]
