"""The derivative that is planned, and the program that is compiled with it.

A step, such as a training step, takes derivatives itself. Its parameter `policy_argument` takes the
policy of one of them. This derivative is planned, and the whole step is compiled. Without
`policy_argument` the function is a loss. Its `grad` is compiled, or both parts of `vjp` if it is
not scalar or `argnums` is None.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from xform._jax import cotangent_aval
from xform._jax.meshes import argument
from xform.errors import NotOneDerivative, WrongArgument
from xform.interpret.cost import aval_bytes
from xform.interpret.node import gather
from xform.introspection.callables import check_parameter, definition_site, function_name
from xform.memory.compilation import Compilation, compile_for, trace_for
from xform.memory.targets import Target
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.plan_program import plan_program
from xform.planner.planning import current_planner, use_planner
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness, simulate
from xform.policies import Policy, min_cut
from xform.policies.budgets import Regions
from xform.program.fingerprint import fingerprint, text_of
from xform.program.ir import Mask, program
from xform.transforms.function import Tree, numbers, partial, positions
from xform.transforms.inspect import FlatArguments, TracedDerivative, derivative_at
from xform.transforms.reverse import grad, value_and_grad, vjp


@dataclasses.dataclass(frozen=True, eq=False)
class PlanningTask:
    """A derivative and the program around it.

    Attributes:
      name: the function's name.
      derivative: a description of the compiled function, such as "grad by argument 0".
      problem: the derivative as a planning problem. It includes a simulation of the bytes outside
        the derivative at its peak.
      outside_argument_bytes: bytes of the arguments outside the derivative; negative if arguments
        are donated.
      cache_key: what the bytes of a compiled plan depend on besides the derivative.
      compile: compiles the whole program under a plan.
    """

    name: str
    derivative: str
    problem: Problem
    outside_argument_bytes: int
    cache_key: tuple[Hashable, ...]
    compile: Callable[[Policy], Compilation]


def planning_task(f: Callable[..., Any], args: Sequence[Tree], argnums: Any, has_aux: bool,
                  policy_argument: str | None, goal: Target, donate_argnums: Any, regions: Regions
                  ) -> PlanningTask:  # fmt: skip
    """Trace what `xform.plan` plans, with the arguments of `plan`. Nothing is compiled yet.

    Raises:
      WrongArgument: see `plan`.
    """
    donate = positions(numbers(donate_argnums, "plan", "donate_argnums"), len(args), "plan")
    if policy_argument is None:
        return _loss_task(f, args, argnums, has_aux, goal, donate)
    check_step(f, args, policy_argument, argnums, has_aux, "plan")
    return _step_task(f, args, policy_argument, goal, donate, regions)


def check_step(f: Callable[..., Any], args: Sequence[Tree], policy_argument: str, argnums: Any,
               has_aux: bool, caller: str) -> None:  # fmt: skip
    """Raise WrongArgument unless a step has the parameter `policy_argument`, and no other options.

    `argnums` and `has_aux` are for a loss, because a step chooses what it differentiates.
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
        return functools.wraps(f)(value_and_grad(f, argnums, policy=policy)), {}
    keywords = {policy_argument: policy}
    if hasattr(f, "lower"):  # made by `jax.jit`, whose options would be lost in a wrapper
        return f, keywords
    return functools.wraps(f)(functools.partial(f, **keywords)), {}


def _loss_task(f: Callable[..., Any], args: Sequence[Tree], argnums: Any, has_aux: bool,
               goal: Target, donate: Sequence[int]) -> PlanningTask:  # fmt: skip
    at, arguments = derivative_at("plan", f, args, argnums, has_aux), FlatArguments(args)
    donated, arrays = arguments.indices(donate), arguments.arrays()
    grads = gather(at.function.program.in_avals, at.function.active())
    by = range(len(args)) if argnums is None else positions(argnums, len(args), "plan")
    scalar = argnums is not None and at.function.signature.is_scalar
    outputs = [*([] if scalar else at.function.signature.out_avals), *grads]
    over = _over([jax.typeof(arrays[i]) for i in donated], outputs)
    saved = sum(aval_bytes(a) for a in gather(outputs, over))

    def compile_under(policy: Policy) -> Compilation:
        run = (_gradient if scalar else _vjp)(f, by, argnums is None, has_aux, policy)
        flat = lambda ct, *arrays: run(arguments.replace_arrays(arrays)[1], ct)
        flat.__name__ = at.name
        step = jax.jit(flat, donate_argnums=[i + 1 for i in donated])
        return compile_for(step, (_cotangent(at), *arrays), target=goal)

    places = text_of(([getattr(x, "sharding", None) for x in arrays], at.closed))
    several = f"argument{'s' * (len(by) != 1)} {', '.join(map(str, by))}"
    derivative = f"{'grad' if scalar else 'vjp'} by {several}"
    problem = dataclasses.replace(at.problem, outside_bytes=-saved)
    cache_key = donated, places, argnums is None
    return PlanningTask(at.name, derivative, problem, -saved, cache_key, compile_under)


