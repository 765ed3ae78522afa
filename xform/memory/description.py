"""Describe what a memory report is about: the transform, the policy and the arguments, as text."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import ShapedArray
from xform.introspection.callables import argument_names, transform_record
from xform.policies import as_code, min_cut, policy_name
from xform.terminal.text import human_bytes

# At most this many arguments are listed by name. For all further arguments, the total is given.
_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Description:
    """A description of what was compiled. Prints as lines, or as "" if it has no arguments.

    Attributes:
      transform: such as "value_and_grad by argument 0"; empty for a function without a transform.
      policy: name of the policy; empty if there is none.
      code: the policy as a Python expression to copy; empty if it has none.
      arguments: their names and types.
      inputs: the name of the function that made them, for a call from the command line.
      planned: how long planning took, the work that the plans recompute, and its lower bound;
        empty if nothing was planned.
      note: a remark, such as that no shardings were given.
    """

    transform: str = ""
    policy: str = ""
    code: str = ""
    arguments: str = ""
    inputs: str = ""
    planned: str = ""
    note: str = ""

    @property
    def compiled(self) -> str:
        """The transform and the policy, in one line."""
        subject = f"its {self.transform}" if self.transform else "the function as it is"
        return subject + (f", policy {self.policy}" if self.policy else "")

    @property
    def given(self) -> str:
        """The arguments, in one line."""
        source = f", by {self.inputs}" if self.inputs else ""
        return f"{self.arguments}{source}"

    def __str__(self) -> str:
        if not self.arguments:
            return ""
        planned = f"planned: {self.planned}" if self.planned else ""
        lines = (f"compiled: {self.compiled}", f"arguments: {self.given}", planned, self.note)
        return "\n".join(filter(None, lines))


def describe(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Description:
    """Return the description of a call `f(*args, **kwargs)` that is compiled.

    >>> import xform
    >>> from xform.memory.description import describe
    >>> print(describe(xform.grad(lambda w, x: w @ x), (jnp.ones(3), jnp.ones(3)), {}))
    compiled: its grad by argument 0, policy min_cut
    arguments: w f32[3], x f32[3]
    """
    derivative = transform_record(f)
    named = [*zip(argument_names(f, len(args)), args, strict=True), *kwargs.items()]
    texts = [f"{name} {_type_text(x)}" for name, x in named[:_MOST_NAMED]]
    if rest := named[_MOST_NAMED:]:
        texts.append(f"and {len(rest)} more, {_type_text([x for _, x in rest])}")
    arguments = ", ".join(texts) or "none"
    if derivative is None:
        return Description(arguments=arguments)
    argnums = derivative.argnums
    positions = argnums if isinstance(argnums, Sequence) else (argnums,)
    by = f"argument{'s' * (len(positions) != 1)} {', '.join(map(str, positions))}"
    policy = min_cut if derivative.policy is None else derivative.policy
    return Description(
        f"{derivative.transform} by {by}", policy_name(policy), as_code(policy), arguments
    )


def short(dtype: Any) -> str:
    """Return the short name of a dtype, as JAX prints it, such as "f32"."""
    return ShapedArray((), dtype).str_short(short_dtypes=True).partition("[")[0]


def _type_text(x: Any) -> str:
    """Return an argument's type as text; for a tree, the number of its arrays and their bytes."""
    leaves = jax.tree.leaves(x)
    arrays = [y for y in leaves if hasattr(y, "shape") and hasattr(y, "dtype")]
    if len(leaves) == 1 and leaves[0] is x:
        if arrays:
            return f"{short(x.dtype)}[{','.join(map(str, x.shape))}]"
        if callable(x):
            return policy_name(x)
        return repr(x) if isinstance(x, str | bool | numbers.Number) else type(x).__name__
    size = sum(int(np.prod(y.shape)) * y.dtype.itemsize for y in arrays)
    return f"({len(arrays)} array{'s' * (len(arrays) != 1)}, {human_bytes(size)})"
