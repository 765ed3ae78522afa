"""`plan`: decide what a backward pass keeps, verify it with the compiler, and show it."""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from xform._jax import cotangent_aval
from xform.budgets import Budget, Fit
from xform.cost import aval_bytes, flops
from xform.fingerprint import said
from xform.interpret.joint import analyze
from xform.interpret.node import gather
from xform.memory.compilation import compile_for
from xform.memory.targets import Target, parse_target
from xform.planner.backend import in_bytes, planned_for
from xform.planner.bound import least_flops
from xform.planner.candidates.whole import Whole
from xform.planner.costs.outcome import recompute_flops, waiting_bytes
from xform.planner.plan.choice import choice_of
from xform.planner.plan.plan import Plan
from xform.planner.plan.record import record
from xform.planner.planned import within_peak
from xform.planner.report.rows import rows_of
from xform.planner.simulate.liveness import liveness
from xform.policies import check, min_cut
from xform.policies import said as called
from xform.transforms.function import Tree, numbers, partial, positions
from xform.transforms.inspect import Arguments, At, point
from xform.transforms.reverse import Policy, value_and_grad, vjp
from xform.transforms.verify import Compiler, within


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
      f: pure function of pytrees of arrays.
      *args: arrays, or `jax.ShapeDtypeStruct`s in pytrees; nothing is run or allocated.
      policy: of `xform.policies` or `jax.checkpoint_policies`, or "auto", which fits the target's
        memory; None is `min_cut`. Its bytes are
        those on each device. Types say how values lie on a mesh of explicit axes; on one of `Auto`
        axes only the compiler knows, and what is not compiled counts values whole.
      argnums: position or positions of the arguments to differentiate, as for `grad`; None is every
        argument, as for `vjp`.
      has_aux: whether `f` returns a pair, of which only the first is differentiated.
      target: what to plan and compile for: None is JAX's default backend, and others need not be
        here, `tpu:v5e:1x1` or `gpu:h100`; see `xform.memory.targets`.
      donate_argnums: positions of the arguments whose memory the compiled function may reuse.
      verify: whether to compile. For a budget of the peak the default is compiled, at most six
        plans more, and a few for the floor before it is refused; what the compiler says is what has
        to fit. No plan is compiled twice in a process, and what was compiled before changes none.

    Returns:
      A `Plan`: a table of what is saved, run again and offloaded, with totals, predicted and
      compiled bytes. It is a policy: `xform.grad(f, policy=plan)`, compiled, does as it says.

    Raises:
      BudgetInfeasible: no plan was found whose bytes fit, with the lowest as `floor_bytes`: one
        number for a program, compiled with `verify`, else simulated.
      WrongArgument: `f`, `argnums`, `policy` or `target` is unusable.
      MissingExtra: what compiling for the target needs is not installed.
      CompilationFailed: the target's compiler failed.

    Cost: one trace of `f` and its derivative; that of the policy; one compilation, or, for a budget
    of the peak, as many as `verify` says.

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
    """
    start, goal = time.perf_counter(), parse_target(target)
    policy = check(min_cut if policy is None else policy)
    with planned_for(goal.backend, goal.absent):
        fitted = isinstance(policy, Fit)
        policy = in_bytes(policy)
        unbounded = fitted and not isinstance(policy, Budget)
        name = f"auto, {called(policy)}" if unbounded else called(policy)
        at, given = point("plan", f, args, argnums, has_aux).seen_by(policy), Arguments(args)
        ones = numbers(donate_argnums, "plan", "donate_argnums")
        donated = given.donated(positions(ones, len(args), "plan")) if ones else ()
        alias = _alias(at, [jax.typeof(given.arrays()[i]) for i in donated])
        peak = lambda how: liveness(how, goal.backend).total_bytes - alias
        of_peak = isinstance(policy, Budget) and policy.of == "peak"

        compiling: list[float] = []

        def made(whole: Whole) -> Plan:
            return _plan(at, name, whole, goal, peak(whole.how))

        def measure(whole: Whole) -> int | None:
            begun = time.perf_counter()
            run = _derivative(f, argnums, has_aux, made(whole), at)
            flat = lambda ct, *arrays: run(given.filled(arrays)[1], ct)
            step = jax.jit(flat, donate_argnums=[i + 1 for i in donated])
            found = compile_for(step, (_cotangent(at), *given.arrays()), target=goal).total_bytes
            compiling.append(time.perf_counter() - begun)
            return found

        def finished(whole: Whole, **verified: Any) -> Plan:
            least = least_flops(*at.ends, policy, alias) if isinstance(policy, Budget) else None
            spent = time.perf_counter() - start - sum(compiling)
            return dataclasses.replace(made(whole), least_flops=least, seconds=spent, **verified)

        if not verify:
            return finished(within_peak(*at.ends, policy, alias) if of_peak else at.planned(policy))
        placed = [getattr(x, "sharding", None) for x in given.arrays()]
        compiler = Compiler(analyze(*at.ends), peak, alias, measure, goal.name, donated,
                            said((placed, at.closed)), argnums is None)  # fmt: skip
        whole = within(at, policy, compiler) if of_peak else at.planned(policy)
        size = compiler.bytes(whole)
        return finished(whole, compiles=compiler.compiles, refused=size == math.inf,
                        compiled_bytes=None if size == math.inf else int(size))  # fmt: skip


def _alias(at: At, donated: Sequence[Any]) -> int:
    """Bytes of outputs that take the memory of donated arguments of their shape and dtype."""
    free = collections.Counter((a.shape, a.dtype) for a in donated)
    total = 0
    outputs = [*at.function.signature.out_avals, *gather(at.function.program.in_avals,
                                                         at.function.active())]  # fmt: skip
    for a in outputs:
        if free[a.shape, a.dtype]:
            free[a.shape, a.dtype] -= 1
            total += aval_bytes(a)
    return total


def _plan(at: At, policy: str, whole: Whole, goal: Target, predicted: int) -> Plan:
    """What was decided, not verified."""
    how = whole.how
    seen = liveness(how, goal.backend)
    return Plan(
        function=at.name,
        policy=policy,
        target=goal.name,
        rows=tuple(rows_of(how)),
        saved_bytes=waiting_bytes(how),
        forward_flops=flops(at.function.program),
        recompute_flops=recompute_flops(how),
        predicted_bytes=predicted,
        compiled_bytes=None,
        compiles=0,
        live=seen.live,
        saved=seen.saved,
        record=record(choice_of(how), how.joint, whole.shapes, at.regions),
    )


def _derivative(f: Any, argnums: Any, has_aux: bool, policy: Plan, at: At) -> Any:
    """The function that is compiled: `value_and_grad`, or both parts of `vjp`."""
    scalar = [a.shape for a in at.function.signature.out_avals] == [()]

    def both(args: Any, ct: Any) -> Any:
        if scalar and argnums is not None:
            return value_and_grad(f, argnums, has_aux, policy=policy)(*args)
        held, primals = (f, args)
        if argnums is not None:
            held, primals = partial(f, positions(argnums, len(args), "plan"), args, {})
        y, pull, *aux = vjp(held, *primals, has_aux=has_aux, policy=policy)
        return y, aux, pull(ct)

    return both


def _cotangent(at: At) -> Tree:
    signature = at.function.signature
    cts = [cotangent_aval(a) for a in signature.out_avals]
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=_placed(a)) for a in cts]
    return jax.tree.unflatten(signature.out_tree, types)


def _placed(aval: Any) -> Any:
    """Where explicit axes say that a value lies: of others types say nothing."""
    explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    return aval.sharding if explicit else None
