"""What `xform.plan` plans and compiles: a derivative, and the program around it.

A step, such as a training step, takes derivatives itself. `policy_argument` names its parameter
that takes the policy of one of these derivatives. This derivative is planned, and the whole step is
compiled. Without `policy_argument` the function is a loss. Its `grad` is compiled, or both parts of
`vjp` if it is not scalar or `argnums` is None.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from xform.errors import NotOneDerivative, WrongArgument
from xform.interpret.cost import aval_bytes
from xform.interpret.node import gather
from xform.introspection.argnums import numbers, positions
from xform.introspection.callables import (
    check_parameter,
    definition_site,
    function_name,
    record_transform,
)
from xform.introspection.modules import is_array_or_type
from xform.memory.compilation import compile_for, trace_for
from xform.memory.report import MemoryReport
from xform.memory.targets import Target
from xform.modules import with_arrays
from xform.modules.loss_call import LossCall
from xform.planner.candidate import Candidate
from xform.planner.describe import plan_of_candidate
from xform.planner.measure import Measure
from xform.planner.plan_program import plan_program
from xform.planner.planning import current_planner, use_planner
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness, simulate
from xform.policies import Policy, min_cut
from xform.policies.budgets import Regions
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import Mask, Program, program
from xform.transforms.compiling import DerivativeCompiler
from xform.transforms.function import Tree
from xform.transforms.inspect import FlatArguments, derivative_at
from xform.transforms.reverse import value_and_grad


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningTask:
    """A derivative and the program around it.

    Attributes:
      name: the function's name.
      derivative: a description of the compiled function, such as "grad by argument 0".
      problem: the derivative as a planning problem. Its `outside_bytes` estimate the bytes that
        values outside the derivative take at its peak.
      outside_argument_bytes: for a step, the bytes by which its arguments exceed those of the
        derivative; for a loss, minus the bytes of the outputs that take the memory of donated
        arguments.
      cache_key: what the bytes of a compiled plan depend on besides the derivative.
      compile: compiles the whole program under a plan.
    """

    name: str
    derivative: str
    problem: Problem
    outside_argument_bytes: int
    cache_key: tuple[Hashable, ...]
    compile: Callable[[Candidate], MemoryReport]


def planning_task(f: Callable[..., Any], args: Sequence[Tree], argnums: Any, has_aux: bool,
                  policy_argument: str | None, target: Target, donate_argnums: Any,
                  regions: Regions) -> PlanningTask:  # fmt: skip
    """Trace what `xform.plan` plans. Nothing is compiled yet.

    `regions` says whether remat regions are dissolved ("open") or stay as written ("marked"). The
    other arguments are those of `xform.plan`.

    Raises:
      WrongArgument: `has_aux` or `argnums` is given for a step, the step has no parameter
        `policy_argument`, or `argnums` or `donate_argnums` is out of range.
      NotOneDerivative: a step does not differentiate exactly one function under its policy.
    """
    donate = positions(numbers(donate_argnums, "plan", "donate_argnums"), len(args), "plan")
    if policy_argument is None:
        call = with_arrays(LossCall(f, args, argnums, has_aux, donate), "plan")
        return _loss_task(call, target)
    check_step(f, args, policy_argument, argnums, has_aux, "plan")
    return _step_task(f, args, policy_argument, target, donate, regions)


def check_step(f: Callable[..., Any], args: Sequence[Tree], policy_argument: str, argnums: Any,
               has_aux: bool, caller: str) -> None:  # fmt: skip
    """Raise WrongArgument if a step lacks the parameter `policy_argument`, or has other options.

    The options `argnums` and `has_aux` are only for a loss: a step chooses what it differentiates.
    """
    request = f"{caller} of {function_name(f)} with policy_argument={policy_argument!r}"
    check_parameter(f, len(args), policy_argument, request)
    if has_aux or argnums != 0:
        raise WrongArgument(
            f"{request}, {'has_aux' if has_aux else f'argnums={argnums!r}'}",
            "with policy_argument the function is a step, which takes its own derivative",
            definition_site(f),
            "drop one of the two options",
        )


def with_policy(f: Callable[..., Any], policy: Any, argnums: Any, policy_argument: str | None
                ) -> tuple[Callable[..., Any], dict[str, Any]]:  # fmt: skip
    """Return the function to compile for a loss or a step under a policy, and its keywords."""
    if policy_argument is None:
        return _gradient_of_loss(f, argnums, policy), {}
    keywords = {policy_argument: policy}
    if hasattr(f, "lower"):  # made by `jax.jit`, whose options would be lost in a wrapper
        return f, keywords
    return functools.wraps(f)(functools.partial(f, **keywords)), {}


def _gradient_of_loss(f: Callable[..., Any], argnums: Any, policy: Any) -> Callable[..., Any]:
    """Return the function that computes a loss and its gradient under a policy."""

    @functools.wraps(f)
    def both(*args: Tree) -> Any:
        call = with_arrays(LossCall(f, args, argnums), "value_and_grad")
        return value_and_grad(call.f, call.argnums, call.has_aux, policy=policy)(*call.args)

    position = lambda x: getattr(x, "argnum", x)  # of an `nnx.DiffState`
    several = isinstance(argnums, Sequence)
    at = tuple(map(position, argnums)) if several else position(argnums)
    record_transform(both, "value_and_grad", at, policy)
    return both


def _loss_task(call: LossCall, target: Target) -> PlanningTask:
    """Return the task for a loss."""
    f, args, argnums, has_aux = call.f, call.args, call.argnums, call.has_aux
    traced, arguments = derivative_at("plan", f, args, argnums, has_aux), FlatArguments(args)
    donated, arrays = arguments.indices(call.donate), arguments.arrays()
    grads = gather(traced.function.program.in_avals, traced.function.active())
    argument_positions = (
        range(len(args)) if argnums is None else positions(argnums, len(args), "plan")
    )
    scalar = argnums is not None and traced.function.signature.is_scalar
    outputs = [*([] if scalar else traced.function.signature.out_avals), *grads]
    in_donated = _in_donated([jax.typeof(arrays[i]) for i in donated], outputs)
    donated_bytes = sum(aval_bytes(a) for a in gather(outputs, in_donated))

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
    problem = dataclasses.replace(traced.problem, outside_bytes=-donated_bytes)
    cache_key = donated, shardings, argnums is None
    return PlanningTask(
        traced.name, derivative, problem, -donated_bytes, cache_key, compiler.compile
    )


class _PlaceholderPolicy:
    """Marks the derivative to plan while a step is traced. It is equal to no other policy."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        return min_cut(prim, *avals, **params)


