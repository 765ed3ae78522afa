"""Make a remat region whose saved values xform plans, in a form that `jax.grad` obeys too.

`jax.grad` asks a region's policy about one primitive at a time, but `min_cut` or a budget decides
for the whole region. So the region is planned when it is called. Its saved values get names
(`checkpoint_name`), and the policy for JAX saves those names. A saved value may be a factor that
one of xform's rules computes, such as `cos x` for the derivative of `sin x`. Such a factor is not
in JAX's program, so the values that it is computed from are named instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from xform._jax import JaxprEqn, Var
from xform.errors import BudgetInfeasible
from xform.interpret.joint import Schedule, analyze
from xform.interpret.node import fork_p
from xform.planner.decide import schedule
from xform.policies import TAG, Budget, MinCut, TaggedPolicy
from xform.program.arithmetic import differentiable
from xform.program.equation import context
from xform.program.flow import Flow
from xform.program.ir import Program, bind, environment, program, read, write
from xform.program.source import name_stack, source
from xform.registry.table import Rule, flow_of, label, rule_of


def name_saved_values(jaxpr: Any, policy: MinCut | Budget) -> tuple[Any, TaggedPolicy]:
    """Return a region's jaxpr with names for its saved values, and the policy that saves them.

    The result is cached on the program. If no plan fits the budget, no value is named, so only the
    arguments are saved.
    """
    prog = program(jaxpr)
    key = "tagged", policy
    if key not in prog.cache:
        active = tuple(map(differentiable, prog.in_avals))
        try:
            all_named = program(_jaxpr_with_names(prog, None))
            decided = schedule(analyze(all_named, active), policy)
        except BudgetInfeasible:
            names = frozenset[str]()
        else:
            names = frozenset(_saved_names(decided))
        prog.cache[key] = _jaxpr_with_names(prog, names), TaggedPolicy(policy, names)
    return prog.cache[key]


def _jaxpr_with_names(prog: Program, names: frozenset[str] | None) -> Any:
    """Return the jaxpr of a program, with `checkpoint_name` on the values named in `names`.

    A value's name is its number, in the order of computation, so it is the same in each trace. None
    names all values.
    """
    return jax.make_jaxpr(lambda *xs: _NamingInterpreter(names).run(prog, xs))(*prog.in_avals)


@dataclasses.dataclass(eq=False)
class _NamingInterpreter:
    """Runs a program and names values. `count` is the number of values so far."""

    names: frozenset[str] | None
    count: int = 0

    def run(self, prog: Program, args: Sequence[Any]) -> list[Any]:
        """Run a program in the current trace; return its outputs."""
        env = environment(prog, args)
        outer = name_stack()
        for eqn in prog.equations:
            xs = [read(env, v) for v in eqn.invars]
            rule, flow = rule_of(eqn.primitive), flow_of(eqn)
            inlined = None if rule is None else rule.inlined(eqn, True)
            if inlined is not None:
                ys = self.run(inlined, xs)
            elif rule is not None and flow is not None and flow.length is not None:
                with source(eqn, outer), context(eqn):
                    ys = self._loop(rule, eqn, flow, xs)
            else:
                ys = [self._name(y) for y in bind(eqn, xs, outer)]
            write(env, eqn.outvars, ys)
        return [read(env, v) for v in prog.outputs]

    def _loop(self, rule: Rule, eqn: JaxprEqn, flow: Flow, xs: Sequence[Any]) -> list[Any]:
        """Run a loop whose body names values too."""
        body, start = flow.bodies[0].program, self.count

        def step(xs: list[Any], each: Any) -> tuple[list[Any], Any]:
            self.count = start  # JAX may trace a body twice
            return self.run(body, xs), None

        return rule.rebuild(eqn, xs, [step])[0]

    def _name(self, x: Any) -> Any:
        """Return `x`, with the next name if that is one of `names`."""
        name = f"{TAG}{self.count}"
        self.count += 1
        wanted = self.names is None or name in self.names
        return checkpoint_name(x, name) if wanted and hasattr(x, "dtype") else x


def _saved_names(schedule: Schedule) -> Iterator[str]:
    """Yield the names to save so that all saved values of a Schedule are available.

    A Schedule says which values of a forward pass are saved. For a saved value without a name, the
    names of the values that it is computed from are yielded. Nested programs are included: in the
    program a `fork` equation stands for a loop or call, and the last output of the fork, its token,
    stands for all values that are saved inside.
    """
    saved = set(schedule.saved)
    todo: list[Any] = list(saved)
    seen: set[Any] = set()
    while todo:
        v = todo.pop()
        eqn = schedule.joint.producer.get(v) if isinstance(v, Var) else None
        if eqn is None or v in seen:
            continue
        seen.add(v)
        name = label(eqn.primitive, eqn.params)
        if name is not None and name.startswith(TAG):
            yield name
        elif eqn.primitive is not fork_p:
            todo += eqn.invars
    for eqn in schedule.joint.forward:
        if eqn.primitive is fork_p and eqn.outvars[-1] in saved:
            for inner in schedule.inner[eqn.params["node"]]:
                yield from _saved_names(inner)
