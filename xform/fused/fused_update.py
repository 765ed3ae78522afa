"""`fused_update`: a training step that updates each parameter within the backward pass."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform._jax import staging
from xform.errors import WrongArgument, WrongDtype
from xform.fused.coupling import check_coupling
from xform.fused.fused_step import TracedStep, trace_step
from xform.fused.run_update import run_step
from xform.fused.update_plan import plan_updates
from xform.fused.update_report import UpdateReport, report
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import check_callable, function_name
from xform.introspection.modules import (
    is_inexact_array,
    nnx_object,
    take_static_out_of_modules,
)
from xform.policies import parse
from xform.program.arithmetic import differentiable
from xform.program.ir import evaluate, trace
from xform.program.source import frame
from xform.transforms.function import as_array
from xform.transforms.reverse import value_and_grad

Tree = Any


class FusedUpdate:
    """A training step that `fused_update` returns: `step(params, state, *batch)`.

    `step.where(params, state, *batch)` tells where it updates each parameter.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        optimizer: Any,
        argnums: int | Sequence[int],
        has_aux: bool,
        policy: Any,
    ):
        if not callable(getattr(optimizer, "update", None)):
            raise WrongArgument(
                f"fused_update of {function_name(loss)}",
                f"the optimizer is of type {type(optimizer).__name__}, which has no update", "",
                "pass an optimizer of Optax, such as optax.sgd(0.1)",
            )  # fmt: skip
        self._optimizer, self._argnums, self._has_aux = optimizer, argnums, has_aux
        self._value_and_grad = value_and_grad(loss, argnums, has_aux, policy=policy)
        functools.update_wrapper(self, loss, updated=())
        self.__signature__ = inspect.signature(self.__call__)  # not that of the loss

    def __call__(
        self, params: Tree, state: Tree, *batch: Any, **kwargs: Any
    ) -> tuple[Tree, Tree, Any]:
        """Return the new parameters, the new optimizer state, and the value of the loss."""
        traced = self._trace(params, state, batch, kwargs)
        plan = plan_updates(traced.step)
        run = functools.partial(run_step, traced.step, plan)
        if staging():
            return traced.results(run(traced.inputs))
        # As a program, the step frees each value after its last use.
        prog = trace(lambda *inputs: run(inputs), *traced.inputs)
        outputs = [as_array(x, "fused_update") for x in evaluate(prog, traced.inputs)]
        return traced.results(outputs)

    def where(self, params: Tree, state: Tree, *batch: Any, **kwargs: Any) -> UpdateReport:
        """Return where a step updates each parameter.

        The arguments are those of the step. Instead of arrays they may have `ShapeDtypeStruct`s.
        """
        found: list[UpdateReport] = []

        def step(params: Tree, state: Tree, batch: Any) -> None:
            traced = self._trace(params, state, batch, kwargs)
            found.append(report(traced.step, plan_updates(traced.step)))

        jax.eval_shape(step, params, state, batch)
        return found[0]

    def _trace(self, params: Tree, state: Tree, batch: Sequence[Any], kwargs: Any) -> TracedStep:
        """Trace the step, and check that each parameter can be updated on its own."""
        if module := nnx_object((params, state, batch)):
            raise WrongArgument(
                f"fused_update with an argument of type {type(module).__name__}",
                "it is an object of Flax NNX, which a step changes in place",
                "",
                "use xform.flax.fused_update(loss), and call its step with the module and the "
                "nnx.Optimizer",
            )
        several = not isinstance(self._argnums, int)
        n = len(self._argnums) if isinstance(self._argnums, Sequence) else 1
        at = positions(self._argnums, len(batch) + n, "fused_update")
        if several and (not isinstance(params, tuple) or len(params) != n):
            raise WrongArgument(
                f"fused_update with argnums={self._argnums}",
                f"the parameters are of type {type(params).__name__}, not a tuple of {n}",
                "",
                "pass a tuple with one pytree for each position in argnums",
            )

        def gradient(params: Tree) -> Any:
            params = restore(params)
            given = dict(zip(at, params if several else (params,), strict=True))
            rest = iter(batch)
            args = [given[i] if i in given else next(rest) for i in range(len(batch) + n)]
            return self._value_and_grad(*args, **kwargs)

        # Static leaves of Equinox modules are neither differentiated nor updated.
        restore, (params,) = take_static_out_of_modules(
            lambda params: params, (params,), is_inexact_array
        )
        params = jax.tree.map(_parameter, params)
        try:
            traced = trace_step(gradient, self._optimizer, params, state, self._has_aux)
        except (AttributeError, TypeError, ValueError) as error:
            self._check_state(params, state, error)
            raise
        check_coupling(traced.step, state, frame())

        def results(outputs: Sequence[Any]) -> tuple[Tree, Tree, Tree]:
            new, *rest = traced.results(outputs)
            return restore(new), *rest

        return dataclasses.replace(traced, results=results)

    def _check_state(self, params: Tree, state: Tree, error: Exception) -> None:
        """Raise WrongArgument if the optimizer has no such state; `error` came of using it."""
        expected = jax.tree.structure(jax.eval_shape(self._optimizer.init, params))
        if jax.tree.structure(state) != expected:
            raise WrongArgument(
                "fused_update",
                "the second argument of the step is not a state of this optimizer for these "
                "parameters",
                frame(),
                "call step(params, state, *batch) with state = optimizer.init(params), or the "
                "state that the step before returned",
            ) from error


