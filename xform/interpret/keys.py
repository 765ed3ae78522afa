"""Random keys that xform uses a second time on purpose, for JAX's check of keys.

With the option `jax_debug_key_reuse`, JAX raises an error if a program uses a random key twice. A
backward pass that recomputes random numbers does, to draw the same numbers again. A clone of a key
is a new key for that check. Without the option nothing is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from xform.program.arithmetic import Value, is_key


def unused_keys(xs: Sequence[Value]) -> list[Value]:
    """Return the values with a clone in place of each random key, if JAX checks keys."""
    if not jax.config.jax_debug_key_reuse:  # pyright: ignore[reportAttributeAccessIssue]
        return list(xs)
    return [jax.random.clone(x) if is_key(x) else x for x in xs]
