"""`name`: names for values inside a function."""

from __future__ import annotations

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from xform.errors import WrongArgument


def name(x: Any, name: str) -> Any:
    """Return `x` with a name attached, exactly as `jax.ad_checkpoint.checkpoint_name` does.

    `xform.adjoints.partials` computes the gradient at a named value. Policies can decide by name
    which values to save. The name belongs to the returned value, so use that value and not `x`.

    Args:
      x: a pytree of arrays of any shape; each leaf gets the name.
      name: any string.

    Returns:
      A pytree like `x`, with the same values.

    Raises:
      WrongArgument: `name` is not a string.

    Cost: none, because the compiler removes names.

    >>> f = lambda x: xform.adjoints.name(jnp.sin(x), "h") ** 2
    >>> float(f(0.5)) == float(jnp.sin(0.5) ** 2)
    True
    """
    untyped: Any = name
    if not isinstance(untyped, str):
        raise WrongArgument(
            f"name(x, {name!r})",
            f"the name must be a string, and it has type {type(untyped).__name__}",
            "",
            'pass the value first, then its name: name(x, "h")',
        )
    return checkpoint_name(x, name)
