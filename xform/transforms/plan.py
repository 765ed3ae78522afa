"""`plan`: decide which values the backward pass saves, and measure the result with the compiler."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xform.introspection.callables import function_name
from xform.memory.targets import parse_target
from xform.planner.bound import least_flops
from xform.planner.candidate import Candidate
from xform.planner.choice import Choice
from xform.planner.describe import plan_of_candidate
from xform.planner.device import resolve_fit
from xform.planner.measure import Measure, known_bytes
from xform.planner.plan.plan import Plan
from xform.planner.plan_program import plan_program
from xform.policies import min_cut, parse, policy_name
from xform.policies.budgets import Budget, Fit
from xform.policies.regions import regions_of
from xform.policies.sample import sample_for
from xform.program.dimensions import at_sample
from xform.terminal import progress_line
from xform.transforms.function import Tree
from xform.transforms.planning_task import planning_task
from xform.transforms.reverse import Policy


def plan(
    f: Callable[..., Any],
    *args: Tree,
    policy: Policy = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    policy_argument: str | None = None,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
) -> Plan:
    """Decide which values the backward pass of `f` saves, and compile it to measure its memory.

    Args:
      f: the loss, a pure function of pytrees of arrays, as for `grad`, or of Flax NNX modules, as
        for `xform.flax.grad`. `plan` compiles its `grad`.
        If the loss returns more than a scalar, or with `argnums=None`, `plan` compiles both parts
        of `vjp` instead. With `policy_argument`, a whole training step.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated. Dimensions
        may be symbolic, as for `jax.export`. The plan then applies to all sizes. Its bytes are
        those of one size for each symbol, which the plan names: that of the budget, or else 128.
      policy: a policy of `xform.policies` or `jax.checkpoint_policies`, or its text, such as
        "save_dots" or "auto", which fits the target's memory. None is `min_cut`. A budget limits
        the bytes on each device. On a mesh of explicit axes, types say how values are sharded. On a
        mesh of `Auto` axes only the compiler knows, so a plan that is not compiled counts values
        with their unsharded sizes.
      argnums: for a loss, the position or positions of the arguments to differentiate, as for
        `grad`, or an `nnx.DiffState`, as for `xform.flax.grad`; None is every argument, as for
        `vjp`.
      has_aux: for a loss, whether it returns a pair `(output, auxiliary)`; the second is not
        differentiated.
      policy_argument: if `f` is a training step or another function that takes a derivative itself:
        the name of its parameter that takes the policy of that derivative. `plan` plans this
        derivative for the memory of the whole step, and reports the bytes of the step.
      target: the device to plan and compile for, such as "cpu", "tpu:v5e:1x1" or "gpu:h100",
        attached or not; None is JAX's default backend. `python -m xform doctor` lists the names.
      donate_argnums: positions of the arguments whose memory the compiled function may reuse, as
        for `jax.jit`.
      verify: whether to compile. For a budget of the peak, `plan` compiles the default policy and
        at most six more plans, or seven before it raises BudgetInfeasible; the compiler's bytes
        must fit. No plan is compiled twice in a process, and earlier compilations change no plan.

    Returns:
      A `Plan`: a table of the saved, recomputed and offloaded values, with totals, and with
      simulated and compiled bytes. A plan is also a policy: `xform.grad(f, policy=plan)`, or the
      step with `policy=plan`, follows it when compiled.

    Raises:
      BudgetInfeasible: no plan was found that fits. The error's `floor_bytes` is the lowest peak
        found: one number for a program, compiled with `verify`, else simulated.
      WrongArgument: `f`, `argnums`, `policy` or `target` is unusable.
      NotOneDerivative: a step differentiates nothing, or more than one function, under the policy
        that it gets as `policy_argument`.
      MissingExtra: a package that compiles for the target is not installed.
      CompilationFailed: the target's compiler failed.

    Cost: one trace of `f` and its derivative, the search for a plan, and one compilation; for a
    budget of the peak, as many compilations as under `verify`.

    >>> def loss(w, x):
    ...     step = lambda h, w: (jnp.sin(h @ w), None)
    ...     return jax.lax.scan(step, x, w)[0].sum()
    >>> w = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> small = xform.plan(loss, w, x,
    ...                    policy="saved:100KiB", verify=False)
    >>> [(row.value, row.decision, row.loops) for row in small]
    [('scan.0/carry.0', 'SAVE', (12,)), ('scan.0/cos.2', 'RECOMPUTE', (12,))]
    >>> small.saved_bytes
    98304

    A training step, where the peak includes the optimizer's state:

    >>> def step(w, momentum, x, policy=None):
    ...     momentum = 0.9 * momentum + xform.grad(loss, policy=policy)(w, x)
    ...     return w - 0.1 * momentum, momentum
    >>> least = xform.plan(step, w, w, x, policy="budget:750KiB", policy_argument="policy",
    ...                    donate_argnums=(0, 1))
    >>> least.compiled_bytes <= 750 * 2**10
    True
    """
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
        task = planning_task(f, args, argnums, has_aux, policy_argument, parsed, donate_argnums,
                             regions_of(policy))  # fmt: skip

        def uncompiled_plan(candidate: Candidate) -> Plan:
            return plan_of_candidate(
                task.name, task.derivative, task.problem, name, candidate, parsed.name
            )

        def compiled_bytes(choice: Choice) -> float:
            (candidate,) = choice.candidates.values()
            size = task.compile(candidate).total_bytes
            return math.inf if size is None else size

        def finished_plan(
            candidate: Candidate, compile_seconds: float = 0.0, **compiled: Any
        ) -> Plan:
            least = (
                least_flops(task.problem, policy, task.outside_argument_bytes)
                if isinstance(policy, Budget)
                else None
            )
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
        candidate = plan_program(task.problem, policy, measure)
        size = measure.bytes(Choice({"": task.problem}, {"": candidate}))
        return finished_plan(candidate, measure.seconds, compiles=measure.compiles,
                             refused=size == math.inf,
                             compiled_bytes=None if size == math.inf else int(size))  # fmt: skip
