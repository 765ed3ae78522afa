"""Analyze a program together with the bodies of its loops, branches and calls.

An analysis finds a *fact* about each value, such as whether it depends on an argument. A *forward*
analysis computes the facts about the results of an equation from those about the operands. A
*backward* analysis goes from the results to the operands. This file does both for *structured*
equations, which run programs: `results_through` goes forward through such an equation, and
`operands_through` goes backward. They analyze the body of a loop again until nothing changes. The
equation's `Flow` says where values enter and leave the bodies (`xform.program.flow`). A `Lattice`
says how the analysis combines facts. `Forward` is a forward analysis of whole programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from xform._jax import JaxprEqn, Var
from xform.program.flow import Body, Flow
from xform.program.ir import Atom, Program
from xform.registry.table import flow_of

T = TypeVar("T")
# Analyzes a body: from its inputs to its outputs (forward), or from outputs to inputs (backward).
AnalyzeBody = Callable[[Program, list[T]], Sequence[T]]


class Lattice(Generic[T]):
    """How an analysis combines facts about values.

    The variables `v` in the arguments tell the types of the values.

    Attributes:
      follows_control: whether a result depends on what decides how it is computed: the index of a
        branch, or the condition of a loop. If not, `control` is never called.
    """

    follows_control: ClassVar[bool] = False

    def join(self, a: T, b: T) -> T:
        """Return the fact about a value that is one of two values.

        In a loop, `a` is the fact before this iteration. The loop is analyzed again until the join
        is the same as `a`.
        """
        raise NotImplementedError

    def same(self, a: T, b: T) -> bool:
        """Return whether two facts are the same."""
        return a == b

    def enter(self, x: T, v: Any) -> T:
        """Return the fact about `v`, a carry of a loop or a result of a branch.

        `x` is the fact about its first possible value. The others are joined to the result.
        """
        return x

    def slice(self, x: T, v: Any) -> T:
        """Return the fact about `v`, a slice of a value in any iteration."""
        return x

    def stack(self, x: T, v: Any) -> T:
        """Return the fact about `v`, which stacks the values of all iterations."""
        return x

    def control(self, predicate: T, x: T) -> T:
        """Return the fact about a result, if `predicate` decides how it is computed.

        `predicate` is the index of a branch, or the output of a loop's condition.
        """
        return x


class AnyOf(Lattice[bool]):
    """A value has a property if one of the values that it may be has it."""

    def join(self, a: bool, b: bool) -> bool:
        return a or b


def results_through(
    flow: Flow, operands: Sequence[T], results: Sequence[Any], lattice: Lattice[T],
    analyze: AnalyzeBody[T],
) -> list[T]:  # fmt: skip
    """Return the facts about the results of a structured equation, from those about its operands.

    Args:
      flow: the `Flow` of the equation.
      operands: the fact about each operand.
      results: the variables of the results.
      lattice: how facts are combined.
      analyze: returns the facts about the outputs of a body, from those about its inputs.
    """
    values = list(operands)
    for k, r in flow.carried.items():
        values[k] = lattice.enter(operands[k], results[r])
    for k in flow.scanned:
        values[k] = lattice.slice(operands[k], _input_that_reads(flow, k))
    while True:
        known = {r: values[k] for k, r in flow.carried.items()}
        for body in flow.bodies:
            outs = analyze(body.program, [values[k] for k in body.operands])
            for y, r in zip(outs, body.results, strict=True):
                if r in known:
                    known[r] = lattice.join(known[r], y)
                elif r in flow.stacked:
                    known[r] = lattice.stack(y, results[r])
                else:
                    known[r] = y if len(flow.bodies) == 1 else lattice.enter(y, results[r])
        if all(lattice.same(values[k], known[r]) for k, r in flow.carried.items()):
            break
        for k, r in flow.carried.items():
            values[k] = known[r]
    ys = [known[r] for r in range(len(results))]
    if not lattice.follows_control:
        return ys
    predicates = [] if flow.index is None else [values[flow.index]]
    if flow.condition is not None:
        inputs = [values[k] for k in flow.condition.operands]
        predicates += analyze(flow.condition.program, inputs)
    for predicate in predicates:
        ys = [lattice.control(predicate, y) for y in ys]
    return ys


def _input_that_reads(flow: Flow, k: int) -> Var:
    """Return the input of a loop's body that reads operand `k`."""
    (body,) = flow.bodies
    return body.program.inputs[list(body.operands).index(k)]


