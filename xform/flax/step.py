"""`xform.flax.jit`: compile a training step of NNX modules within a byte budget.

NNX's `nnx.jit` converts modules to arrays, calls a function made by `jax.jit`, and writes the
changes back. Here a function made by `xform.jit` takes the place of the function made by `jax.jit`.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import os
import types
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from xform.flax.calls import accepts_nnx_calls
from xform.introspection.callables import check_callable
from xform.modules.boundary import Function
from xform.steps import jit as steps
from xform.steps.doors import PlannedFunction, PlannedLowered


@accepts_nnx_calls(n_required=1)
def jit(fun: Function, policy: Any = None, *, target: str | None = None,
        plans: str | os.PathLike[str] | None = None, time_limit: float | None = None,
        **options: Any) -> ModuleStep:  # fmt: skip
    """Compile a step as `nnx.jit` does, within a byte budget for the whole step.

    It is `xform.jit` for functions of NNX modules: the budget is for the arguments, outputs and
    temporary memory of the compiled step on each device. The arrays of all modules, optimizers,
    metrics and random counters are arguments of that program.

    Args:
      fun: function of modules and pytrees of arrays. It may change the state of its arguments.
        It differentiates with `xform.flax` (after `xform.install()`, with `nnx.grad` and others).
        Without `fun`, a decorator is returned.
      policy: a budget of `xform.policies`, "auto", a plan, or another policy, as in `xform.jit`.
        It applies to derivatives without a policy of their own; None is `min_cut`.
      target: the name of the devices to compile for; None is JAX's default backend.
      plans: a folder that keeps plans for the next process; None keeps none.
      time_limit: seconds after which no further program is compiled; None for no limit.
      **options: the options of `nnx.jit`, such as `donate_argnames`, `static_argnums`,
        `in_shardings`, `graph` and `graph_updates`.

    Returns:
      A function with the arguments and results of `fun`, which writes changes of state to the
      caller's objects. It has the methods of `nnx.jit`'s functions, and `plan`,
      `memory_analysis()` and `explain(value)`, about the program that was compiled last. `lower`
      also takes abstract modules, such as `nnx.eval_shape` makes. Its result has `plan` and
      `memory_analysis()` too.

    Raises:
      WrongArgument: `fun` is a bound method of a module, or `policy` or `target` is unusable.
      BudgetInfeasible, OtherProgram: at the call, as in `xform.jit`. Then nothing was changed.

    Cost: as `xform.jit`; later calls with the same types cost what a call of `nnx.jit` costs.

    >>> import optax
    >>> from flax import nnx
    >>> model = nnx.Sequential(*[nnx.Linear(64, 64, rngs=nnx.Rngs(i)) for i in range(4)])
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> loss = lambda model, x: jnp.mean(jnp.sin(model(x)) ** 2)
    >>> @xform.flax.jit(policy="budget:2MiB", donate_argnums=(0, 1))
    ... def step(model, optimizer, x):
    ...     value, grads = xform.flax.value_and_grad(loss)(model, x)
    ...     optimizer.update(model, grads)
    ...     return value
    >>> value = step(model, optimizer, jnp.ones((256, 64)))
    >>> step.plan.compiled_bytes <= 2 * 2**20, int(optimizer.step[...])
    (True, 1)
    """
    check_callable(fun, "xform.flax.jit")
    converting: Any = nnx.jit(fun, **options)
    pure = converting.jitted_fn.__wrapped__  # the function of arrays that NNX gives to `jax.jit`
    step = steps.jit(pure, policy, target=target, plans=plans, time_limit=time_limit,
                     **_options_of_arrays(converting, pure, options))  # fmt: skip
    converting.jitted_fn = _StepInUse()
    return ModuleStep(converting, step)


# The step of the `ModuleStep` that is called.
_IN_USE: contextvars.ContextVar[steps.JitStep] = contextvars.ContextVar("in_use")


class _StepInUse:
    """What NNX's function calls instead of a function of `jax.jit`: the step that is in use.

    Steps under several policies share NNX's function, because it identifies a call by itself.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _IN_USE.get()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(_IN_USE.get(), name)


class ModuleStep(PlannedFunction):
    """The function that `xform.flax.jit` returns: call it as the step.

    Args:
      converting: NNX's function, which converts modules to arrays and calls the step in use.
      step: the step as a function of arrays.
    """

    def __init__(self, converting: Any, step: steps.JitStep):
        functools.update_wrapper(self, converting.fun, updated=())
        self._converting, self._step = converting, step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step and update its arguments; at the first call with some types, plan it."""
        return self._using_step(self._converting)(*args, **kwargs)

    def _using_step(self, function: Function) -> Function:
        """Return NNX's function, or a method of it, such that it calls the step of this object."""

        def call(*args: Any, **kwargs: Any) -> Any:
            token = _IN_USE.set(self._step)
            try:
                return function(*args, **kwargs)
            finally:
                _IN_USE.reset(token)

        return call

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> ModuleStep:
        """Return this step under another policy, or for other devices, see `JitStep.under`."""
        return ModuleStep(self._converting, self._step.under(policy, target, verify))

    def lower(self, *args: Any, **kwargs: Any) -> PlannedLowered:
        """Plan and compile for modules or abstract modules; return the lowered step."""
        return PlannedLowered(self._using_step(self._converting.lower)(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """NNX's other methods of a jitted function, such as `trace` and `eval_shape`."""
        if name.startswith("_"):
            raise AttributeError(name)
        attribute = getattr(self._converting, name)
        return self._using_step(attribute) if inspect.ismethod(attribute) else attribute


def _options_of_arrays(converting: Any, pure: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `jax.jit` for `pure`, whose outputs are the state and the result."""
    own = {k: v for k, v in options.items() if k not in ("graph", "graph_updates")}
    if hasattr(pure, "update_shardings"):  # without graph updates: the result, changed Variables
        updates = list(pure.update_shardings)
        return own | {"out_shardings": (options.get("out_shardings"), updates)}
    arguments = _shardings_of_states(converting.in_shardings)
    keywords = converting.kwarg_shardings
    return own | {
        "static_argnums": converting.static_argnums,
        "in_shardings": converting.jax_in_shardings,
        "out_shardings": (arguments, keywords, converting.jax_out_shardings),
    }


def _shardings_of_states(shardings: Any) -> Any:
    """Replace each `nnx.StateSharding` by the shardings of the states that it makes."""
    split = lambda x: (
        nnx.NodeStates.from_prefixes(x.shardings, metadata=x)
        if isinstance(x, nnx.StateSharding)
        else x
    )
    return jax.tree.map(split, shardings)
