"""From a gradient to the next parameters and optimizer state: at once, or one after another."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.train.host import fetched
from models.train.optim import OptimConfig, clipping, optimizer, rule
from models.train.state import TrainState
from xform.passes import Cse, Inline, Pipeline

# What does not depend on the parameter, such as Adam's correction of bias, is made once for all.
_ONCE = Pipeline([Inline(), Cse()])
Updated = tuple[nnx.State, optax.OptState]
Tree = TypeVar("Tree")


def updated(optim: OptimConfig, state: TrainState, grads: nnx.State, good: jax.Array) -> Updated:
    """Parameters and optimizer state after a step; both as they were if it is not `good`."""
    old = state.params, state.opt_state
    updates, opt_state = optimizer(optim).update(grads, state.opt_state, state.params)
    return chosen(good, (optax.apply_updates(state.params, updates), opt_state), old)


def updated_in_turn(
    optim: OptimConfig, state: TrainState, grads: nnx.State, good: jax.Array
) -> Updated:
    """The same, of an optimizer state that waits in the host's memory.

    What the optimizer keeps of a parameter is fetched when the one before it is done, so that a
    device never holds that of all. Of gradients only the norm, by which they are clipped, is of all
    parameters; each rule is of one.
    """
    in_turn = functools.partial(_in_turn, optim)
    return _ONCE(in_turn)(state.params, state.opt_state, grads, good)


def _in_turn(
    optim: OptimConfig, old: nnx.State, opt_state: Any, grads: nnx.State, good: jax.Array
) -> Updated:
    empty, kept = opt_state
    clipped, _ = clipping(optim).update(grads, empty)
    done: list[Updated] = []
    after = good
    for path, _ in nnx.to_flat_state(old):
        grad, own, param = (_only(tree, path) for tree in (clipped, kept, old))
        own = fetched(own, after)
        updates, new = rule(optim).update(grad, own, param)
        done.append(chosen(good, (optax.apply_updates(param, updates), new), (param, own)))
        (after,) = jax.tree.leaves(done[-1][0])
    params, kept = jax.tree.map(_together, *done, is_leaf=_is_state)
    return params, (empty, kept)


def chosen(good: jax.Array, new: Tree, old: Tree) -> Tree:
    """What is new if the step is `good`, else what was."""
    return jax.tree.map(functools.partial(jnp.where, good), new, old)


def _only(tree: Any, path: Any) -> Any:
    """A tree in which each state of parameters has but one of them."""

    def only(x: Any) -> Any:
        flat = dict(nnx.to_flat_state(x)) if _is_state(x) else {}
        return nnx.from_flat_state({path: flat[path]}) if flat else x

    return jax.tree.map(only, tree, is_leaf=_is_state)


def _together(*parts: Any) -> Any:
    """One state of all parameters; of what is no such state, the first: all are the same."""
    return nnx.merge_state(*parts) if _is_state(parts[0]) else parts[0]


def _is_state(x: Any) -> bool:
    return isinstance(x, nnx.State)
