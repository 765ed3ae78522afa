"""What was compiled, in words: the transform, the policy, the arguments."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import ShapedArray
from xform.callables import argument_names, derived
from xform.policies import as_code, min_cut, said
from xform.text import human_bytes

# Arguments that are named one by one.
_MOST = 8


@dataclasses.dataclass(frozen=True)
class Asked:
    """What was compiled; prints as lines, or as nothing where nobody said it.

    Attributes:
      transform: such as "value_and_grad by argument 0"; empty of a function as it is.
      policy: what the policy is called; empty where there is none.
      code: the policy as Python, to be copied; empty where there is none that Python can say.
      arguments: their names and types.
      inputs: what made them, on the command line.
      planned: how long planning its derivatives took, what they run again, and how little that
        could be; empty where nothing was planned.
      note: more of how it was compiled, such as shardings that were not given.
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
        """The transform and the policy, in a line."""
        what = f"its {self.transform}" if self.transform else "the function as it is"
        return what + (f", policy {self.policy}" if self.policy else "")

    @property
    def given(self) -> str:
        """The arguments, in a line."""
        by = f", by {self.inputs}" if self.inputs else ""
        return f"{self.arguments}{by}"

    def __str__(self) -> str:
        if not self.arguments:
            return ""
        planned = f"planned: {self.planned}" if self.planned else ""
        lines = (f"compiled: {self.compiled}", f"arguments: {self.given}", planned, self.note)
        return "\n".join(filter(None, lines))


def asked(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Asked:
    """What is compiled of a function and its arguments.

    >>> import xform
    >>> from xform.memory.asked import asked
    >>> print(asked(xform.grad(lambda w, x: w @ x), (jnp.ones(3), jnp.ones(3)), {}))
    compiled: its grad by argument 0, policy min_cut
    arguments: w f32[3], x f32[3]
    """
    derivative = derived(f)
    options = ((k, x) for k, x in kwargs.items() if k != "policy")  # it is said apart
    named = [*zip(argument_names(f, len(args)), args, strict=True), *options]
    words = [f"{name} {_type(x)}" for name, x in named[:_MOST]]
    if rest := named[_MOST:]:
        words.append(f"and {len(rest)} more, {_type([x for _, x in rest])}")
    arguments = ", ".join(words) or "none"
    if derivative is None:
        return Asked(arguments=arguments)
    by = derivative.argnums if isinstance(derivative.argnums, Sequence) else (derivative.argnums,)
    several = f"argument{'s' * (len(by) != 1)} {', '.join(map(str, by))}"
    policy = min_cut if derivative.policy is None else derivative.policy
    return Asked(f"{derivative.transform} by {several}", said(policy), as_code(policy), arguments)


def short(dtype: Any) -> str:
    """A dtype as JAX prints it: f32."""
    return ShapedArray((), dtype).str_short(short_dtypes=True).partition("[")[0]


def _type(x: Any) -> str:
    """An argument in a few words."""
    leaves = jax.tree.leaves(x)
    arrays = [y for y in leaves if hasattr(y, "shape") and hasattr(y, "dtype")]
    if len(leaves) == 1 and leaves[0] is x:
        if arrays:
            return f"{short(x.dtype)}[{','.join(map(str, x.shape))}]"
        return repr(x) if isinstance(x, str | bool | numbers.Number) else type(x).__name__
    size = sum(int(np.prod(y.shape)) * y.dtype.itemsize for y in arrays)
    return f"({len(arrays)} array{'s' * (len(arrays) != 1)}, {human_bytes(size)})"
