"""`jit`: compile a training step within a byte budget for the whole step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import threading
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
from xform.memory.sharding import on_mesh
from xform.memory.targets import parse_target
from xform.planner.choice import Problems
from xform.planner.device import resolve_fit
from xform.planner.idle_regions import warn_of_idle_regions
from xform.planner.plan_program import plan_program
from xform.planner.planning import use_default_policy
from xform.planner.problem import Problem
from xform.policies import min_cut, parse, policy_name
from xform.policies.budgets import Budget, Regions, bounds_peak
from xform.policies.regions import regions_of
from xform.policies.sample import sample_for
from xform.policies.unused_names import warn_of_unused_names
from xform.program.dimensions import at_sample, current_sample
from xform.program.ir import program
from xform.program.source import user_stacklevel
from xform.steps.call import StaticArguments, StepCall, shardings
from xform.steps.planned import LoweredStep, PlannedStep
from xform.steps.program import Args, CompiledStep, Kwargs, NotPlanned, StepProgram
from xform.steps.search import StepSearch, plans_of, search_without_compiler
from xform.steps.step import TrainingStep
from xform.steps.step_plan import StepPlan
from xform.steps.stored import load_plan, plan_file, save_plan
from xform.storage.bounded_cache import BoundedCache
from xform.transforms.outside import overwritten, with_outside_bytes
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
      `explain(value)`, about the program that was compiled last. Its `under(policy, target)` is the
      same step under another policy or for other devices. `xform.plan`, `xform.compare` and
      `xform.pareto` take it, and plan or compare it without running it.

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


class JitStep(TrainingStep):
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
        self._step, self._name, self._options = step, function_name(step), options
        self._given_policy, self._target, self._verify = policy, parse_target(target), True
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

    def under(self, policy: Any, target: str | None = None, verify: bool = True) -> JitStep:
        """Return this step under another policy, or for other devices.

        The result shares the traced programs of this step, and the programs that JAX has compiled
        for it, if the devices are the same.

        Args:
          policy: as for `xform.jit`; None keeps the policy of the step.
          target: the name of the devices; None keeps those of the step.
          verify: whether the compiler measures the plans of a budget.
        """
        other = copy.copy(self)
        vars(other).pop("_policy", None)
        other._planned, other._last, other._verify = BoundedCache(64), None, verify
        if policy is not None:
            other._given_policy = parse(policy)
        if target is not None and parse_target(target) != self._target:
            other._target = parse_target(target)
            other._program = StepProgram(self._step, self._options, other._target)
            other._recorded = BoundedCache(4)
        return other

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
                self._planned[key] = self._decide(StepCall(args, kwargs))
                for recorded in self._recorded.values():
                    recorded.free_fronts()
            self._last = self._planned[key]
            return self._last

    def _decide(self, call: StepCall) -> PlannedStep:
        """Apply the policy to each derivative, or search for plans within its budget."""
        policy = self._policy
        if isinstance(policy, StepPlan):
            return self._follow(policy, self._record(min_cut, call), call)
        if bounds_peak(policy):
            with at_sample(sample_for(policy, jax.tree.leaves((call.args, call.kwargs)))):
                return self._search(policy, call)
        recorded = self._record(policy, call)
        for problem in recorded.problems.values():
            warn_of_unused_names(policy, problem.marked, f"a derivative in {self._name}")
            warn_of_idle_regions(policy, problem, f"a derivative in {self._name}")
        return self._keep_defaults(policy, recorded, call)

    def _record(self, default: Any, call: StepCall) -> Recorded:
        """The step, traced once for all calls with the same types and settings of JAX."""
        key = self._static.types(call.args, call.kwargs), trace_context(), default
        if key not in self._recorded:
            has_budget = self._is_for_whole_step
            recorded = self._program.record(default, has_budget, call.args, call.kwargs)
            self._recorded[key] = recorded
        return self._recorded[key]

    def _keep_defaults(self, policy: Any, recorded: Recorded, call: StepCall) -> PlannedStep:
        """Keep the plans that the derivatives got in the recorded step, each under `policy`."""
        chosen = Chosen(recorded, recorded.defaults)
        traced = self._program.trace(chosen, call.args, call.kwargs)
        problems = lambda: self._problems(chosen, traced, regions_of(policy))
        return self._compiled_later(policy, chosen, problems, call)

    def _compiled_later(
        self, policy: Any, chosen: Chosen, problems: Callable[[], Problems], call: StepCall
    ) -> PlannedStep:
        """Return a planned step that is compiled if someone asks for its bytes, or calls it."""
        seconds, sample = call.seconds, current_sample()

        def plan() -> StepPlan:
            name = policy_name(policy)
            plans = plans_of(chosen.candidates, problems(), self._name, name, self._target)
            return StepPlan(self._name, name, self._target.name, plans, None, 0, seconds)

        if self._target.local:
            traced = self._program.trace(chosen, call.args, call.kwargs)
            now = lambda: self._program.compile_traced(chosen, traced)
        else:
            types = on_mesh(call.args, call.kwargs, self._target, None, None)
            now = lambda: self._program.compile(chosen, types.args, types.kwargs)

        def compile_() -> CompiledStep:
            with at_sample(sample):
                return now()

        return self._planned_step(chosen, problems, plan, compile_, call)

    def _problems(self, chosen: Chosen, traced: Any, regions: Regions) -> dict[str, Problem]:
        """The derivatives of a step, with the bytes that it holds outside of them.

        `traced` is JAX's `Traced` object of the step under the plans `chosen`.
        """
        whole = program(traced.jaxpr)
        return with_outside_bytes(
            chosen, whole, self._target.backend, regions, overwritten(traced, whole)
        )

    def _search(self, policy: Budget, call: StepCall) -> PlannedStep:
        """Follow the plan that is on disk, or search for a plan."""
        args, kwargs = call.args, call.kwargs
        default = dataclasses.replace(min_cut, regions=policy.regions)
        recorded = self._record(default, call)
        if not recorded.derivatives and not self._limits_every_step:
            return self._keep_defaults(default, recorded, call)
        chosen = Chosen(recorded, recorded.defaults)
        traced = self._program.trace(chosen, args, kwargs)
        if not (policy.verify and self._verify):
            problems = self._problems(chosen, traced, policy.regions)
            with self._planned_for():
                found = search_without_compiler(problems, policy, self._target)
            return self._compiled_later(policy, Chosen(recorded, found), lambda: problems, call)
        where = shardings(jax.tree.leaves((args, kwargs)))
        file = plan_file(self._folder, traced, where, policy, self._target)
        stored = load_plan(file)
        if stored is not None and recorded.derivatives.keys() == stored.plans.keys():
            followed = self._follow(stored, recorded, call)
            total = followed.compiled.compilation.total_bytes
            if total is not None and total <= policy.bytes:
                return followed
        problems = self._problems(chosen, traced, policy.regions)
        search = StepSearch(self._program, args, kwargs, policy, recorded, problems,
                            self._time_limit, call.start)  # fmt: skip
        with self._planned_for():
            plan, chosen, compiled = search.run()
        save_plan(file, plan)
        return self._planned_step(chosen, lambda: problems, lambda: plan, lambda: compiled, call)

    def _planned_for(self) -> contextlib.AbstractContextManager[None]:
        """A context for the search: the plans of slices depend on the device.

        For local devices, JAX would trace once more.
        """
        return contextlib.nullcontext() if self._target.local else self._target.planned_for()

    def _follow(self, plan: StepPlan, recorded: Recorded, call: StepCall) -> PlannedStep:
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
        compiled = self._program.compile(chosen, call.args, call.kwargs)
        return self._planned_step(chosen, lambda: problems, lambda: plan, lambda: compiled, call)

    def _planned_step(
        self,
        chosen: Chosen,
        problems: Callable[[], Problems],
        plan: Callable[[], StepPlan],
        compile_: Callable[[], CompiledStep],
        call: StepCall,
    ) -> PlannedStep:
        """A step that was planned for some arguments, whose arrays it does not keep."""
        where = shardings(jax.tree.leaves((call.args, call.kwargs)))
        subject = subject_of(self._step, call.args, call.kwargs)
        return PlannedStep(chosen, where, self._policy, subject, problems, plan, compile_)

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