def operands_through(
    flow: Flow, results: Sequence[T], operands: Sequence[Any], lattice: Lattice[T],
    analyze: AnalyzeBody[T], unread: T, predicate: T,
) -> list[T]:  # fmt: skip
    """Return the facts about the operands of a structured equation, from those about its results.

    Args:
      flow: the `Flow` of the equation.
      results: the fact about each result.
      operands: the variables of the operands.
      lattice: how facts are combined.
      analyze: returns the facts about the inputs of a body, from those about its outputs.
      unread: the fact about a value that nothing reads.
      predicate: the fact about the index of a branch, and about the output of a condition.
    """
    known = list(results)
    while True:
        values = [unread] * len(operands)
        for k, r in flow.carried.items():
            values[k] = known[r]
        if flow.index is not None:
            values[flow.index] = predicate
        runs = [(body, _outputs(flow, body, known, lattice)) for body in flow.bodies]
        if flow.condition is not None:
            runs.append((flow.condition, [predicate]))
        for body, outputs in runs:
            for x, k in zip(analyze(body.program, outputs), body.operands, strict=True):
                read = lattice.stack(x, operands[k]) if k in flow.scanned else x
                values[k] = lattice.join(values[k], read)
        if all(lattice.same(values[k], known[r]) for k, r in flow.carried.items()):
            return values
        for k, r in flow.carried.items():
            known[r] = values[k]


def _outputs(flow: Flow, body: Body, known: Sequence[T], lattice: Lattice[T]) -> list[T]:
    """Return the facts about the outputs of a body, from those about the results."""
    return [
        lattice.slice(known[r], v) if r in flow.stacked else known[r]
        for v, r in zip(body.program.outputs, body.results, strict=True)
    ]


class Forward(Lattice[T]):
    """A forward analysis of programs. A subclass defines `join`, `constant` and `transfer`."""

    def constant(self, v: Atom) -> T:
        """Return the fact about a literal or a constant of a program."""
        raise NotImplementedError

    def transfer(self, eqn: JaxprEqn, operands: list[T], through: list[T] | None) -> Sequence[T]:
        """Return the facts about the results of an equation, from those about its operands.

        `through` has the facts that the equation's programs give; None if it runs no program.
        """
        raise NotImplementedError

    def run(self, prog: Program, inputs: Sequence[T]) -> list[T]:
        """Return the facts about the outputs of a program, from those about its inputs."""
        env = self.environment(prog, inputs)
        return [self._read(env, v) for v in prog.outputs]

    def environment(self, prog: Program, inputs: Sequence[T]) -> dict[Var, T]:
        """Return the facts about the values of a program, without those of nested programs."""
        env: dict[Var, T] = {v: self.constant(v) for v, _ in prog.consts}
        env.update(zip(prog.inputs, inputs, strict=True))
        for eqn in prog.equations:
            results = self.equation(eqn, [self._read(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return env

    def equation(self, eqn: JaxprEqn, operands: list[T]) -> Sequence[T]:
        """Return the facts about the results of an equation, from those about its operands."""
        flow = flow_of(eqn)
        if flow is None:
            return self.transfer(eqn, operands, None)
        through = results_through(flow, operands, eqn.outvars, self, self.run)
        return self.transfer(eqn, operands, through)

    def _read(self, env: dict[Var, T], v: Atom) -> T:
        return env[v] if isinstance(v, Var) else self.constant(v)
