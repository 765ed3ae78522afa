"""Trace a training step as one program: the loss, its gradient, and the update by an optimizer.

The program has two parts. The equations of the *gradient part* compute the value of the loss and
the gradient. The equations of the *update part* compute the new parameters and the new optimizer
state from the gradient. A *leaf* is one array of the pytree of parameters, and it has a number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import JaxprEqn, Tracer, Var
from xform.introspection.packages import require_package
from xform.passes.inline import Inline
from xform.program.ir import Atom, Program, lift_constants, trace

with require_package("optax", "Optax", by="xform.fused_update", brings="train"):
    import optax

Tree = Any


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A traced training step.

    Attributes:
      inputs: the inputs of the program: closed-over values, parameters, optimizer state.
      gradient, update: the equations of the two parts, in order.
      params: for each leaf, the input variable of the parameter.
      grads: for each leaf, its gradient: a variable of the gradient part, or a literal.
      new_params: for each leaf, the new parameter.
      state, new_state: the leaves of the optimizer state, before and after the step.
      values: the outputs of the gradient part besides the gradient: the value, auxiliary values.
      leaves_of: for each variable of the update part, the set of leaves whose gradients it depends
        on, as a bit mask. Variables that depend on no gradient are absent.
      names: for each leaf, its path in the pytree of parameters, such as `['layers']['w']`.
    """

    inputs: tuple[Var, ...]
    gradient: tuple[JaxprEqn, ...]
    update: tuple[JaxprEqn, ...]
    params: tuple[Var, ...]
    grads: tuple[Atom, ...]
    new_params: tuple[Atom, ...]
    state: tuple[Var, ...]
    new_state: tuple[Atom, ...]
    values: tuple[Atom, ...]
    leaves_of: dict[Var, int]
    names: tuple[str, ...]

    @property
    def outputs(self) -> tuple[Atom, ...]:
        """The new parameters, the new state, and the outputs of the loss."""
        return (*self.new_params, *self.new_state, *self.values)


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """A Step, the values of its inputs, and a function from its outputs to the user's results."""

    step: Step
    inputs: list[Any]
    results: Callable[[Sequence[Any]], tuple[Tree, Tree, Tree]]


def trace_step(
    value_and_grad: Callable[[Tree], Any], optimizer: Any, params: Tree, state: Tree, has_aux: bool
) -> TracedStep:
    """Trace a training step.

    Args:
      value_and_grad: returns the value (or the value and auxiliary values) and the gradient at
        given parameters.
      optimizer: the `optax.GradientTransformation`.
      params: the pytree of parameters.
      state: the pytree of the optimizer state.
      has_aux: whether there are auxiliary values.
    """
    leaves, tree = jax.tree.flatten(params)
    states, state_tree = jax.tree.flatten(state)
    on = [_is_array(x) for x in states]
    static_state = [None if a else x for x, a in zip(states, on, strict=True)]
    values: _Outputs = _Outputs()
    new_states: _Outputs = _Outputs()

    def gradient(*leaves: Any) -> list[Any]:
        value, grads = value_and_grad(jax.tree.unflatten(tree, leaves))
        return [*tree.flatten_up_to(grads), *values.flatten(value)]

    def update(*args: Any) -> list[Any]:
        n, m = len(leaves), len(args) - len(value_types)
        grads, old, arrays = args[:n], args[n : 2 * n], iter(args[2 * n : m])
        full = [next(arrays) if a else x for x, a in zip(static_state, on, strict=True)]
        old_params = jax.tree.unflatten(tree, old)
        updates, new_state = optimizer.update(
            jax.tree.unflatten(tree, grads),
            jax.tree.unflatten(state_tree, full),
            old_params,
            **_extra(optimizer, values.rebuild(args[m:]), has_aux),
        )
        new = optax.apply_updates(old_params, updates)
        return [*tree.flatten_up_to(new), *new_states.flatten(new_state)]

    arrays = [x for x, a in zip(states, on, strict=True) if a]
    first, consts = lift_constants(trace(gradient, *leaves))
    n, k = len(leaves), len(consts)
    grads = first.outputs[:n]
    grad_types, value_types = ([v.aval for v in vs] for vs in (grads, first.outputs[n:]))
    traced = trace(update, *grad_types, *leaves, *arrays, *value_types)
    second, more = lift_constants(Inline().rewrite(traced))
    leaves_of = _leaves_of(second, second.inputs[len(more) :][:n])
    computed = {v for eqn in first.equations for v in eqn.outvars}
    leaves_of |= {v: 1 << i for i, v in enumerate(grads) if isinstance(v, Var) and v in computed}
    param_vars = first.inputs[k:]
    state_vars = second.inputs[len(more) + 2 * n :][: len(arrays)]
    given = *grads, *param_vars, *state_vars, *first.outputs[n:]
    names = dict(zip(second.inputs[len(more) :], given, strict=True))
    rename = functools.partial(_rename, names)
    step = Step(
        (*first.inputs[:k], *second.inputs[: len(more)], *param_vars, *state_vars),
        first.equations,
        tuple(e.replace(invars=rename(e.invars)) for e in second.equations),
        param_vars,
        grads,
        tuple(rename(second.outputs[:n])),
        state_vars,
        tuple(rename(second.outputs[n:])),
        first.outputs[n:],
        leaves_of,
        tuple(jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(params)[0]),
    )

    def results(outputs: Sequence[Any]) -> tuple[Tree, Tree, Tree]:
        m = n + len(second.outputs[n:])
        new_params = jax.tree.unflatten(tree, outputs[:n])
        return new_params, new_states.rebuild(outputs[n:m]), values.rebuild(outputs[m:])

    return TracedStep(step, [*consts, *more, *leaves, *arrays], results)


def _extra(optimizer: Any, value: Any, has_aux: bool) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer's update, if it takes any."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return {}
    return dict(zip(("value", "aux"), value, strict=True)) if has_aux else {"value": value}


class _Outputs:
    """The structure of a traced function's output. Some leaves may be no traced values."""

    def flatten(self, tree: Tree) -> list[Any]:
        """Return the traced leaves of an output, and remember the rest."""
        leaves, self._tree = jax.tree.flatten(tree)
        self._rest = [None if isinstance(x, Tracer) else x for x in leaves]
        self._traced = [isinstance(x, Tracer) for x in leaves]
        return [x for x in leaves if isinstance(x, Tracer)]

    def rebuild(self, traced: Sequence[Any]) -> Tree:
        """Return the output with these values in place of the traced leaves."""
        values = iter(traced)
        pairs = zip(self._rest, self._traced, strict=True)
        return jax.tree.unflatten(self._tree, [next(values) if t else x for x, t in pairs])


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _rename(names: dict[Var, Atom], atoms: Sequence[Atom]) -> list[Atom]:
    return [names.get(v, v) if isinstance(v, Var) else v for v in atoms]


def _leaves_of(update: Program, grads: Sequence[Var]) -> dict[Var, int]:
    """Return for each variable of the update which leaves' gradients it depends on, as bits."""
    found = {v: 1 << i for i, v in enumerate(grads)}
    for eqn in update.equations:
        bits = 0
        for v in eqn.invars:
            bits |= found.get(v, 0) if isinstance(v, Var) else 0
        if bits:
            found.update((v, bits) for v in eqn.outvars)
    return found
