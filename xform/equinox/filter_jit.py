"""`xform.equinox.filter_jit`: compile a training step of Equinox modules within a byte budget."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx

from xform.equinox.filter_calls import Function, TransformedFunction, accepts_options_only
from xform.introspection.callables import check_callable
from xform.memory.report import MemoryReport
from xform.steps.doors import PlannedFunction, PlannedLowered
from xform.steps.function import FunctionStep
from xform.steps.jit import JitStep, jit


class _FilteredStep(TransformedFunction, PlannedFunction):
    """The function that `filter_jit` returns. `_fun` is the one of Equinox, which calls `_step`."""

    _step: JitStep = eqx.field(static=True)
    _named: FunctionStep = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Function:
        return self._fun.__wrapped__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._fun(*args, **kwargs)

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> Any:
        step = self._step.under(policy, target, verify)
        named = self._named.under(policy, target, verify)
        return _FilteredStep(dataclasses.replace(self._fun, _cached=step), step, named)

    def report_for(
        self, target: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> MemoryReport:
        # In `_step`, arguments have no names.
        first, rest = self._fun.donate_first, self._fun.donate_rest
        donate = [i for i in range(len(args)) if (rest if i else first)]
        return self._named.donating(donate).report_for(target, args, kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> PlannedLowered:
        return PlannedLowered(self._fun.lower(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fun, name)  # such as `donate_rest`


@accepts_options_only
def filter_jit(fun: Function, policy: Any = None, *, donate: str = "none",
               target: str | None = None, plans: str | os.PathLike[str] | None = None,
               time_limit: float | None = None, **options: Any) -> Function:  # fmt: skip
    """Compile a step as `eqx.filter_jit` does, within a byte budget for the whole step.

    It is `xform.jit` for functions of Equinox modules: the budget is for the arguments, outputs and
    temporary memory of the compiled step on each device. All arrays are traced, and all other
    values are static, in `fun` itself, its arguments and its results.

    Args:
      fun: function of any pytrees. It differentiates with `xform.equinox` (after `xform.install()`,
        with `eqx.filter_grad` and others). Without `fun`, a decorator is returned.
      policy: a budget of `xform.policies`, "auto", a plan, or another policy, as in `xform.jit`.
        It applies to derivatives without a policy of their own; None is `min_cut`.
      donate: the arrays whose memory may be reused: "all", "all-except-first" (those of the first
        argument), the same with a warning about arrays that cannot be reused, "warn" and
        "warn-except-first", or "none".
      target: the name of the devices to compile for; None is JAX's default backend.
      plans: a folder that keeps plans for the next process; None keeps none.
      time_limit: seconds after which no further program is compiled; None for no limit.
      **options: the other options of `eqx.filter_jit`, such as `inline`.

    Returns:
      A function with the arguments and results of `fun`, also for use as a method. It has
      `lower(...)`, which takes arrays, and `plan`, `memory_analysis()` and `explain(value)`, about
      the program that was compiled last. The result of `lower` has `plan` and `memory_analysis()`.

    Raises:
      WrongArgument: `policy` or `target` is unusable.
      ValueError: `donate` or an option is unknown.
      BudgetInfeasible, OtherProgram: at the call, as in `xform.jit`.

    Cost: as `xform.jit`; later calls with the same types cost what they cost in Equinox.

    >>> import equinox as eqx
    >>> model = eqx.nn.MLP(64, 64, 64, 4, activation=jnp.sin, key=jax.random.key(0))
    >>> @xform.equinox.filter_jit(policy="budget:2MiB", donate="all-except-first")
    ... def step(x, model):
    ...     loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    ...     value, grads = xform.equinox.filter_value_and_grad(loss)(model)
    ...     return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), value
    >>> model, value = step(jnp.ones((256, 64)), model)
    >>> step.plan.compiled_bytes <= 2 * 2**20, model.activation is jnp.sin
    (True, True)
    """
    check_callable(fun, "xform.equinox.filter_jit")
    filtering: Any = eqx.filter_jit(fun, donate=donate, **options)  # pyright: ignore
    # Equinox's function divides all arguments into arrays to donate, other arrays, and static
    # values. It gives these three to a function made by `jax.jit`, which `step` replaces.
    donated, static = 0, 2
    step = jit(
        filtering._cached.__wrapped__,
        policy,
        target=target,
        plans=plans,
        time_limit=time_limit,
        donate_argnums=donated,
        static_argnums=static,
        **options,
    )
    named = FunctionStep(fun).under(policy, target)
    return _FilteredStep(dataclasses.replace(filtering, _cached=step), step, named)