def _parameter(x: Any) -> Any:
    """Return a leaf of the parameters as an array; raise WrongDtype if it is an integer."""
    x = as_array(x, "fused_update")
    if not differentiable(jax.typeof(x)):
        raise WrongDtype(
            "fused_update",
            f"a parameter is of type {jax.typeof(x).str_short()}, which has no gradient",
            "",
            "pass it to the loss as another argument, or make it a float",
        )
    return x


def fused_update(
    loss: Callable[..., Any],
    optimizer: Any,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    policy: Any = None,
) -> FusedUpdate:
    """Return a training step that updates each parameter within the backward pass.

    The separate update needs the gradient of all parameters at one time. This step updates a
    parameter as soon as its own gradient is complete, so the gradient can be freed at once. The
    parameters of layers that run in a `lax.scan` are stacked along their first axis. The step
    updates them one layer at a time, in the loop of the backward pass, and overwrites them in
    place. So there is no stack of gradients, and no second stack of parameters.

    A loop can do so if the update treats each layer on its own, as that of sgd, adam, adamw or
    lion. xform proves this from the traced update. If an update needs all layers of a stack, as
    that of adafactor or Muon, it follows the loop. `step.where(...)` returns where each parameter
    is updated, why, and how many bytes of its gradient exist at one time.

    Jit the step and donate the parameters and the state, or XLA has to copy them:
    `jax.jit(step, donate_argnums=(0, 1))`.

    `xform.flax.fused_update(loss)` takes no optimizer: its step gets an NNX module and the module's
    `nnx.Optimizer`, which holds the optimizer and its state.

    Args:
      loss: pure function of pytrees of arrays that returns a scalar.
      optimizer: an `optax.GradientTransformation`. Its `update` is called with the gradient, the
        state and the parameters. An `optax.GradientTransformationExtraArgs` also gets
        `value=`, the value of the loss, and with `has_aux` the auxiliary value as `aux=`.
      argnums: position or positions of the parameters among the arguments of `loss`.
      has_aux: whether `loss` returns a pair `(output, auxiliary)`.
      policy: which values the forward pass saves for the backward pass, as in `xform.grad`. A
        budget limits the derivative alone, and counts a complete gradient. Give the budget of a
        whole step to `xform.jit` instead.

    Returns:
      A function `step(params, state, *batch)` that returns the new parameters, the new state and
      the value of the loss, or `(value, auxiliary)` with `has_aux`. `params` are the arguments at
      `argnums`, as a tuple if `argnums` is a sequence; `batch` are the other arguments of `loss`.
      Keyword arguments are passed to `loss`.

    Raises:
      CoupledUpdate: the update of a parameter reads the gradients of others, such as the norm of
        `optax.clip_by_global_norm`. `xform.clip_by_previous_global_norm` does not. Optimizers that
        accumulate gradients over steps raise this error too.
      NotScalar: `loss` returned something other than a scalar.
      WrongDtype: a parameter is an integer. Pass it as another argument.

    Cost: one gradient and one update. Tracing takes one more pass over the step.
    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
    Resources", arXiv:2306.09782, section 3.

    >>> import optax
    >>> optimizer = optax.sgd(0.5)
    >>> step = xform.fused_update(lambda w, x: (w * x) ** 2, optimizer)
    >>> w = jnp.float32(1)
    >>> w, state, value = jax.jit(step)(w, optimizer.init(w), 3.0)
    >>> float(w), float(value)
    (-8.0, 9.0)
    """
    check_callable(loss, "fused_update")
    numbers(argnums, "fused_update", "argnums")
    return FusedUpdate(loss, optimizer, argnums, has_aux, parse(policy))
