"""Both parts of a Schedule as one flat program, with the same operations that `emit` would stage.

The planner simulates many plans, and emitting a plan would trace it, which takes time. So the walk
over a plan adds steps to a flat program instead of binding equations. Only the two parts of a loop
or call are traced, once for each choice of Schedules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Var
from xform.interpret import emit, walk
from xform.interpret.barrier import Where, barrier, is_active
from xform.interpret.joint import Schedule
from xform.interpret.node import gather, present_mask, spread
from xform.interpret.wait import Wait
from xform.planner.simulate.flat import Flattener
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatValue
from xform.program.fingerprint import type_text
from xform.program.ir import Mask, Program, trace


def flatten_schedule(schedule: Schedule, profile: Profile) -> FlatProgram:
    """Return both parts as one flat program.

    Its inputs are the inputs and the cotangents. Its outputs are the outputs and the results of the
    backward part.
    """
    joint, work = schedule.joint, Flattener(profile)
    inputs, seeds = work.inputs(joint.inputs), work.seeds(joint.seeds)
    by = _Flatten(schedule, work)
    with work.caching_facts(joint.program):
        outputs, kept = walk.forward(schedule, by, inputs)
        results = walk.backward(schedule, by, kept, inputs, seeds, together=True, whole=True)
    return work.build((*inputs, *seeds), (*outputs, *results))


@dataclasses.dataclass(frozen=True)
class _FlatToken:
    """The residuals of a node: the leaves of a pytree as values, with its structure and types."""

    values: list[FlatValue]
    tree: Any
    types: list[Any]


class _Flatten(walk.BackEnd):
    """The back end of `walk` that adds the steps of equations to a flat program."""

    def __init__(self, schedule: Schedule, work: Flattener):
        self.schedule, self.work = schedule, work

    def read(self, env: walk.Environment, v: Any) -> Any:
        return self.work.read(env, v)

    def constants(self, prog: Program) -> Mapping[Var, FlatValue]:
        return self.work.constants(prog)

    def results(self, eqn: JaxprEqn, xs: list[FlatValue]) -> list[FlatValue]:
        return self.work.add_equation(eqn, xs)[: len(eqn.outvars)]

    def fork(
        self, eqn: JaxprEqn, schedules: Sequence[Schedule], xs: list[FlatValue], used: Mask
    ) -> list[Any]:
        node, outputs = eqn.params["node"], used[:-1]
        trees: list[Any] = []

        def run(*xs: Any) -> list[Any]:
            *ys, token = emit.fork(eqn, schedules, xs, used)
            leaves, tree = jax.tree.flatten(token)
            trees.append(tree)
            return [*gather(ys, outputs), *leaves]

        key = "fork", used, *schedules
        prog = _trace_once(node.cache, key, run, [v.aval for v in eqn.invars])
        tree = node.cache.setdefault(("tree", key), *trees)
        values, n = self.work.add_program(prog, xs), sum(outputs)
        return [*spread(values[:n], outputs), _FlatToken(values[n:], tree, prog.out_avals[n:])]

    def join(
        self,
        eqn: JaxprEqn,
        schedules: Sequence[Schedule],
        token: _FlatToken,
        xs: list[FlatValue],
        seeds: list[FlatValue],
        together: bool,
    ) -> list[FlatValue]:
        node, given = eqn.params["node"], eqn.params["given"]
        n, k, reads = len(node.eqn.invars), len(token.values), present_mask(xs)
        inputs = gather(eqn.invars[1 : 1 + n], reads)

        def run(*values: Any) -> list[Any]:
            held = jax.tree.unflatten(token.tree, values[:k])
            ins = spread(values[k : k + len(inputs)], reads)
            cts = values[k + len(inputs) :]
            return emit.join(eqn, schedules, held, ins, cts, together=True)

        types = [*token.types, *(v.aval for v in (*inputs, *eqn.invars[1 + n :]))]
        key = "join", given, token.tree, *map(type_text, types), *schedules
        prog = _trace_once(node.cache, key, run, types)
        return self.work.add_program(prog, [*token.values, *gather(xs, reads), *seeds])

    def delay(self, wait: Wait, saved: list[FlatValue], seeds: list[FlatValue]) -> list[FlatValue]:
        n, types = len(saved), [v.aval for v in (*wait.saved, *wait.seeds)]
        key = "barrier", n, wait.where, *map(type_text, types)
        run = lambda *xs: barrier(xs[:n], xs[n:], wait.where)
        prog = _trace_once(self.schedule.joint.program.cache, key, run, types)
        return self.work.add_program(prog, [*saved, *seeds])

    def materialize(self, eqn: JaxprEqn, x: FlatValue, where: Where) -> FlatValue:
        return self.work.materialize(eqn, x) if is_active(where, self.work.profile.name) else x

    def transfer(self, schedule: Schedule, v: Var, x: FlatValue, back: bool) -> FlatValue:
        def program(back: bool) -> Program:
            kind = program(False).out_avals[0] if back else v.aval
            return _trace_once(
                schedule.cache,
                ("sent", v, back),
                lambda x: [emit.transfer(schedule, v, x, back)],
                [kind],
            )

        (value,) = self.work.add_program(program(back), [x])
        return value


def _trace_once(cache: dict[Any, Any], key: Any, run: Callable[..., list[Any]], types: Sequence[Any]
                ) -> Program:  # fmt: skip
    """The Program of a function for some types, traced once and cached under `key`."""
    if key not in cache:
        cache[key] = trace(run, *types)
    return cache[key]
