"""The sizes of symbolic dimensions at which a policy counts bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from xform.errors import WrongArgument
from xform.policies.budgets import Budget
from xform.program.dimensions import (
    Sample,
    current_sample,
    sample_of,
    sample_text,
    symbolic_dimensions,
    violated_constraint,
)


def check_known_sizes(request: str, arguments: Any) -> None:
    """Raise WrongArgument if an array among the arguments has symbolic dimensions.

    `request` is the first line of the error.
    """
    dimensions = symbolic_dimensions(jax.tree.leaves(arguments))
    if not dimensions:
        return
    example = sample_text(sample_of(dimensions))
    raise WrongArgument(
        request,
        f"it needs known sizes, and the dimension {dimensions[0]} of an argument is symbolic",
        "",
        f"pass arguments of known sizes, such as those with {example}",
    )


def sample_for(policy: Any, avals: Iterable[Any]) -> Sample:
    """Return the sample at which a policy plans a program with inputs of these types.

    A budget and a plan have a sample of their own. Other policies use the current one.

    Raises:
      WrongArgument: the policy is a budget, and it gives no size for a symbolic dimension, or sizes
        that violate a constraint.
    """
    dimensions = symbolic_dimensions(avals)
    sample: Sample = getattr(policy, "symbolic", ()) or current_sample()
    if not dimensions or not isinstance(policy, Budget):
        return sample
    sizes, needed = dict(sample), sample_of(dimensions)
    constraint = violated_constraint(sizes, dimensions)
    if sizes.keys() >= dict(needed).keys() and not constraint:
        return sample
    names = ", ".join(name for name, _ in needed if name not in sizes)
    function = "fit" if policy.device else "budget"
    raise WrongArgument(
        f"policy={policy!r} of a function with the symbolic dimensions "
        f"{', '.join(sorted(set(map(str, dimensions))))}",
        f"its sizes violate the constraint {constraint}" if constraint else
        f"bytes can only be counted for known sizes, and the budget has no size for {names}",
        "",
        f"give {'other' if constraint else 'these'} sizes, such as "
        f"xform.policies.{function}(..., symbolic={dict(needed)}): the budget holds at these sizes",
    )  # fmt: skip
