"""`plan`: decide what a backward pass keeps, verify it with the compiler, and show it."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from xform import alive
from xform.budgets import Budget, Fit
from xform.callables import function_name
from xform.cost import flops
from xform.memory.targets import Target, parse_target
from xform.planner.bound import least_flops
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import recompute_flops, waiting_bytes
from xform.planner.device import in_bytes
from xform.planner.plan.decision import decision_of
from xform.planner.plan.plan import Plan
from xform.planner.plan.record import record
from xform.planner.planned import planned
from xform.planner.report.rows import rows_of
from xform.planner.simulate.liveness import liveness
from xform.policies import check, min_cut
from xform.policies import said as called
from xform.regions import opening
from xform.transforms.function import Tree
from xform.transforms.reverse import Policy
from xform.transforms.subject import Subject, subject


def plan(
    f: Callable[..., Any],
    *args: Tree,
    policy: Policy = None,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    target: str | None = None,
    donate_argnums: int | Sequence[int] = (),
    verify: bool = True,
) -> Plan:
    """Decide what the derivative of `f` keeps, and verify it with the compiler.

    Args:
      f: a function with an argument `policy` that is not among `args`, such as a training step:
        what it differentiates under that policy is planned, and bytes are those of the whole step.
        Any other is a loss, a pure function of pytrees of arrays. Its `grad` is compiled; of a
        function that returns more than a scalar, or with `argnums=None`, both parts of `vjp`. To
        plan `value_and_grad`, pass a step that calls it.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      policy: of `xform.policies` or `jax.checkpoint_policies`, or "auto", which fits the target's
        memory; None is `min_cut`. Its bytes are those on each device. Types say how values lie
        on a mesh of explicit axes; on one of `Auto` axes only the compiler knows, and a plan that
        is not compiled counts values whole.
      argnums: of a loss: position or positions of the arguments to differentiate, as for `grad`;
        None is every argument, as for `vjp`.
      has_aux: of a loss: whether it returns a pair; only the first is differentiated.
      target: what to plan and compile for: None is JAX's default backend, and others need not be
        here, `tpu:v5e:1x1` or `gpu:h100`; see `xform.memory.targets`.
      donate_argnums: positions of the arguments whose memory the compiled function may reuse.
      verify: whether to compile. For a budget of the peak the default is compiled, and at most six
        plans more, or seven before it is refused; the compiler's bytes have to fit.
        No plan is compiled twice in a process, and earlier compilations change no plan.

    Returns:
      A `Plan`: a table of the saved, recomputed and offloaded values, with totals, predicted and
      compiled bytes. It is a policy: `xform.grad(f, policy=plan)`, or a step under it, compiled,
      does as it says.

    Raises:
      BudgetInfeasible: no plan was found whose bytes fit, with the lowest as `floor_bytes`: one
        number for a program, compiled with `verify`, else simulated.
      WrongArgument: `f`, `argnums`, `policy` or `target` is unusable.
      NotOneDerivative: a step differentiates nothing, or more than one function, under its argument
        `policy`.
      MissingExtra: what compiling for the target needs is not installed.
      CompilationFailed: the target's compiler failed.

    Cost: one trace of `f` and its derivative, the search for a plan, and one compilation; for a
    budget of the peak, as many compilations as `verify` says.

    >>> def loss(w, x):
    ...     step = lambda h, w: (jnp.sin(h @ w), None)
    ...     return jax.lax.scan(step, x, w)[0].sum()
    >>> w = jax.ShapeDtypeStruct((12, 64, 64), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    >>> small = xform.plan(loss, w, x,
    ...                    policy=xform.policies.budget("100 KiB", of="saved"), verify=False)
    >>> [(row.value, row.decision, row.loops) for row in small]
    [('scan.0/carry.0', 'SAVE', (12,)), ('scan.0/cos.2', 'RECOMPUTE', (12,))]
    >>> small.saved_bytes
    98304

    A step of training, whose optimizer is in the peak too:

    >>> def step(w, momentum, x, policy=None):
    ...     momentum = 0.9 * momentum + xform.grad(loss, policy=policy)(w, x)
    ...     return w - 0.1 * momentum, momentum
    >>> least = xform.plan(step, w, w, x, policy=xform.policies.budget("750 KiB"),
    ...                    donate_argnums=(0, 1))
    >>> least.compiled_bytes <= 750 * 2**10
    True
    """
    start, goal = time.perf_counter(), parse_target(target)
    policy = check(min_cut if policy is None else policy)
    planning = alive.working(f"planning {function_name(f)}")
    with planning, goal.planned_for():
        fitted = isinstance(policy, Fit)
        policy = in_bytes(policy)
        unbounded = fitted and not isinstance(policy, Budget)
        name = f"auto, {called(policy)}" if unbounded else called(policy)
        of = subject(f, args, argnums, has_aux, goal, donate_argnums, opening(policy))
        compiling: list[float] = []

        def made(candidate: Candidate) -> Plan:
            return _plan(of, name, candidate, goal)

        def measure(candidate: Candidate) -> int | None:
            begun = time.perf_counter()
            found = of.compiled(made(candidate)).total_bytes
            compiling.append(time.perf_counter() - begun)
            return found

        def finished(candidate: Candidate, **verified: Any) -> Plan:
            least = least_flops(of.problem, policy, of.held) if isinstance(policy, Budget) else None
            spent = time.perf_counter() - start - sum(compiling)
            return dataclasses.replace(
                made(candidate),
                least_flops=least,
                seconds=spent,
                compile_seconds=sum(compiling),
                **verified,
            )

        if not verify:
            return finished(planned(of.problem, policy))
        compiler = Compiler(of.problem, measure, goal.name, *of.decides)
        candidate = planned(of.problem, policy, compiler)
        size = compiler.bytes(candidate)
        return finished(candidate, compiles=compiler.compiles, refused=size == math.inf,
                        compiled_bytes=None if size == math.inf else int(size))  # fmt: skip


def _plan(of: Subject, policy: str, candidate: Candidate, goal: Target) -> Plan:
    """What was decided, not verified."""
    decided = candidate.schedule
    seen = liveness(decided, goal.backend)
    return Plan(
        function=of.name,
        derivative=of.derivative,
        policy=policy,
        target=goal.name,
        rows=tuple(rows_of(decided)),
        saved_bytes=waiting_bytes(decided),
        forward_flops=flops(of.problem.program),
        recompute_flops=recompute_flops(decided),
        predicted_bytes=seen.total_bytes + of.problem.beside,
        compiled_bytes=None,
        compiles=0,
        live=seen.live,
        saved=seen.saved,
        record=record(decision_of(decided), decided.joint, candidate.shapes, candidate.regions),
    )
