"""Steps of a flat program as they are added, each once."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

import jax

from xform._jax import JaxprEqn, Literal, Primitive, Var, has_effects
from xform.fingerprint import literal, operation
from xform.ir import Program
from xform.planner.simulate.products import shape
from xform.planner.simulate.profiles import Profile
from xform.planner.simulate.steps import Cell, Flat, Step
from xform.table import traits
from xform.traits import Traits

T = TypeVar("T")


class Operation:
    """What an equation does, whatever it reads: equal for equal operations.

    It is put in words only when it is compared, as when two equations read the same values: what a
    loop does is long to say.
    """

    __slots__ = ("_eqn", "_hash", "_text")

    def __init__(self, eqn: JaxprEqn):
        self._eqn, self._text = eqn, ""
        plain = ((k, _plain(x)) for k, x in eqn.params.items() if x is not None)
        self._hash = hash((eqn.primitive.name, frozenset(plain)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Operation) and self._said() == other._said())

    def _said(self) -> str:
        self._text = self._text or operation(self._eqn)
        return self._text


def _plain(x: Any) -> Any:
    """A parameter, as far as it is of numbers that have equal texts only if they are equal."""
    return tuple(map(_plain, x)) if type(x) is tuple else x if type(x) is int else 0


class Adding(abc.ABC):
    """The steps so far. What is equal to one that was taken is that one."""

    def __init__(self, profile: Profile):
        self.profile = profile
        # What is known while the program is compiled.
        self.fixed: set[Cell] = set()
        self._steps: list[Step] = []
        self._taken: dict[Any, list[Cell]] = {}
        self._known: dict[Any, Any] = {}
        self._of: dict[Primitive, Traits] = {}
        self._sizes: dict[int, tuple[Any, int]] = {}

    @abc.abstractmethod
    def results(self, eqn: JaxprEqn, reads: list[Cell]) -> list[Cell]:
        """What an equation makes of what it reads."""

    def bytes(self, aval: Any) -> int:
        """Bytes of a value on the device."""
        if id(aval) not in self._sizes:
            host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
            size = 0 if host and not self.profile.host_is_device else self.profile.bytes(aval)
            self._sizes[id(aval)] = aval, size
        return self._sizes[id(aval)][1]

    def inputs(self, values: Sequence[Var]) -> list[Cell]:
        """The cells of a program's inputs."""
        return [Cell(self.bytes(v.aval), "input", shape(v.aval)) for v in values]

    def seeds(self, values: Sequence[Var]) -> list[Cell]:
        """The cells of cotangents: a scalar is the 1 that `grad` passes, which is seen."""
        cells = self.inputs(values)
        self.fixed |= {c for c in cells if not c.shape}
        return cells

    def flat(self, inputs: Sequence[Cell], outputs: Sequence[Cell]) -> Flat:
        """The steps that outputs need, each value with its readers."""
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
        """What a program makes of some cells."""
        env: dict[Any, Any] = dict(zip(prog.inputs, inputs, strict=True))
        env |= self.constants(prog)
        with self.reading(prog):
            for eqn in prog.equations:
                values = self.results(eqn, [self.read(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, values, strict=False))
        return [self.read(env, v) for v in prog.outputs]

    @contextlib.contextmanager
    def reading(self, prog: Program) -> Generator[None]:
        """Within it, equations are this program's, with which is kept what is known of them."""
        outer, self._known = self._known, prog.cache.setdefault("flattening", {})
        try:
            yield
        finally:
            self._known = outer

    def constants(self, prog: Program) -> dict[Var, Cell]:
        """The cells of what a program closes over."""
        return {v: self.constant(id(x), shape(v.aval)) for v, x in prog.consts}

    def read(self, env: Mapping[Any, Any], v: Any) -> Any:
        """What an environment has for a variable; a literal is a constant."""
        if not isinstance(v, Literal):
            return env[v]
        return self.constant(self.known(v, "literal", lambda: literal(v)), shape(v.aval))

    def operation(self, eqn: JaxprEqn) -> Operation:
        """What an equation does, equal for equal operations."""
        return self.known(eqn, "operation", lambda: Operation(eqn))

    def known(self, of: JaxprEqn | Literal, what: Any, make: Callable[[], T]) -> T:
        """What is the same whenever an equation is met, whatever it reads: made once."""
        key = id(of), what
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def traits(self, does: Primitive) -> Traits:
        """The traits of a primitive."""
        if does not in self._of:
            self._of[does] = traits(does)
        return self._of[does]

    def known_early(self, cell: Cell) -> bool:
        """Whether the compiler knows a value."""
        return cell.kind == "constant" or cell in self.fixed

    def constant(self, key: Any, size: tuple[int, ...]) -> Cell:
        """The cell of a constant: of no bytes."""
        return self._taken.setdefault(("constant", key), [Cell(0, "constant", size)])[0]

    def step(self, does: Primitive, key: Any, eqn: JaxprEqn, reads: list[Cell],
              types: Sequence[Any] | None = None) -> list[Cell]:  # fmt: skip
        """What a step makes; the same as before if it has been taken before."""
        cells = self._taken.get((does, key)) if not has_effects(eqn) else None
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
            self._taken[does, key] = cells
        return cells
