"""`xform.flax.fused_update`: update a module's parameters within the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx

from xform.flax.calls import accepts_nnx_calls
from xform.fused import fused_update as fused
from xform.fused.update_report import UpdateReport
from xform.introspection.callables import check_callable, function_name
from xform.modules.boundary import Function, Mode, ModuleBoundary
from xform.modules.objective import ModuleObjective
from xform.policies import parse


@accepts_nnx_calls(n_required=1)
def fused_update(f: Function, *, has_aux: bool = False, policy: Any = None,
                 graph: Mode = None, graph_updates: Mode = None) -> Function:  # fmt: skip
    """Return a training step that updates each parameter of a module within the backward pass.

    It is `xform.fused_update` for NNX modules: a parameter is updated as soon as its own gradient
    is complete, so the gradient of all parameters never exists at one time. Parameters of layers
    that run in an `nnx.scan` are updated one layer at a time. `xform.fused_update` takes the loss
    and an optimizer of Optax; this function takes only the loss, because the `nnx.Optimizer` that
    the step gets holds the optimizer.

    Args:
      f: the loss, a function of a module and other arguments that returns a scalar. It may change
        the state of its arguments. Without `f`, a decorator is returned.
      has_aux: whether `f` returns a pair `(value, auxiliary)`.
      policy: which values are saved for the backward pass, as in `xform.flax.value_and_grad`.
      graph: whether modules may share Variables; None for NNX's setting (`nnx.set_graph_mode`).
      graph_updates: whether changes of a module's structure are written back; None for NNX's
        setting (`nnx.set_graph_updates`).

    Returns:
      A function `step(model, optimizer, *batch)`. It updates the module and its `nnx.Optimizer`,
      and returns the value of the loss, or `(value, auxiliary)` with `has_aux`. `batch` are the
      other arguments of `f`, and keyword arguments are passed to `f` too. The Variables that the
      optimizer's `wrt` selects are updated; new values that `f` itself gives them are lost. Jit the
      step and donate the module and the optimizer: `nnx.jit(step, donate_argnums=(0, 1))`.
      `step.where(model, optimizer, *batch)` returns where each parameter is updated.

    Raises:
      CoupledUpdate: the update of a parameter reads the gradients of others, see
        `xform.fused_update`.
      WrongArgument: `f` is a bound method, or the optimizer's filter selects nothing.
      NotScalar: `f` returned something other than a scalar.

    Cost: one gradient and one update. Tracing takes one more pass over the step.

    >>> import optax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    >>> step = nnx.jit(xform.flax.fused_update(lambda model, x: model(x).sum()))
    >>> value = step(model, optimizer, jnp.ones((3, 2)))
    >>> model.bias[...].tolist(), int(optimizer.step[...])
    ([-1.5], 1)
    """
    check_callable(f, "fused_update")
    boundary, parsed = ModuleBoundary.of("fused_update", graph, graph_updates), parse(policy)
    caller = f"fused_update of {function_name(f)}"

    def prepare(model: Any, optimizer: Any, batch: Any, kwargs: Any) -> Any:
        """Return the step of arrays, the parameters, and the state of the optimizer."""
        selection = {0: nnx.DiffState(0, optimizer.wrt)}
        args = (model, *batch)
        objective = ModuleObjective(boundary, f, args, kwargs, selection, has_aux, caller,
                                    writes_selected=False)  # fmt: skip
        (wrt,) = objective.wrt
        tree = jax.tree.structure(wrt)

        def loss(params: Any) -> Any:
            return objective(tree.unflatten(jax.tree.leaves(params)))

        loss.__name__ = function_name(f)
        step = fused.fused_update(loss, optimizer.tx, has_aux=True, policy=parsed)
        return step, nnx.as_pure(wrt), nnx.as_pure(optimizer.opt_state)

    @functools.wraps(f, updated=())
    def step(model: Any, optimizer: Any, *batch: Any, **kwargs: Any) -> Any:
        with nnx.update_context(boundary.name):
            run, params, state = prepare(model, optimizer, batch, kwargs)
            params, state, (_, (value, aux, changes)) = run(params, state)
            aux = boundary.leave(aux, changes)
        nnx.update(model, params)
        nnx.update(optimizer.opt_state, nnx.state(state))
        optimizer.step[...] += 1
        return (value, aux) if has_aux else value

    def where(model: Any, optimizer: Any, *batch: Any, **kwargs: Any) -> UpdateReport:
        """Return where a step updates each parameter; the arrays may be types."""
        found: list[UpdateReport] = []

        def ask(model: Any, optimizer: Any, batch: Any, kwargs: Any) -> None:
            with nnx.update_context(boundary.name):
                run, params, state = prepare(model, optimizer, batch, kwargs)
                found.append(run.where(params, state))

        nnx.eval_shape(ask, model, optimizer, batch, kwargs)
        return found[0]

    vars(step)["where"] = where
    del vars(step)["__wrapped__"]  # its signature is not that of the loss
    return step
