"""Plan the derivative of a loss, and compile it alone.

The `grad` of the loss is compiled, or both parts of `vjp` if the loss is not scalar or `argnums` is
None.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import BudgetInfeasible
from xform.interpret.cost import aval_bytes
from xform.interpret.node import gather
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import function_name
from xform.introspection.modules import is_array_or_type
from xform.memory.report import MemoryReport
from xform.memory.targets import Target, parse_target
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.planner.bound import least_flops
from xform.planner.candidate import Candidate
from xform.planner.choice import Choice
from xform.planner.default_plan import default_plan
from xform.planner.describe import plan_of_candidate
from xform.planner.device import resolve_fit
from xform.planner.measure import Measure, known_bytes
from xform.planner.plan.plan import Plan
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.policies import Policy, min_cut, parse, policy_name
from xform.policies.budgets import Budget, Fit
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.program.fingerprint import text_of
from xform.terminal import progress_line
from xform.transforms.compiling import DerivativeCompiler
from xform.transforms.function import Tree
from xform.transforms.inspect import FlatArguments, derivative_at
from xform.transforms.outside import in_donated


def plan_loss(f: Callable[..., Any], args: Sequence[Tree], policy: Any, argnums: Any, has_aux: bool,
              target: str | None, donate_argnums: int | Sequence[int], verify: bool
              ) -> Plan:  # fmt: skip
    """Return the plan of a loss, see `xform.plan`."""
    start, parsed = time.perf_counter(), parse_target(target)
    policy = parse(min_cut if policy is None else policy)
    fitted = isinstance(policy, Fit)
    with parsed.planned_for():
        policy = resolve_fit(policy)
    sample = sample_for(policy, jax.tree.leaves(args))
    planning = progress_line.show(f"planning {function_name(f)}")
    with planning, parsed.planned_for(), at_sample(sample):
        unbounded = fitted and not isinstance(policy, Budget)
        name = f"auto, {policy_name(policy)}" if unbounded else policy_name(policy)
        donate = positions(numbers(donate_argnums, "plan", "donate_argnums"), len(args), "plan")
        call = with_arrays(LossCall(f, args, argnums, has_aux, donate), "plan")
        task = loss_task(call, parsed)

        def uncompiled_plan(candidate: Candidate) -> Plan:
            return plan_of_candidate(
                task.name, task.derivative, task.problem, name, candidate, parsed.name
            )

        def compiled_bytes(choice: Choice) -> float:
            (candidate,) = choice.candidates.values()
            return task.compile(candidate).counted_bytes

        def finished_plan(
            candidate: Candidate, compile_seconds: float = 0.0, **compiled: Any
        ) -> Plan:
            least = least_flops(task.problem, policy) if isinstance(policy, Budget) else None
            return dataclasses.replace(
                uncompiled_plan(candidate),
                least_flops=least,
                seconds=time.perf_counter() - start - compile_seconds,
                compile_seconds=compile_seconds,
                **compiled,
            )

        if not verify:
            return finished_plan(plan_program(task.problem, policy))
        known = known_bytes(task.problem, parsed.name, *task.cache_key)
        measure = Measure(compiled_bytes, known)
        candidate = _candidate(task, policy, measure)
        size = measure.bytes(Choice({"": task.problem}, {"": candidate}))
        return finished_plan(candidate, measure.seconds, compiles=measure.compiles,
                             refused=size == math.inf,
                             compiled_bytes=None if size == math.inf else int(size))  # fmt: skip


def _candidate(task: LossTask, policy: Policy, measure: Measure) -> Candidate:
    """Return the plan under a policy.

    If that is the memory of a device, XLA recomputes nothing by itself under the plan, if possible.
    """
    if isinstance(policy, Budget) and policy.device:
        limited = task.compile(default_plan(task.problem)).limit(policy)
        if limited is not policy:
            with contextlib.suppress(BudgetInfeasible):
                return plan_program(task.problem, limited, measure)
    return plan_program(task.problem, policy, measure)


@dataclasses.dataclass(frozen=True, eq=False)
class LossTask:
    """The derivative of a loss, to plan and compile.

    Attributes:
      name: the function's name.
      derivative: a description of the compiled function, such as "grad by argument 0".
      problem: the derivative as a planning problem. Its `outside_bytes` are those of the outputs
        that take the memory of donated arguments, negative.
      cache_key: what the bytes of a compiled plan depend on besides the derivative.
      compile: compiles the derivative under a plan.
    """

    name: str
    derivative: str
    problem: Problem
    cache_key: tuple[Hashable, ...]
    compile: Callable[[Candidate], MemoryReport]


def loss_task(call: LossCall, target: Target) -> LossTask:
    """Trace the derivative of a loss. Nothing is compiled yet."""
    f, args, argnums, has_aux = call.f, call.args, call.argnums, call.has_aux
    traced, arguments = derivative_at("plan", f, args, argnums, has_aux), FlatArguments(args)
    donated, arrays = arguments.indices(call.donate), arguments.arrays()
    grads = gather(traced.function.program.in_avals, traced.function.active())
    argument_positions = (
        range(len(args)) if argnums is None else positions(argnums, len(args), "plan")
    )
    scalar = argnums is not None and traced.function.signature.is_scalar
    outputs = [*([] if scalar else traced.function.signature.out_avals), *grads]
    reused = in_donated([jax.typeof(arrays[i]) for i in donated], outputs)
    donated_bytes = sum(aval_bytes(a) for a in gather(outputs, reused))

    # Each input of the program: the caller's array or type, else a constant; and its argument.
    given, known, owners = list[Any](), list[Any](), list[int | None]()
    for source in traced.sources:
        owner, x = None, source
        if isinstance(source, int):
            path, x = arguments.paths[source]
            owner = path[0].idx if is_array_or_type(x) else None
        given.append(None if owner is None else x)
        known.append(jnp.asarray(x) if owner is None else None)
        owners.append(owner)
    compiler = DerivativeCompiler(
        traced.function, given, known, "grad" if scalar else "vjp", target,
        [i for i, owner in enumerate(owners) if owner in call.donate],
    )  # fmt: skip

    shardings = text_of(([getattr(x, "sharding", None) for x in arrays], traced.sources))
    plural = "s" * (len(argument_positions) != 1)
    derivative = (
        f"{'grad' if scalar else 'vjp'} by argument{plural} "
        f"{', '.join(map(str, argument_positions))}"
    )
    problem = dataclasses.replace(
        traced.problem, outside_bytes=-donated_bytes, outside_argument_bytes=-donated_bytes
    )
    cache_key = donated, shardings, argnums is None
    return LossTask(traced.name, derivative, problem, cache_key, compiler.compile)
