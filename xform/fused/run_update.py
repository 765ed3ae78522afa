"""Run a step: gradient and update, each parameter as soon as its gradient is complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, has_effects
from xform.fused.coupling import bits_of, read_by_several
from xform.fused.fused_step import Step
from xform.fused.layer_loop import BackwardLoop
from xform.fused.step_graph import Graph
from xform.fused.update_plan import UpdatePlan
from xform.program.ir import bind, read
from xform.program.source import name_stack

# An equation, or a backward loop with updates in it.
Item = JaxprEqn | BackwardLoop


def run_step(step: Step, plan: UpdatePlan, inputs: Sequence[Any]) -> list[Any]:
    """Run a traced step in the current trace; return its outputs.

    The backward pass runs in its own order. When the gradient of a leaf is complete and nothing
    reads the old parameter any more, the update of that leaf follows at once.
    """
    return _Run(step, plan, inputs).outputs()


class _Run:
    """A run of a step: the values so far, and what computes the others."""

    def __init__(self, step: Step, plan: UpdatePlan, inputs: Sequence[Any]):
        self._step = step
        self._env: dict[Var, Any] = dict(zip(step.inputs, inputs, strict=True))
        self._outer = name_stack()
        graph = self._graph = Graph(step)
        self._producer: dict[Var, Item] = {**graph.producer}
        for loop in plan.loops:
            self._producer.update(dict.fromkeys(loop.makes, loop))
        effects = [e for e in graph.equations if has_effects(e)]
        kept = self._needed([*step.outputs, *(v for e in effects for v in e.invars)])
        kept |= {id(e) for e in effects}
        loop_of = {id(loop.scan): loop for loop in plan.loops}
        order = [loop_of.get(id(e), e) for e in step.gradient]
        self._order: list[Item] = [item for item in order if id(item) in kept]
        self._results = _own_results(step)
        self._ready = self._ready_after(set(range(len(step.params))) - plan.in_loop)

    def outputs(self) -> list[Any]:
        """Run everything; return the outputs."""
        for i, item in enumerate(self._order):
            self._run(item)
            for leaf in self._ready.get(i, ()):
                self._compute(self._results.get(leaf, ()))
        self._compute(self._step.outputs)
        return [read(self._env, v) for v in self._step.outputs]

    def _needed(self, wanted: Iterable[Any]) -> set[int]:
        """Return the `id`s of the items that compute some values."""
        found = set[int]()
        stack = [*wanted]
        while stack:
            v = stack.pop()
            item = self._producer.get(v) if isinstance(v, Var) else None
            if item is not None and id(item) not in found:
                found.add(id(item))
                stack += _reads(item)
        return found

    def _ready_after(self, leaves: Iterable[int]) -> dict[int, list[int]]:
        """Return, by the position of an item, the leaves that can be updated after it.

        After it the gradient is complete, and no later item reads the old parameter.
        """
        made: dict[Any, int] = {}
        last_read: dict[Any, int] = {}
        for i, item in enumerate(self._order):
            made.update(dict.fromkeys(_makes(item), i))
            read_here = (self._graph.origin(v)[0] for v in _reads(item) if isinstance(v, Var))
            last_read.update(dict.fromkeys(read_here, i))
        ready: dict[int, list[int]] = {}
        for leaf in leaves:
            grad, param = self._step.grads[leaf], self._step.params[leaf]
            if isinstance(grad, Var) and grad in made:
                at = max(last_read.get(param, 0), made[grad])
                ready.setdefault(at, []).append(leaf)
        return ready

    def _run(self, item: Item) -> None:
        """Run an item, and before it the items that compute what it reads."""
        self._compute(_reads(item))
        if isinstance(item, BackwardLoop):
            if any(v not in self._env for v in item.makes):
                self._env.update(item.run(lambda v: read(self._env, v)))
        elif not item.outvars or any(v not in self._env for v in item.outvars):
            ys = bind(item, [read(self._env, v) for v in item.invars], self._outer)
            self._env.update(zip(item.outvars, ys, strict=True))

    def _compute(self, wanted: Iterable[Any]) -> None:
        """Compute values that are not known yet."""
        stack = [v for v in wanted if isinstance(v, Var)][::-1]
        while stack:
            if stack[-1] in self._env:
                stack.pop()
                continue
            item = self._producer[stack[-1]]
            missing = [v for v in _reads(item) if isinstance(v, Var) and v not in self._env]
            if missing:
                stack += missing[::-1]
            else:
                self._run(item)


def _reads(item: Item) -> Sequence[Any]:
    return item.reads if isinstance(item, BackwardLoop) else item.invars


def _makes(item: Item) -> Sequence[Var]:
    return item.makes if isinstance(item, BackwardLoop) else item.outvars


def _own_results(step: Step) -> dict[int, list[Var]]:
    """Return for each leaf the values to compute as soon as its gradient is complete.

    These are results that depend on no other gradient, and values that the results of several
    leaves read.
    """
    found = read_by_several(step)
    for leaf, v in enumerate(step.new_params):
        if isinstance(v, Var):
            found.setdefault(leaf, []).append(v)
    for v in step.new_state:
        bits = bits_of(step, v)
        if isinstance(v, Var) and bits and not bits & (bits - 1):
            found.setdefault(bits.bit_length() - 1, []).append(v)
    return found
