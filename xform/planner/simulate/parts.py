"""Turn a planned forward and backward pass into one flat program, without tracing it.

A `Schedule` is a plan for a `Joint` (the forward and backward pass of a function as one program):
which values are saved, and which operations are recomputed where. `interpret/emit.py` runs such a
plan in a trace. But a trace takes time, and the planner simulates many plans. So `_FlatBackEnd`
goes over the plan like `emit`, but adds the operations to a flat program, the list of operations
that XLA gets before fusion (`steps.py`). Only the two parts of a loop or call are traced, once for
each set of Schedules inside it.

The forward part of a loop or call is a *fork*, and its backward part is a *join*. The fork returns
a token, which holds the residuals that the join reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Var
from xform.interpret import emit, walk
from xform.interpret.joint import Schedule
from xform.interpret.node import gather, present_mask, spread
from xform.planner.simulate.flat import Flattener
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import FlatProgram, FlatValue
from xform.program.fingerprint import type_text
from xform.program.ir import Mask, Program, trace
from xform.steering.barrier import Where, barrier, is_active
from xform.steering.wait import Wait


def flatten_schedule(schedule: Schedule, profile: Profile) -> FlatProgram:
    """Return the forward and the backward part of a Schedule as one flat program.

    Its inputs are those of the function and the cotangents of its outputs. Its outputs are those of
    the function and the results of the backward part.
    """
    joint, flattener = schedule.joint, Flattener(profile)
    inputs = flattener.inputs(joint.inputs)
    cotangents = flattener.cotangent_inputs(joint.seeds)
    back_end = _FlatBackEnd(schedule, flattener)
    with flattener.caching_facts(joint.program):
        outputs, saved = walk.forward(schedule, back_end, inputs)
        results = walk.backward(
            schedule, back_end, saved, inputs, cotangents, together=True, whole=True
        )
    return flattener.build((*inputs, *cotangents), (*outputs, *results))


@dataclasses.dataclass(frozen=True)
class _FlatToken:
    """The residuals of a loop or call, as values of the flat program.

    Attributes:
      leaves: the residuals, which are the leaves of a pytree.
      tree: the structure of that pytree.
      types: the type of each leaf.
    """

    leaves: list[FlatValue]
    tree: Any
    types: list[Any]


class _FlatBackEnd(walk.BackEnd):
    """The back end of `walk` that adds the steps of each equation to a flat program.

    The methods implement the interface `walk.BackEnd`. A value is a `FlatValue`, and a token is a
    `_FlatToken`.
    """

    def __init__(self, schedule: Schedule, flattener: Flattener):
        self.schedule, self.flattener = schedule, flattener

    def read(self, env: walk.Environment, v: Any) -> Any:
        return self.flattener.read(env, v)

    def constants(self, prog: Program) -> Mapping[Var, FlatValue]:
        return self.flattener.constants(prog)

    def results(self, eqn: JaxprEqn, xs: list[FlatValue]) -> list[FlatValue]:
        return self.flattener.add_equation(eqn, xs)[: len(eqn.outvars)]

    def fork(
        self, eqn: JaxprEqn, schedules: Sequence[Schedule], xs: list[FlatValue], used: Mask
    ) -> list[Any]:
        """Add the forward part of a loop or call. Return its outputs and its token."""
        node, used_outputs = eqn.params["node"], used[:-1]
        trees: list[Any] = []

        def forward_part(*xs: Any) -> list[Any]:
            *ys, token = emit.fork(eqn, schedules, xs, used)
            leaves, tree = jax.tree.flatten(token)
            trees.append(tree)
            return [*gather(ys, used_outputs), *leaves]

        key = "fork", used, *schedules
        prog = _trace_once(node.cache, key, forward_part, [v.aval for v in eqn.invars])
        tree = node.cache.setdefault(("tree", key), *trees)
        values, n = self.flattener.add_program(prog, xs), sum(used_outputs)
        return [*spread(values[:n], used_outputs), _FlatToken(values[n:], tree, prog.out_avals[n:])]

    def join(
        self,
        eqn: JaxprEqn,
        schedules: Sequence[Schedule],
        token: _FlatToken,
        xs: list[FlatValue],
        seeds: list[FlatValue],
        together: bool,
    ) -> list[FlatValue]:
        """Add the backward part of a loop or call. Return its results.

        `xs` are the inputs of the loop or call, with None for each input that the backward part
        does not read. `seeds` are cotangents.
        """
        node, given = eqn.params["node"], eqn.params["given"]
        n_inputs, n_leaves, is_read = len(node.eqn.invars), len(token.leaves), present_mask(xs)
        inputs = gather(eqn.invars[1 : 1 + n_inputs], is_read)

        def backward_part(*values: Any) -> list[Any]:
            residuals = jax.tree.unflatten(token.tree, values[:n_leaves])
            ins = spread(values[n_leaves : n_leaves + len(inputs)], is_read)
            cotangents = values[n_leaves + len(inputs) :]
            return emit.join(eqn, schedules, residuals, ins, cotangents, together=True)

        types = [*token.types, *(v.aval for v in (*inputs, *eqn.invars[1 + n_inputs :]))]
        key = "join", given, token.tree, *map(type_text, types), *schedules
        prog = _trace_once(node.cache, key, backward_part, types)
        return self.flattener.add_program(prog, [*token.leaves, *gather(xs, is_read), *seeds])

    def delay(self, wait: Wait, saved: list[FlatValue], seeds: list[FlatValue]) -> list[FlatValue]:
        """Add a barrier that delays saved values until cotangents are computed."""
        n, types = len(saved), [v.aval for v in (*wait.saved, *wait.seeds)]
        key = "barrier", n, wait.where, *map(type_text, types)
        delayed = lambda *xs: barrier(xs[:n], xs[n:], wait.where)
        prog = _trace_once(self.schedule.joint.program.cache, key, delayed, types)
        return self.flattener.add_program(prog, [*saved, *seeds])

    def materialize(self, eqn: JaxprEqn, x: FlatValue, where: Where) -> FlatValue:
        """Write the result `x` of an equation to memory, if `where` includes this backend."""
        is_written = is_active(where, self.flattener.profile.name)
        return self.flattener.materialize(eqn, x) if is_written else x

    def transfer(self, schedule: Schedule, v: Var, x: FlatValue, back: bool) -> FlatValue:
        """Copy the offloaded value of `v` to its other memory, or `back` to the device's memory."""

        def trace_transfer(back: bool) -> Program:
            aval = trace_transfer(False).out_avals[0] if back else v.aval
            move = lambda x: [emit.transfer(schedule, v, x, back)]
            return _trace_once(schedule.cache, ("sent", v, back), move, [aval])

        (moved,) = self.flattener.add_program(trace_transfer(back), [x])
        return moved


def _trace_once(cache: dict[Any, Any], key: Any, f: Callable[..., list[Any]], types: Sequence[Any]
                ) -> Program:  # fmt: skip
    """Return the Program of `f` for these types, traced once and cached under `key`."""
    if key not in cache:
        cache[key] = trace(f, *types)
    return cache[key]
