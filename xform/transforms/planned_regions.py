"""Express what `min_cut` or a budget saves in a remat region in terms of JAX's policies.

`jax.grad` asks a region's policy about one primitive at a time, but a plan decides for the whole
region. So the region is planned when it is called. Its saved values get names
(`checkpoint_name`), and the policy for JAX saves those names. A factor that one of xform's rules
computes is not in JAX's program. For such a factor, the values that it is computed from are named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from xform._jax import JaxprEqn, Var, name_p, scan_counts, scan_p
from xform.errors import BudgetInfeasible
from xform.interpret.joint import Schedule, analyze
from xform.interpret.node import fork_p
from xform.planner.decide import schedule
from xform.policies import TAG, Budget, MinCut, TaggedPolicy
from xform.program.arithmetic import differentiable
from xform.program.equation import scan_options
from xform.program.ir import Program, bind, environment, program, read, write
from xform.program.source import name_stack, source
from xform.registry.table import rule_of


def name_saved_values(jaxpr: Any, policy: MinCut | Budget) -> tuple[Any, TaggedPolicy]:
    """Return a region's jaxpr with names for its saved values, and the policy that saves them.

    Both are stored in the program's cache. Under a budget that is too small, nothing is named, so
    only the arguments are saved.
    """
    prog = program(jaxpr)
    key = "tagged", policy
    if key not in prog.cache:
        active = tuple(map(differentiable, prog.in_avals))
        try:
            decided = schedule(analyze(_named(prog, None), active), policy)
        except BudgetInfeasible:
            names = frozenset[str]()
        else:
            names = frozenset(_kept(decided))
        prog.cache[key] = _traced(prog, names), TaggedPolicy(policy, names)
    return prog.cache[key]


def _named(prog: Program, names: frozenset[str] | None) -> Program:
    return program(_traced(prog, names))


def _traced(prog: Program, names: frozenset[str] | None) -> Any:
    """Return the program with a name for each value whose name is in `names` (None: for all)."""
    return jax.make_jaxpr(lambda *xs: _Naming(names).run(prog, xs))(*prog.in_avals)


@dataclasses.dataclass(eq=False)
class _Naming:
    names: frozenset[str] | None
    count: int = 0

    def run(self, prog: Program, args: Sequence[Any]) -> list[Any]:
        env = environment(prog, args)
        outer = name_stack()
        for eqn in prog.equations:
            xs = [read(env, v) for v in eqn.invars]
            rule = rule_of(eqn.primitive)
            inlined = None if rule is None else rule.inlined(eqn, True)
            if inlined is not None:
                ys = self.run(inlined, xs)
            elif eqn.primitive is scan_p:
                with source(eqn, outer), eqn.ctx.manager:
                    ys = self._scan(eqn, xs)
            else:
                ys = [self._name(y) for y in bind(eqn, xs, outer)]
            write(env, eqn.outvars, ys)
        return [read(env, v) for v in prog.outputs]

    def _scan(self, eqn: JaxprEqn, xs: Sequence[Any]) -> list[Any]:
        nc, nk = scan_counts(eqn.params)
        steps = program(eqn.params["jaxpr"])
        start = self.count

        def step(carry: list[Any], seq: list[Any]) -> tuple[list[Any], list[Any]]:
            self.count = start  # JAX may trace a body twice
            ys = self.run(steps, [*xs[:nc], *carry, *seq])
            return ys[:nk], ys[nk:]

        carry, seq = list(xs[nc : nc + nk]), list(xs[nc + nk :])
        carry, ys = lax.scan(step, carry, seq, **scan_options(eqn.params))
        return [*carry, *ys]

    def _name(self, x: Any) -> Any:
        name = f"{TAG}{self.count}"
        self.count += 1
        wanted = self.names is None or name in self.names
        return checkpoint_name(x, name) if wanted and hasattr(x, "dtype") else x


def _kept(schedule: Schedule) -> Iterator[str]:
    """Return the names of the values that a schedule saves, also in nested programs."""
    kept = set(schedule.saved)
    todo: list[Any] = list(kept)
    seen: set[Any] = set()
    while todo:
        v = todo.pop()
        eqn = schedule.joint.producer.get(v) if isinstance(v, Var) else None
        if eqn is None or v in seen:
            continue
        seen.add(v)
        if eqn.primitive is name_p and eqn.params["name"].startswith(TAG):
            yield eqn.params["name"]
        elif eqn.primitive is not fork_p:
            todo += eqn.invars
    for eqn in schedule.joint.forward:
        if eqn.primitive is fork_p and eqn.outvars[-1] in kept:
            for inner in schedule.inner[eqn.params["node"]]:
                yield from _kept(inner)
