"""`plan_names`: choose the named values that every layer saves, for a program under plain JAX."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xform.errors import WrongArgument, XformError
from xform.everywhere import install
from xform.introspection.callables import check_parameter, definition_site, function_name
from xform.memory.lowering import is_jitted
from xform.memory.targets import Target, parse_target
from xform.names.name_plan import NamePlan
from xform.names.name_set import NameSet, NamesFront, WeighedNames, explore
from xform.names.plain_step import KEEPS_REGIONS, PlainStep
from xform.planner.device import resolve_fit
from xform.planner.measure import Measure
from xform.planner.search_front import search_compiled
from xform.policies import parse, policy_name, save_nothing
from xform.policies.budgets import Budget
from xform.policies.combined import open_regions
from xform.policies.sample import check_known_sizes
from xform.steps.jit import jit
from xform.steps.step_plan import StepPlan
from xform.terminal import progress_line
from xform.transforms.function import Tree


def plan_names(
    f: Callable[..., Any],
    *args: Tree,
    policy: Any,
    target: str | None = None,
    free: bool = True,
    **options: Any,
) -> NamePlan:
    """Choose the named values that every remat region saves, so that `f` fits a number of bytes.

    The plan is for programs that run under plain JAX, without xform. Each value that
    `jax.ad_checkpoint.checkpoint_name` names in a remat region (`jax.checkpoint`) is saved,
    offloaded to the host or recomputed. The choice is the same in every region, such as every
    layer. Besides these values a region saves only its inputs. This is the meaning of JAX's policy
    `save_and_offload_only_these_names`.

    A region has to get its policy from outside. Give `f` a keyword parameter `policy`, and pass it
    on:

        def f(params, batch, policy):
            layer = jax.checkpoint(block, policy=policy)
            ...
            return jax.grad(loss)(params, batch)

    If a library marks the layers, `xform.passes.RegionPolicy(policy)(loss)` is the loss with this
    policy in its regions.

    The program is traced and simulated under sets of names. The compiler then decides which sets
    fit, as it does for other budgets. Of the sets that were compiled and fit, the one that
    recomputes least is chosen.

    Args:
      f: a gradient or a training step with a keyword parameter `policy`. It differentiates with
        JAX's transforms. It may be a function of `jax.jit` with `policy` as a static argument.
      *args: its arguments, as arrays or `jax.ShapeDtypeStruct`s in pytrees; nothing is run.
      policy: a budget of the peak, such as "budget:6GiB", or "auto", the memory of the target. It
        limits the arguments, outputs and temporary memory of `f` on each device.
      target: the device to plan and compile for, such as "cpu" or "gpu:h100", attached or not; None
        is JAX's default backend.
      free: whether to make the free plan too, for comparison: the plan of `xform.jit` within the
        same budget, which decides about each value of the whole program. For this, JAX's transforms
        are replaced for a moment, as by `xform.install`.
      **options: the options of `jax.jit`, such as `donate_argnums` and `in_shardings`, if `f` is
        not jitted. With JAX 0.10.2, XLA on a CPU undoes `jax.checkpoint` in unrolled layers, and
        then no set of names saves memory. The option `compiler_options={"xla_disable_hlo_passes":
        "cse_barrier_expander"}` prevents this. Scanned layers do not need it.

    Returns:
      A `NamePlan`. It prints as a table of the names, with the compiled bytes, the recomputed FLOPs
      and the cost of the restriction to names. Its methods export it: `checkpoint_policy()` for
      `jax.checkpoint`, `as_code()` as Python text, `maxtext()` and `tunix()` as settings.

    Raises:
      BudgetInfeasible: no set of names that was compiled fits. The error's `floor_bytes` is the
        lowest peak that was found.
      WrongArgument: `f` has no remat region that gets the policy, or no named value in one;
        `policy` is not a budget of the peak; or options are given for a jitted `f`.

    Cost: with k names that matter, at most 2 k + 2^k traces of `f` if k is at most 4, else about
    k^2 / 2 + 2 k; with a link to the host, up to k more for each set on the Pareto front. About
    log2(k) + 4 compilations, and those of `xform.jit` for the free plan. A process weighs and
    compiles each set of a program once.

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> def layer(x, w):
    ...     return jnp.tanh(checkpoint_name(jnp.tanh(x @ w) @ w, "up")), None
    >>> def gradient(ws, x, policy):
    ...     block = jax.checkpoint(layer, policy=policy)
    ...     return jax.grad(lambda ws: jax.lax.scan(block, x, ws)[0].sum())(ws)
    >>> ws = jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    >>> plan = xform.plan_names(gradient, ws, x, policy="budget:2MiB", free=False)
    >>> plan.saved, plan.compiled_bytes <= 2 * 2**20
    (('up',), True)
    """
    start, parsed = time.perf_counter(), parse_target(target)
    request = f"plan_names of {function_name(f)}"
    budget = _budget(policy, parsed, request)
    check_known_sizes(request, args)
    check_parameter(f, len(args), "policy", request)
    if options and is_jitted(f):
        raise WrongArgument(
            f"{request} with {', '.join(options)}",
            "the function is jitted already, so it has options of its own",
            definition_site(f),
            "give the options to jax.jit, or pass the function without jax.jit",
        )
    with progress_line.show(f"planning the named values of {function_name(f)}"):
        step = PlainStep(f, args, parsed, options)
        measure = Measure(step.compiled_bytes, step.known_bytes)
        chosen = _search(step, budget, measure)
        plan = NamePlan(
            function=step.name,
            policy=policy_name(budget),
            target=parsed.name,
            names=chosen.names,
            values=step.values,
            compiled_bytes=int(measure.bytes(chosen)),
            recompute_flops=chosen.recompute_flops,
            compiles=measure.compiles,
            seconds=time.perf_counter() - start - measure.seconds,
            compile_seconds=measure.seconds,
            nothing=step.weigh(NameSet()),
            everything=step.everything,
            budget_bytes=budget.bytes,
            no_free_plan="it was not asked for",
        )
        if not free:
            return plan
        try:
            other = _free_plan(f, args, budget, target, options)
        except XformError as error:
            return dataclasses.replace(plan, no_free_plan=error.problem)
        return dataclasses.replace(plan, free=other, no_free_plan="")


def _search(step: PlainStep, budget: Budget, measure: Measure) -> WeighedNames:
    """Return the set of names of least work whose compiled program fits the budget.

    Raises:
      BudgetInfeasible: no set that was compiled fits.
    """
    weighed = explore(step.values, step.weigh, step.may_offload)
    return search_compiled(weighed[0], budget, measure, NamesFront(weighed, _remedy(step)))


def _remedy(step: PlainStep) -> str:
    """Return what to do if no set of names fits."""
    option = (
        f"if the layers are unrolled, pass compiler_options={KEEPS_REGIONS}: XLA on a CPU undoes "
        "jax.checkpoint in unrolled code; "
        if step.is_undone
        else ""
    )
    return (
        f"{option}raise the budget, donate arguments that are not read later, make the batch or "
        "the sequence smaller, or use xform.jit, whose plans are not restricted to names"
    )


def _budget(policy: Any, target: Target, request: str) -> Budget:
    """Return the budget of the peak that the user gave, or raise WrongArgument."""
    parsed = parse(policy)
    with target.planned_for():
        budget = resolve_fit(parsed)
    if isinstance(budget, Budget) and budget.of == "peak":
        return budget
    raise WrongArgument(
        f"{request} with policy={policy!r}",
        "it is no budget of the peak memory, or the memory of the target is unknown",
        "",
        "pass a number of bytes, such as policy='budget:6GiB'",
    )


def _free_plan(
    f: Callable[..., Any],
    args: Sequence[Tree],
    budget: Budget,
    target: str | None,
    options: Mapping[str, Any],
) -> StepPlan:
    """Return the plan of `xform.jit` for `f` within the budget, with its remat regions opened.

    Raises:
      XformError: no plan fits, or xform cannot differentiate the function.
    """
    run = functools.wraps(f)(functools.partial(f, policy=save_nothing))
    with install():
        return jit(run, open_regions(budget), target=target, **options).lower(*args).plan
