"""`name`: names for values inside a function."""

from __future__ import annotations

from typing import Any

from jax.ad_checkpoint import checkpoint_name

from xform.errors import WrongArgument


def name(x: Any, name: str) -> Any:
    """`x`, under a name: that of `jax.ad_checkpoint.checkpoint_name`, which is the same thing.

    `partials` asks for the gradient at a named value, policies say of named values whether they are
    saved. The name belongs to what is returned: it is that which has to be used.

    Args:
      x: a pytree of arrays of any shape; each of its leaves gets the name.
      name: any text.

    Returns:
      A pytree like `x`, with its values.

    Raises:
      WrongArgument: `name` is no text.

    Cost: none; the compiler drops names.

    >>> f = lambda x: xform.name(jnp.sin(x), "h") ** 2
    >>> float(f(0.5)) == float(jnp.sin(0.5) ** 2)
    True
    """
    given: Any = name
    if not isinstance(given, str):
        raise WrongArgument(
            f"name(x, {name!r})",
            f"a name is text, and this is of type {type(given).__name__}",
            "",
            'pass the value first, then its name: name(x, "h")',
        )
    return checkpoint_name(x, name)