def _step_task(f: Callable[..., Any], args: Sequence[Tree], policy_argument: str, target: Target,
               donate: Sequence[int], regions: Regions) -> PlanningTask:  # fmt: skip
    """Return the task for a step; the arguments at the positions `donate` are donated.

    The step is traced with a placeholder as its policy. A planner that records the derivatives
    under this policy finds the one to plan.
    """
    placeholder, problems = _PlaceholderPolicy(), dict[Hashable, Problem]()
    name = function_name(f)
    other_planner = current_planner()
    default = dataclasses.replace(min_cut, regions=regions)

    def recording_planner(problem: Problem, policy: Policy, measure: Measure | None) -> Candidate:
        if policy is not placeholder:
            return other_planner(problem, policy, measure)
        problems[fingerprint(problem.marked), problem.active, problem.wanted] = problem
        return plan_program(problem, default)

    run, options = with_policy(f, placeholder, 0, policy_argument)
    with use_planner(recording_planner):
        trace = trace_for(run, args, options, target, donate)
    problem = _only_problem(f, policy_argument, list(problems.values()))
    whole = program(trace.jaxpr)
    outer = simulate(whole, target.backend, overwrites_argument=overwritten(trace, whole))
    inner = liveness(plan_program(problem, default).schedule, target.backend)

    def compile_under(candidate: Candidate) -> MemoryReport:
        plan = plan_of_candidate(name, "the whole step", problem, "", candidate, target.name)
        run, options = with_policy(f, plan, 0, policy_argument)
        return compile_for(run, args, options, target, donate_argnums=donate)

    shardings = text_of([getattr(x, "sharding", None) for x in jax.tree.leaves(args)])
    problem = dataclasses.replace(problem, outside_bytes=outer.total_bytes - inner.total_bytes)
    outside = outer.argument_bytes - inner.argument_bytes
    cache_key = fingerprint(whole), _donated(trace), shardings
    return PlanningTask(name, "the whole step", problem, outside, cache_key, compile_under)


def _only_problem(
    f: Callable[..., Any], policy_argument: str, problems: Sequence[Problem]
) -> Problem:
    """Return the only one of `problems`, the derivatives that a step takes under its policy.

    Raise NotOneDerivative if there are none or several. The step takes the policy as its argument
    `policy_argument`.
    """
    if len(problems) == 1:
        return problems[0]
    raise NotOneDerivative(
        f"plan of {function_name(f)} with policy_argument={policy_argument!r}",
        f"it differentiates {len(problems)} different functions under its argument "
        f"`{policy_argument}`"
        if problems else
        f"it differentiates nothing under its argument `{policy_argument}`",
        definition_site(f),
        "give each of them its own argument for a policy, bind all but one with functools.partial, "
        "and name that one in policy_argument" if problems else
        f"pass it to the derivative in the step: xform.value_and_grad(loss, "
        f"policy={policy_argument}); or pass a loss, without policy_argument",
    )  # fmt: skip


def overwritten(trace: Any, whole: Program) -> Mask:
    """Which outputs of a step take the memory of a donated argument.

    `trace` is JAX's `Traced` object of the step, and `whole` its program.
    """
    return _in_donated(gather(whole.in_avals, _donated(trace)), whole.out_avals)


def _donated(trace: Any) -> Mask:
    """Which arguments of a traced function are donated."""
    return tuple(a.donated for a in jax.tree.leaves(trace.args_info))


def _in_donated(donated: Sequence[Any], outputs: Sequence[Any]) -> Mask:
    """Return which outputs take the memory of a donated argument of their shape and dtype."""
    unused = collections.Counter((a.shape, a.dtype) for a in donated)
    in_donated: list[bool] = []
    for a in outputs:
        in_donated.append(unused[a.shape, a.dtype] > 0)
        unused[a.shape, a.dtype] -= in_donated[-1]
    return tuple(in_donated)
