"""Check that each parameter can be updated before the gradients of the others exist.

An update is coupled if the new value of one leaf depends on the gradients of other leaves. The
usual cause is clipping by the norm over all parameters. A leaf is one array of the pytree of
parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from xform._jax import Var
from xform.errors import CoupledUpdate
from xform.fused.fused_step import Step
from xform.program.ir import Atom
from xform.terminal.text import first_few


def check_coupling(step: Step, state: Any, where: str) -> None:
    """Raise CoupledUpdate if the new value of a leaf depends on the gradient of another leaf.

    A state may depend on several gradients, as long as no update reads it in this step.

    Args:
      step: the traced step.
      state: the pytree of the optimizer state, whose types name the cause.
      where: the line of the user's code that the message names.
    """
    coupled = [i for i, v in enumerate(step.new_params) if bits_of(step, v) & ~(1 << i)]
    if not coupled:
        return
    first = coupled[0]
    read = _shared(step, first)
    request = "fused_update: update each parameter as soon as its gradient is complete"
    if _accumulates(state):
        raise CoupledUpdate(
            request,
            "optax.MultiSteps accumulates gradients: it adds the gradients of several steps, and "
            "updates all parameters when the last of them is complete",
            where,
            "use the optimizer without MultiSteps and a larger batch, whose memory a policy such "
            "as budget(...) limits; or keep the separate update of xform.grad",
        )
    names = first_few([step.names[i] for i in members(read[1])])
    others = "" if len(coupled) == 1 else f" (and {len(coupled) - 1} more)"
    raise CoupledUpdate(
        request,
        f"the update of {step.names[first]}{others} reads a result of {read[0]} that depends on "
        f"the gradients of {read[1].bit_count()} parameters: {names}. "
        "optax.clip_by_global_norm is such an update: its norm is known only when all gradients "
        "are",
        where,
        "use xform.clip_by_previous_global_norm, which takes the norm of the step before; or clip "
        "each parameter alone, as optax.clip and optax.clip_by_block_rms do; or keep the separate "
        "update of xform.grad",
    )


def bits_of(step: Step, v: Atom) -> int:
    """Return the leaves whose gradients a value of the update depends on, as a bit mask."""
    return step.leaves_of.get(v, 0) if isinstance(v, Var) else 0


def read_by_several(step: Step) -> dict[int, list[Var]]:
    """Return, for each leaf, its values that an equation of several leaves reads.

    The value of a leaf depends on the gradient of this leaf alone. An example is the sum of squares
    that a leaf contributes to a norm.
    """
    found: dict[int, dict[Var, None]] = {}
    for eqn in step.update:
        bits = bits_of(step, eqn.outvars[0]) if eqn.outvars else 0
        for v in eqn.invars if bits & (bits - 1) else ():
            own = bits_of(step, v)
            if isinstance(v, Var) and own and not own & (own - 1):
                found.setdefault(own.bit_length() - 1, {})[v] = None
    return {leaf: [*values] for leaf, values in found.items()}


def members(bits: int) -> Iterable[int]:
    """Yield the positions of the bits that are set."""
    while bits:
        yield (bits & -bits).bit_length() - 1
        bits &= bits - 1


def _shared(step: Step, leaf: int) -> tuple[str, int]:
    """Return the operation that makes a shared value which the update of a leaf reads.

    The value depends on the gradients of all leaves that the new parameter depends on. Also return
    these leaves as a bit mask.
    """
    needed = {step.new_params[leaf]}
    wanted = bits_of(step, step.new_params[leaf])
    name = "an operation"
    for eqn in reversed(step.update):
        if needed.isdisjoint(eqn.outvars):
            continue
        needed.update(v for v in eqn.invars if isinstance(v, Var))
        if bits_of(step, eqn.outvars[0]) == wanted:
            name = eqn.primitive.name
    return name, wanted


def _accumulates(state: Any) -> bool:
    """Return whether the state of an optimizer has a part of `optax.MultiSteps`."""
    is_state = lambda x: type(x).__name__ == "MultiStepsState"
    return any(map(is_state, jax.tree.leaves(state, is_leaf=is_state)))
