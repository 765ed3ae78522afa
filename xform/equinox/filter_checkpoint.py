"""`xform.equinox.filter_checkpoint`: a function whose intermediate values are recomputed."""

from __future__ import annotations

from typing import Any

import equinox as eqx

from xform.equinox.filter_calls import Function, TransformedFunction, accepts_options_only
from xform.transforms.checkpoint import checkpoint
from xform.transforms.function import Tree


class _Checkpoint(TransformedFunction):
    """The function that `filter_checkpoint` returns."""

    _prevent_cse: bool = eqx.field(static=True)
    _policy: Any = eqx.field(static=True)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        arrays, held = eqx.partition((self._fun, args, kwargs), eqx.is_array)
        held_outputs: list[Tree] = []

        def region(arrays: Tree) -> Tree:
            fun, args, kwargs = eqx.combine(arrays, held)
            array_outputs, other_outputs = eqx.partition(fun(*args, **kwargs), eqx.is_array)
            held_outputs[:] = [other_outputs]
            return array_outputs

        array_outputs = checkpoint(region, prevent_cse=self._prevent_cse, policy=self._policy)(
            arrays
        )
        return eqx.combine(array_outputs, held_outputs[0])


@accepts_options_only
def filter_checkpoint(fun: Function, *, prevent_cse: bool = True, policy: Any = None) -> Function:
    """Return a function like `fun` whose intermediate values are recomputed in the backward pass.

    Args:
      fun: function that takes and returns any pytrees. Without `fun`, a decorator is returned.
      prevent_cse: whether to keep the compiler from merging the recomputed operations with those of
        the forward pass.
      policy: which intermediate values are saved nevertheless: a policy of `xform.policies` or
        `jax.checkpoint_policies`, or its text, such as "save_dots"; None saves none of them.

    Returns:
      A function with the arguments and results of `fun`.

    Raises:
      WrongArgument: `policy` is not a policy, or is a budget of the peak memory.

    Cost: in reverse mode, about one more evaluation of `fun`, less what the policy saves.

    >>> twice, policy = lambda x, f: f(f(x)), xform.policies.save_dots
    >>> layer = xform.equinox.filter_checkpoint(twice, policy=policy)
    >>> float(xform.grad(lambda x: layer(x, jnp.sin))(0.0))
    1.0
    """
    return _Checkpoint(fun, prevent_cse, policy)