class _Undecided:
    """A placeholder for the policy of the derivative to plan. It is equal to no other policy."""

    def __call__(self, prim: Any, *avals: Any, **params: Any) -> Any:
        return min_cut(prim, *avals, **params)


def _step_task(f: Callable[..., Any], args: Sequence[Tree], policy_argument: str, goal: Target,
               donate: Sequence[int], regions: Regions) -> PlanningTask:  # fmt: skip
    placeholder, others, problems = _Undecided(), current_planner(), dict[Hashable, Problem]()
    default = dataclasses.replace(min_cut, regions=regions)

    def by(problem: Problem, policy: Policy, compiler: Compiler | None) -> Candidate:
        if policy is not placeholder:
            return others(problem, policy, compiler)
        problems[fingerprint(problem.marked), problem.active, problem.wanted] = problem
        return plan_program(problem, default)

    run, options = with_policy(f, placeholder, 0, policy_argument)
    with use_planner(by):
        trace = trace_for(run, args, options, goal, donate)
    problem = _one(f, policy_argument, list(problems.values()))
    whole = program(trace.jaxpr)
    donated = tuple(a.donated for a in jax.tree.leaves(trace.args_info))
    over = _over(gather(whole.in_avals, donated), whole.out_avals)
    outer = simulate(whole, goal.backend, overwrites_argument=over)
    inner = liveness(plan_program(problem, default).schedule, goal.backend)

    def compile_under(policy: Policy) -> Compilation:
        run, options = with_policy(f, policy, 0, policy_argument)
        return compile_for(run, args, options, goal, donate_argnums=donate)

    places = text_of([getattr(x, "sharding", None) for x in jax.tree.leaves(args)])
    problem = dataclasses.replace(problem, outside_bytes=outer.total_bytes - inner.total_bytes)
    outside = outer.argument_bytes - inner.argument_bytes
    cache_key = fingerprint(whole), donated, places
    return PlanningTask(
        function_name(f), "the whole step", problem, outside, cache_key, compile_under
    )


def _one(f: Callable[..., Any], policy_argument: str, problems: Sequence[Problem]) -> Problem:
    """Return the one derivative that a step takes under its argument `policy_argument`."""
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


def _over(donated: Sequence[Any], outputs: Sequence[Any]) -> Mask:
    """Return which outputs take the memory of a donated argument of their shape and dtype."""
    free = collections.Counter((a.shape, a.dtype) for a in donated)
    over: list[bool] = []
    for a in outputs:
        over.append(free[a.shape, a.dtype] > 0)
        free[a.shape, a.dtype] -= over[-1]
    return tuple(over)


def _gradient(f: Any, by: Sequence[int], whole: bool, has_aux: bool, policy: Policy) -> Any:
    """Return the gradient of a scalar function, as a function of its arguments and a cotangent."""
    gradient = grad(f, tuple(by), has_aux, policy=policy)
    return lambda args, ct: gradient(*args)


def _vjp(f: Any, by: Sequence[int], whole: bool, has_aux: bool, policy: Policy) -> Any:
    """Return both parts of `vjp` as one function of the arguments and the cotangents.

    With `whole`, all arguments are differentiated, whatever their types; else those in `by`.
    """

    def both(args: Any, ct: Any) -> Any:
        bound, primals = (f, args) if whole else partial(f, tuple(by), args, {})
        y, pull, *aux = vjp(bound, *primals, has_aux=has_aux, policy=policy)
        return y, aux, pull(ct)

    return both


def _cotangent(at: TracedDerivative) -> Tree:
    signature = at.function.signature
    types = [argument(cotangent_aval(a)) for a in signature.out_avals]
    return jax.tree.unflatten(signature.out_tree, types)
