"""`jit`: compile a training step within a byte budget for the whole step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from xform._jax import Tracer, trace_context
from xform.errors import OtherProgram, WrongArgument
from xform.introspection.callables import check_callable, function_name
from xform.memory.analysis import subject_of
from xform.memory.report import MemoryReport
from xform.memory.targets import parse_target
from xform.planner.device import resolve_fit
from xform.planner.idle_regions import warn_of_idle_regions
from xform.planner.plan_program import plan_program
from xform.planner.planning import use_default_policy
from xform.planner.problem import Problem
from xform.policies import min_cut, parse, policy_name
from xform.policies.budgets import Budget, Regions, bounds_peak
from xform.policies.regions import regions_of
from xform.policies.sample import check_known_sizes
from xform.policies.unused_names import warn_of_unused_names
from xform.program.ir import program
from xform.program.source import user_stacklevel
from xform.steps.call import StaticArguments, shardings
from xform.steps.plan import StepPlan
from xform.steps.planned import LoweredStep, PlannedStep
from xform.steps.program import Args, CompiledStep, Kwargs, NotPlanned, StepProgram
from xform.steps.search import StepSearch, plans_of
from xform.steps.stored import load_plan, plan_file, save_plan
from xform.storage.bounded_cache import BoundedCache
from xform.transforms.outside import with_outside_bytes
from xform.transforms.planning_task import overwritten
from xform.transforms.recorded import Chosen, Recorded, in_step_with_budget


def jit(
    step: Callable[..., Any],
    policy: Any = None,
    *,
    target: str | None = None,
    plans: str | os.PathLike[str] | None = None,
    time_limit: float | None = None,
    **options: Any,
) -> JitStep:
    """Compile a step with `jax.jit`, and plan its derivatives for a byte budget of the whole step.

    At the first call with some types, the step is traced, compiled under several plans, and the one
    that recomputes least within the budget is run. The compiler says what fits: the budget is for
    the arguments, outputs and temporary memory of the step on each device, with the arguments'
    real shardings, donation and the optimizer included. All derivatives that the step takes without
    a policy of their own share the budget.

    Args:
      step: a function as for `jax.jit`. It differentiates with `xform.grad`, `xform.value_and_grad`
        or `xform.vjp` (after `xform.install()`, with JAX's or a library's functions).
      policy: a budget of `xform.policies`, "auto" for the memory of the device, a `StepPlan` that
        an earlier call made, a `Plan`, or any other policy. It applies to derivatives without a
        policy of their own; None is `min_cut`.
      target: the name of the devices to compile for; None is JAX's default backend. Devices such
        as "gpu:h100:8" need not be attached. For these the step cannot be called: use `lower(...)`,
        and `plan` and `memory_analysis()` of its result.
      plans: a folder that keeps plans for the next process; None keeps none.
      time_limit: seconds after which no further program is compiled. The plan is then the best one
        so far, with a warning. None for no limit.
      **options: the options of `jax.jit`, such as `donate_argnums`, `static_argnames` and
        `in_shardings`.

    Returns:
      A function with the arguments and the results of `step`. It has the methods of `jax.jit`'s
      functions, `trace` and `lower`, which take types too; and `plan`, `memory_analysis()` and
      `explain(value)`, about the program that was compiled last.

      Under `jax.grad`, `jax.vmap`, `shard_map` or another `jax.jit` it behaves as `jax.jit` does,
      and a budget is ignored with a warning: the budget belongs to the outermost jit.

    Raises:
      BudgetInfeasible: at the call, if the step exceeds the budget under all plans that were tried.
        The error names the lowest bytes found and the largest buffers.
      OtherProgram: at the call, if a plan was made for another step or other types.
      WrongArgument: `step`, `policy` or `target` is unusable.

    Cost: one trace, and a compilation for each plan that is tried, at most eight; later calls with
    the same types cost what a call of `jax.jit` costs.

    >>> import optax
    >>> optimizer = optax.adam(1e-3)
    >>> def loss(ws, x):
    ...     return jnp.mean(jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0])
    >>> def step(ws, state, x):
    ...     value, grads = xform.value_and_grad(loss)(ws, x)
    ...     updates, state = optimizer.update(grads, state)
    ...     return optax.apply_updates(ws, updates), state, value
    >>> ws, x = jnp.ones((12, 64, 64)) / 64, jnp.ones((256, 64))
    >>> fast = xform.jit(step, "budget:2MiB", donate_argnums=(0, 1))
    >>> ws, state, value = fast(ws, optimizer.init(ws), x)
    >>> fast.plan.compiled_bytes <= 2 * 2**20
    True
    """
    check_callable(step, "jit")
    return JitStep(step, parse(policy), options, target=target, plans=plans, time_limit=time_limit)


class JitStep:
    """A step that `xform.jit` compiles: call it as the step, see `xform.jit`."""

    def __init__(
        self,
        step: Callable[..., Any],
        policy: Any,
        options: Mapping[str, Any],
        *,
        target: str | None = None,
        plans: str | os.PathLike[str] | None = None,
        time_limit: float | None = None,
    ):
        functools.update_wrapper(self, step)
        self._step, self._name = step, function_name(step)
        self._given_policy, self._target = policy, parse_target(target)
        self._folder, self._time_limit = plans, time_limit
        self._program = StepProgram(step, options, self._target)
        self._lock = threading.RLock()
        self._static = StaticArguments(step, options)
        self._recorded: dict[Hashable, Recorded] = BoundedCache(4)
        self._planned: dict[Hashable, PlannedStep] = BoundedCache(64)
        self._last: PlannedStep | None = None
        self._warned = False

    # Whether a step that takes no derivative must keep the budget, too.
    _limits_every_step = True

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    @functools.cached_property
    def _policy(self) -> Any:
        """The policy; the memory of the device stands for "auto"."""
        with self._target.planned_for():
            return resolve_fit(min_cut if self._given_policy is None else self._given_policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step; at the first call with some types, plan and compile it."""
        leaves = jax.tree.leaves((args, kwargs))
        last = self._last
        if last is not None and last.shardings == shardings(leaves):
            with contextlib.suppress(NotPlanned):
                return self._program.run(last.chosen, args, kwargs)
        if any(isinstance(x, Tracer) for x in leaves):
            return self._call_inside_trace(args, kwargs)
        if not self._target.local:
            raise WrongArgument(
                f"a call of {self._name}, which xform.jit compiles for {self._target.name!r}",
                "the devices of this target are not attached to this process",
                "",
                "call lower(...) with arrays or jax.ShapeDtypeStructs, or leave target out",
            )
        with contextlib.suppress(NotPlanned):
            return self._program.run(self._plan_for(args, kwargs).chosen, args, kwargs)
        # A setting of JAX has changed since the step was planned for these types.
        return self._program.run(self._plan_for(args, kwargs, again=True).chosen, args, kwargs)

    @property
    def _is_for_whole_step(self) -> bool:
        """Whether the policy is for all derivatives together, not for each by itself."""
        return isinstance(self._policy, StepPlan) or bounds_peak(self._policy)

    def _call_inside_trace(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the step as a part of a program that is being traced."""
        if self._is_for_whole_step:
            self._warn_of_outer_trace()
            return self._program.jitted(*args, **kwargs)
        with use_default_policy(self._policy):
            return self._program.jitted(*args, **kwargs)

    def _warn_of_outer_trace(self) -> None:
        """Warn once that a budget does nothing inside another transformation.

        Inside another step with a budget there is no warning, as the budget of that step counts.
        """
        if in_step_with_budget() or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self._name} is called inside another transformation, so {self._policy!r} is "
            "ignored: it limits the memory of a whole compiled program. Give the budget to "
            "xform.jit of the outermost function",
            stacklevel=user_stacklevel(),
        )

    def _plan_for(self, args: Args, kwargs: Kwargs, again: bool = False) -> PlannedStep:
        """The plan for some arguments or types: a known one, one from disk, or a new one.

        With `again`, a known one is not used.
        """
        with self._lock:
            where = tuple(shardings(jax.tree.leaves((args, kwargs))))
            key = self._static.types(args, kwargs), where
            if again or key not in self._planned:
                self._planned[key] = self._decide(args, kwargs)
                for recorded in self._recorded.values():
                    recorded.free_fronts()
            self._last = self._planned[key]
            return self._last

    def _decide(self, args: Args, kwargs: Kwargs) -> PlannedStep:
        """Apply the policy to each derivative, or search for plans within its budget."""
        policy = self._policy
        if isinstance(policy, StepPlan):
            recorded = self._record(min_cut, args, kwargs)
            return self._follow(policy, recorded, args, kwargs)
        if bounds_peak(policy):
            return self._search(policy, args, kwargs)
        recorded = self._record(policy, args, kwargs)
        for problem in recorded.problems.values():
            warn_of_unused_names(policy, problem.marked, f"a derivative in {self._name}")
            warn_of_idle_regions(policy, problem, f"a derivative in {self._name}")
        return self._keep_defaults(policy, recorded, args, kwargs)

    def _record(self, default: Any, args: Args, kwargs: Kwargs) -> Recorded:
        """The step, traced once for all calls with the same types and settings of JAX."""
        key = self._static.types(args, kwargs), trace_context()
        if key not in self._recorded:
            has_budget = self._is_for_whole_step
            self._recorded[key] = self._program.record(default, has_budget, args, kwargs)
        return self._recorded[key]

    def _keep_defaults(
        self, policy: Any, recorded: Recorded, args: Args, kwargs: Kwargs
    ) -> PlannedStep:
        """Keep the plans that the derivatives got in the recorded step, each under `policy`."""
        chosen, target = Chosen(recorded, recorded.defaults), self._target
        traced = self._program.trace(chosen, args, kwargs)

        def plan() -> StepPlan:
            problems = self._problems(chosen, traced, regions_of(policy))
            name = policy_name(policy)
            plans = plans_of(chosen.candidates, problems, self._name, name, target)
            return StepPlan(self._name, name, target.name, plans, None, 0)

        if target.local:
            compile_ = lambda: self._program.compile_traced(chosen, traced)
            return self._planned_step(chosen, plan, compile_, args, kwargs)
        compiled = self._program.compile(chosen, args, kwargs)
        return self._planned_step(chosen, plan, lambda: compiled, args, kwargs)

    def _problems(self, chosen: Chosen, traced: Any, regions: Regions) -> dict[str, Problem]:
        """The derivatives of a step, with the bytes that it holds outside of them.

        `traced` is JAX's `Traced` object of the step under the plans `chosen`.
        """
        whole = program(traced.jaxpr)
        return with_outside_bytes(
            chosen, whole, self._target.backend, regions, overwritten(traced, whole)
        )

    def _search(self, policy: Budget, args: Args, kwargs: Kwargs) -> PlannedStep:
        """Follow the plan that is on disk, or search for a plan."""
        request = f"policy={policy!r} of {self._program.jitted.__name__} in xform.jit"
        check_known_sizes(request, (args, kwargs))
        start = time.perf_counter()
        default = dataclasses.replace(min_cut, regions=policy.regions)
        recorded = self._record(default, args, kwargs)
        if not recorded.derivatives and not self._limits_every_step:
            return self._keep_defaults(default, recorded, args, kwargs)
        chosen = Chosen(recorded, recorded.defaults)
        traced = self._program.trace(chosen, args, kwargs)
        where = shardings(jax.tree.leaves((args, kwargs)))
        file = plan_file(self._folder, traced, where, policy, self._target)
        stored = load_plan(file)
        if stored is not None and recorded.derivatives.keys() == stored.plans.keys():
            followed = self._follow(stored, recorded, args, kwargs)
            total = followed.compiled.compilation.total_bytes
            if total is not None and total <= policy.bytes:
                return followed
        problems = self._problems(chosen, traced, policy.regions)
        search = StepSearch(self._program, args, kwargs, policy, recorded, problems,
                            self._time_limit, start)  # fmt: skip
        # The plans of slices depend on the device. For local devices, JAX would trace once more.
        with contextlib.nullcontext() if self._target.local else self._target.planned_for():
            plan, chosen, compiled = search.run()
        save_plan(file, plan)
        return self._planned_step(chosen, lambda: plan, lambda: compiled, args, kwargs)

    def _follow(
        self, plan: StepPlan, recorded: Recorded, args: Args, kwargs: Kwargs
    ) -> PlannedStep:
        """Compile the recorded step under a plan that was made before."""
        problems = recorded.problems
        if not problems.keys() <= plan.plans.keys():
            raise OtherProgram(
                f"xform.jit of a step under a StepPlan of {len(plan.plans)} derivatives",
                "the step takes a derivative that the plan does not have",
                "",
                "make a new plan: give xform.jit a budget, and call the step",
            )
        candidates = {k: plan_program(problem, plan.plans[k]) for k, problem in problems.items()}
        chosen = Chosen(recorded, candidates)
        compiled = self._program.compile(chosen, args, kwargs)
        return self._planned_step(chosen, lambda: plan, lambda: compiled, args, kwargs)

    def _planned_step(
        self,
        chosen: Chosen,
        plan: Callable[[], StepPlan],
        compile_: Callable[[], CompiledStep],
        args: Args,
        kwargs: Kwargs,
    ) -> PlannedStep:
        """A step that was planned for some arguments, whose arrays it does not keep."""
        where = shardings(jax.tree.leaves((args, kwargs)))
        subject = subject_of(self._step, args, kwargs)
        report = lambda compiled: dataclasses.replace(compiled.compilation, **subject)
        return PlannedStep(chosen, where, plan, compile_, report)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Plan for arrays or types; return JAX's `Traced` object of the step under that plan."""
        return self._program.trace(self._plan_for(args, kwargs).chosen, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredStep:
        """Plan for arrays or types; return the lowered step under that plan.

        The result has `plan`, `memory_analysis()` and the methods of JAX's `Lowered` object. A
        search for a budget compiles, and `compile()` does not compile again. For a `target` that is
        not here it has `plan` and `memory_analysis()` alone.
        """
        return LoweredStep(self._name, self._plan_for(args, kwargs))

    @property
    def plan(self) -> StepPlan:
        """The plans of the program that was planned last.

        Raises:
          WrongArgument: no program was planned.
        """
        return self._planned_last("plan").plan

    def memory_analysis(self) -> MemoryReport:
        """A report of the program that was planned last; nothing is compiled again.

        Raises:
          WrongArgument: no program was planned.
        """
        return self._planned_last("memory_analysis").report

    def __getattr__(self, name: str) -> Any:
        """JAX's other methods of a jitted function, such as `eval_shape` and `clear_cache`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._program.jitted, name)

    def explain(self, value: str) -> str:
        """Explain why a value is saved or not, see `Plan.explain`."""
        return self.plan.explain(value)

    def _planned_last(self, request: str) -> PlannedStep:
        if self._last is None:
            raise WrongArgument(
                f"{request} of xform.jit of {self._name}",
                "it was not called yet",
                "",
                "call it first, or call lower(...) with types",
            )
        return self._last
