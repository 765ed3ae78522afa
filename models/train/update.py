"""The optimizer update: of all parameters together, or of one parameter after the other.

A step is good if its loss and gradient are finite and its gradient is no spike. A step that is not
good changes nothing.
"""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.train.host import fetch_after
from models.train.optim import OptimConfig, clipping, optimizer, rule
from models.train.state import TrainState
from xform.passes import Cse, Inline, Pipeline

# Merges computations that do not depend on the parameter, such as Adam's bias correction.
_MERGE_COMMON = Pipeline([Inline(), Cse()])
Updated = tuple[nnx.State, optax.OptState]
Tree = TypeVar("Tree")


def updated(optim: OptimConfig, state: TrainState, grads: nnx.State, good: jax.Array) -> Updated:
    """Return the parameters and the optimizer state after a step.

    Args:
      optim: the settings of the optimizer.
      state: the state before the step.
      grads: the gradients, in float32.
      good: whether the step is good, a boolean scalar. Otherwise the old values are returned.
    """
    old = state.params, state.opt_state
    updates, opt_state = optimizer(optim).update(grads, state.opt_state, state.params)
    return select(good, (optax.apply_updates(state.params, updates), opt_state), old)


def updated_in_turn(
    optim: OptimConfig, state: TrainState, grads: nnx.State, good: jax.Array
) -> Updated:
    """Return the same as `updated`, for an optimizer state that is in host memory.

    The optimizer state of a parameter is fetched after the parameter before it is done, so a device
    never holds the state of all parameters. This is possible because only clipping by the gradient
    norm depends on all parameters.
    """
    in_turn = functools.partial(_in_turn, optim)
    return _MERGE_COMMON(in_turn)(state.params, state.opt_state, grads, good)


def _in_turn(
    optim: OptimConfig, old: nnx.State, opt_state: Any, grads: nnx.State, good: jax.Array
) -> Updated:
    """Update one parameter after the other; the body of `updated_in_turn`."""
    clipping_state, rule_state = opt_state
    clipped, new_clipping = clipping(optim).update(grads, clipping_state)
    done: list[Updated] = []
    after = good
    for path, _ in nnx.to_flat_state(old):
        grad, own, param = (_only(tree, path) for tree in (clipped, rule_state, old))
        own = fetch_after(own, after)
        updates, new = rule(optim).update(grad, own, param)
        done.append(select(good, (optax.apply_updates(param, updates), new), (param, own)))
        (after,) = jax.tree.leaves(done[-1][0])
    params, rule_state = jax.tree.map(_merged, *done, is_leaf=_is_state)
    return params, (select(good, new_clipping, clipping_state), rule_state)


def select(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """Return `new` if the step is `good`, else `old`."""
    return jax.tree.map(functools.partial(jnp.where, good), new, old)


def _only(tree: Any, path: Any) -> Any:
    """Reduce each `nnx.State` in a tree to the parameter at `path`."""

    def only(x: Any) -> Any:
        flat = dict(nnx.to_flat_state(x)) if _is_state(x) else {}
        return nnx.from_flat_state({path: flat[path]}) if flat else x

    return jax.tree.map(only, tree, is_leaf=_is_state)


def _merged(*parts: Any) -> Any:
    """Merge `nnx.State`s of single parameters. Of other leaves, return the first.

    Other leaves, such as a step count, do not depend on the parameter, so all of them are equal.
    """
    return nnx.merge_state(*parts) if _is_state(parts[0]) else parts[0]


def _is_state(x: Any) -> bool:
    return isinstance(x, nnx.State)
