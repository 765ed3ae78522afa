"""Both parts of a Plan as one flat program: what `emit` would run, without running it.

A budget is held against many plans, and to emit each of them would be to trace it. The equations of
a Joint are at hand; of a loop or call, with what it keeps, each part is traced once for the Plans
of its Joints.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from xform._jax import JaxprEqn, Var
from xform.fingerprint import typed
from xform.interpret.barrier import barrier, holds
from xform.interpret.emit import send
from xform.interpret.joint import Plan, reads_of
from xform.interpret.node import Node, fork_p, gather, join_p, spread
from xform.interpret.shared import shared
from xform.interpret.wait import Wait, Waits, waits
from xform.interpret.written import written
from xform.ir import Mask, Program, trace
from xform.passes.dce import live
from xform.planner.simulate.flat import Flattening
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Cell, Flat


def flatten_plan(plan: Plan, profile: Profile) -> Flat:
    """The steps of both parts: inputs then cotangents to outputs then results."""
    joint, work = plan.joint, Flattening(profile)
    inputs, seeds = work.inputs(joint.inputs), work.seeds(joint.seeds)
    at_hand: dict[Any, Any] = dict(zip(joint.inputs, inputs, strict=True))
    at_hand |= work.constants(joint.program)

    wanted = (*joint.outputs, *plan.kept)
    forward = _Part(plan, work, dict(at_hand))
    with work.reading(joint.program):
        sent = forward.run(live(joint.forward, wanted), wanted)
    outputs = [work.read(forward.env, v) for v in joint.outputs]
    kept = {v: sent.get(v, forward.env[v]) for v in plan.kept}

    backward = _Part(plan, work, _Kept(plan, work, kept))
    backward.env |= {**at_hand, **dict(zip(joint.seeds, seeds, strict=True))}
    with work.reading(joint.program):
        backward.run(plan.order, joint.backward_outputs, waits(plan, whole=True, together=True))
    results = [work.read(backward.env, v) for v in joint.backward_outputs]
    return work.flat((*inputs, *seeds), (*outputs, *results))


@dataclasses.dataclass(frozen=True)
class _Token:
    """What a node keeps: the cells of a tree, and their types."""

    cells: list[Cell]
    tree: Any
    types: list[Any]


class _Kept(dict[Any, Any]):
    """An environment with the kept values; what was sent comes back where it is first read."""

    def __init__(self, plan: Plan, work: Flattening, kept: Mapping[Var, Any]):
        self._plan, self._work, self._kept = plan, work, kept

    def __missing__(self, v: Var) -> Any:
        if v not in self._kept:
            self[v] = self[self._plan.joint.named[v]]
        elif v in self._plan.offloaded:
            self[v] = _sent(self._plan, self._work, v, self._kept[v], True)
        else:
            self[v] = self._kept[v]
        return self[v]


class _Part:
    """One part of a Plan; `env` has the cells of variables, and the tokens of nodes."""

    def __init__(self, plan: Plan, work: Flattening, env: dict[Any, Any]):
        self.plan, self.work, self.env = plan, work, env

    def run(self, equations: Sequence[JaxprEqn], wanted: Sequence[Any],
            places: Waits | None = None) -> dict[Var, Cell]:  # fmt: skip
        """Add the steps of some equations; what is sent to wait elsewhere.

        `places` are barriers.
        """
        plan, env, sent = self.plan, self.env, dict[Var, Cell]()
        stays = written(plan) if places is None else shared(plan) | written(plan)
        need = {v for v in wanted if isinstance(v, Var)}  # of the results of nodes, which are used
        for eqn in equations if plan.inner else ():
            need.update(reads_of(eqn, plan.inner))
        for i, eqn in enumerate(equations):
            for wait in places.get(i, ()) if places else ():
                self._barrier(wait)
            if eqn.primitive is fork_p:
                values = self._fork(eqn, tuple(v in need for v in eqn.outvars))
            elif eqn.primitive is join_p:
                values = self._join(eqn)
            else:
                values = self.work.results(eqn, [self.work.read(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, values, strict=False))
            for v in eqn.outvars:
                if v in stays and holds(stays[v], self.work.profile.name):
                    env[v] = self.work.written(eqn, env[v])
            if places is None and plan.offloaded:
                moved = [v for v in eqn.outvars if v in plan.offloaded]
                sent |= {v: _sent(plan, self.work, v, env[v], False) for v in moved}
        return sent

    def _barrier(self, at: Wait) -> None:
        n = len(at.saved)
        types = [v.aval for v in (*at.saved, *at.seeds)]
        key = "barrier", n, at.where, *map(typed, types)
        run = lambda *xs: barrier(xs[:n], xs[n:], at.where)
        cells = [self.env[v] for v in (*at.saved, *at.seeds)]
        held = self.work.run(_once(self.plan.joint.program.cache, key, run, types), cells)
        self.env.update(zip(at.saved, held, strict=True))

    def _fork(self, eqn: JaxprEqn, used: Mask) -> list[Any]:
        """The outputs of a node's forward part, and its token."""
        node: Node = eqn.params["node"]
        plans = self.plan.inner[node]
        trees: list[Any] = []

        def run(*xs: Any) -> list[Any]:
            with eqn.ctx.manager:
                if used[-1]:
                    ys, token = node.forward(plans, xs, used[:-1])
                else:
                    ys, token = node.outputs(plans, xs, used[:-1]), None
            leaves, tree = jax.tree.flatten(token)
            trees.append(tree)
            return [*gather(ys, used[:-1]), *leaves]

        key = "fork", node, used, *plans
        cache = self._cache(plans)
        prog = _once(cache, key, run, [v.aval for v in eqn.invars])
        tree = cache.setdefault(("tree", key), *trees)
        cells = self.work.run(prog, [self.work.read(self.env, v) for v in eqn.invars])
        n = sum(used[:-1])
        return [*spread(cells[:n], used[:-1]), _Token(cells[n:], tree, prog.out_avals[n:])]

    def _join(self, eqn: JaxprEqn) -> list[Cell]:
        """The results of a node's backward part."""
        node: Node = eqn.params["node"]
        plans, token = self.plan.inner[node], self.env[eqn.invars[0]]
        n, k = len(node.eqn.invars), len(token.cells)
        reads = node.reads(plans)
        xs, seeds = gather(eqn.invars[1 : 1 + n], reads), eqn.invars[1 + n :]
        given = eqn.params["given"]

        def run(*values: Any) -> list[Any]:
            held = jax.tree.unflatten(token.tree, values[:k])
            ins = spread(values[k : k + len(xs)], reads)
            with eqn.ctx.manager:
                cts = spread(values[k + len(xs) :], given)
                return gather(node.backward(plans, held, ins, cts, True), node.gives(given))

        types = [*token.types, *(v.aval for v in (*xs, *seeds))]
        key = "join", node, given, token.tree, *map(typed, types), *plans
        prog = _once(self._cache(plans), key, run, types)
        cells = [self.work.read(self.env, v) for v in (*xs, *seeds)]
        return self.work.run(prog, [*token.cells, *cells])

    def _cache(self, plans: Sequence[Plan]) -> dict[Any, Any]:
        return plans[0].cache if plans else self.plan.cache


def _sent(plan: Plan, work: Flattening, v: Var, cell: Cell, back: bool) -> Cell:
    """A value on its way to where it waits, or `back`."""
    there = lambda back: _once(plan.cache, ("sent", v, back), lambda x: [send(plan, v, x, back)],
                               [there(False).out_avals[0] if back else v.aval])  # fmt: skip
    (moved,) = work.run(there(back), [cell])
    return moved


def _once(cache: dict[Any, Any], key: Any, run: Callable[..., list[Any]], types: Sequence[Any]
          ) -> Program:  # fmt: skip
    """The Program of a function of some types, traced once."""
    if key not in cache:
        cache[key] = trace(run, *types)
    return cache[key]
