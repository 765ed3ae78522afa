"""Base class for building a flat program: equal steps are added once."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from xform._jax import JaxprEqn, Literal, Primitive, Var, has_effects
from xform.planner.simulate.products import shape
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Cell, Flat, Step
from xform.program.fingerprint import literal, operation
from xform.program.ir import Program
from xform.registry.table import traits
from xform.registry.traits import Traits

T = TypeVar("T")


class Operation:
    """The operation of an equation without its operands, as a key for dictionaries.

    Two operations are equal if their texts are equal. The text is made only for a comparison of two
    keys with the same hash, because the text of a loop is long.
    """

    __slots__ = ("_eqn", "_hash", "_text")

    def __init__(self, eqn: JaxprEqn):
        self._eqn, self._text = eqn, ""
        plain = ((k, _plain(x)) for k, x in eqn.params.items() if x is not None)
        self._hash = hash((eqn.primitive.name, frozenset(plain)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Operation) and self._as_text() == other._as_text()

    def _as_text(self) -> str:
        self._text = self._text or operation(self._eqn)
        return self._text


def _plain(x: Any) -> Any:
    """A parameter for the hash: its integers and tuples of integers, and 0 for anything else."""
    return tuple(map(_plain, x)) if type(x) is tuple else x if type(x) is int else 0


class Adding(abc.ABC):
    """A flat program in the making. An added step that equals an earlier one returns its results.

    Subclasses define `results`, which turns an equation into steps.
    """

    def __init__(self, profile: Profile):
        self.profile = profile
        # Values that the compiler can compute at compile time.
        self.fixed: set[Cell] = set()
        self._steps: list[Step] = []
        self._results: dict[Any, list[Cell]] = {}
        # Facts about the equations of the current program, see `reading`.
        self._known: dict[Any, Any] = {}
        self._of: dict[Primitive, Traits] = {}
        self._sizes: dict[int, tuple[Any, int]] = {}

    @abc.abstractmethod
    def results(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """Add the steps of an equation with operands `reads`, and return its results."""

    def bytes(self, aval: Any) -> int:
        """Return the bytes of a value on the device; 0 if it lies in the memory of the host."""
        if id(aval) not in self._sizes:
            host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
            size = 0 if host and not self.profile.host_is_device else self.profile.bytes(aval)
            self._sizes[id(aval)] = aval, size
        return self._sizes[id(aval)][1]

    def inputs(self, values: Sequence[Var]) -> list[Cell]:
        """Return new cells for the inputs of a program."""
        return [Cell(self.bytes(v.aval), "input", shape(v.aval)) for v in values]

    def seeds(self, values: Sequence[Var]) -> list[Cell]:
        """Return new cells for cotangents.

        A scalar cotangent is taken for the 1 that `grad` passes, which the compiler knows.
        """
        cells = self.inputs(values)
        self.fixed |= {c for c in cells if not c.shape}
        return cells

    def flat(self, inputs: Sequence[Cell], outputs: Sequence[Cell]) -> Flat:
        """Return the flat program of the steps that outputs need, with the readers of each value.

        Steps with effects are kept too.
        """
        need = set(outputs)
        steps: list[Step] = []
        for step in reversed(self._steps):
            if not need.isdisjoint(step.makes) or has_effects(step.eqn):
                need.update(step.reads)
                steps.append(step)
        steps.reverse()
        for step in steps:
            for cell in dict.fromkeys(step.reads):
                cell.readers.append(step)
        return Flat(tuple(inputs), tuple(steps), tuple(outputs))

    def run(self, prog: Program, inputs: Sequence[Cell]) -> list[Cell]:
        """Add the steps of a program, and return its outputs."""
        env: dict[Any, Any] = dict(zip(prog.inputs, inputs, strict=True))
        env |= self.constants(prog)
        with self.reading(prog):
            for eqn in prog.equations:
                values = self.results(eqn, [self.read(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, values, strict=False))
        return [self.read(env, v) for v in prog.outputs]

    @contextlib.contextmanager
    def reading(self, prog: Program) -> Generator[None]:
        """Within this context, facts about equations are cached on program `prog`."""
        outer, self._known = self._known, prog.cache.setdefault("flattening", {})
        try:
            yield
        finally:
            self._known = outer

    def constants(self, prog: Program) -> dict[Var, Cell]:
        """Return the cells of a program's constants."""
        return {v: self.constant(id(x), shape(v.aval)) for v, x in prog.consts}

    def read(self, env: Mapping[Any, Any], v: Any) -> Any:
        """Return the cell of a variable in an environment, or a constant cell for a literal."""
        if not isinstance(v, Literal):
            return env[v]
        return self.constant(self.known(v, "literal", lambda: literal(v)), shape(v.aval))

    def operation(self, eqn: JaxprEqn) -> Operation:
        """Return the operation of an equation, as a key."""
        return self.known(eqn, "operation", lambda: Operation(eqn))

    def known(self, of: JaxprEqn | Literal, what: Any, make: Callable[[], T]) -> T:
        """Return a fact that depends on an equation or literal alone, computed once.

        `what` names the fact, and `make` computes it.
        """
        key = id(of), what
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def traits(self, does: Primitive) -> Traits:
        """Return the traits of a primitive."""
        if does not in self._of:
            self._of[does] = traits(does)
        return self._of[does]

    def known_early(self, cell: Cell) -> bool:
        """Whether the compiler can compute a value at compile time."""
        return cell.kind == "constant" or cell in self.fixed

    def constant(self, key: Any, size: tuple[int, ...]) -> Cell:
        """Return the cell of a constant, which takes no bytes."""
        return self._results.setdefault(("constant", key), [Cell(0, "constant", size)])[0]

    def step(self, does: Primitive, key: Any, eqn: JaxprEqn, reads: list[Cell],
              types: Sequence[Any] | None = None) -> list[Cell]:  # fmt: skip
        """Add a step, and return its results. An equal earlier step is not added again.

        Args:
          does: the primitive of the step.
          key: what tells the step from other steps of this primitive.
          eqn: the equation that it comes from.
          reads: its operands.
          types: the types of its results, as avals or as cells to copy; by default as in `eqn`.
        """
        cells = self._results.get((does, key)) if not has_effects(eqn) else None
        if cells is None:
            if types is None:
                types = [v.aval for v in eqn.outvars]
            cells = [
                Cell(t.bytes, "made", t.shape) if type(t) is Cell
                else Cell(self.bytes(t), "made", shape(t)) for t in types
            ]  # fmt: skip
            inputs = [c for c in reads if c.kind != "constant"]
            step = Step(does, self.traits(does), eqn, inputs, cells)
            for cell in cells:
                cell.maker = step
            if self.fixed.issuperset(inputs):
                self.fixed.update(cells)
            self._steps.append(step)
            self._results[does, key] = cells
        return cells
