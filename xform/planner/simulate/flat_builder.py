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
from xform.planner.simulate.steps import FlatProgram, FlatStep, FlatValue
from xform.program.fingerprint import literal_text, operation_text
from xform.program.ir import Program
from xform.registry.table import traits
from xform.registry.traits import Traits

T = TypeVar("T")


class OperationKey:
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
        return isinstance(other, OperationKey) and self._as_text() == other._as_text()

    def _as_text(self) -> str:
        self._text = self._text or operation_text(self._eqn)
        return self._text


def _plain(x: Any) -> Any:
    """A parameter for the hash: its integers and tuples of integers, and 0 for anything else."""
    return tuple(map(_plain, x)) if type(x) is tuple else x if type(x) is int else 0


class FlatBuilder(abc.ABC):
    """Builds a flat program. An added step that equals an earlier one returns its results.

    Subclasses define `add_equation`, which turns an equation into steps.
    """

    def __init__(self, profile: Profile):
        self.profile = profile
        # Values that the compiler can compute at compile time.
        self.compile_time: set[FlatValue] = set()
        self._steps: list[FlatStep] = []
        self._results: dict[Any, list[FlatValue]] = {}
        # Facts about the equations of the current program, see `caching_facts`.
        self._facts: dict[Any, Any] = {}
        self._traits: dict[Primitive, Traits] = {}
        self._sizes: dict[int, tuple[Any, int]] = {}

    @abc.abstractmethod
    def add_equation(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add the steps of an equation with these operands, and return its results."""

    def bytes(self, aval: Any) -> int:
        """Return the bytes of a value on the device; 0 if it lies in the memory of the host."""
        if id(aval) not in self._sizes:
            host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
            size = 0 if host and not self.profile.host_is_device else self.profile.bytes(aval)
            self._sizes[id(aval)] = aval, size
        return self._sizes[id(aval)][1]

    def inputs(self, values: Sequence[Var]) -> list[FlatValue]:
        """Return new values for the inputs of a program."""
        return [FlatValue(self.bytes(v.aval), "input", shape(v.aval)) for v in values]

    def seeds(self, values: Sequence[Var]) -> list[FlatValue]:
        """Return new values for cotangents.

        A scalar cotangent is taken for the 1 that `grad` passes, which the compiler knows.
        """
        seeds = self.inputs(values)
        self.compile_time |= {c for c in seeds if not c.shape}
        return seeds

    def build(self, inputs: Sequence[FlatValue], outputs: Sequence[FlatValue]) -> FlatProgram:
        """Return the flat program of the steps that outputs need, with the readers of each value.

        Steps with effects are kept too.
        """
        need = set(outputs)
        steps: list[FlatStep] = []
        for step in reversed(self._steps):
            if not need.isdisjoint(step.results) or has_effects(step.eqn):
                need.update(step.operands)
                steps.append(step)
        steps.reverse()
        for step in steps:
            for value in dict.fromkeys(step.operands):
                value.readers.append(step)
        return FlatProgram(tuple(inputs), tuple(steps), tuple(outputs))

    def add_program(self, prog: Program, inputs: Sequence[FlatValue]) -> list[FlatValue]:
        """Add the steps of a program, and return its outputs."""
        env: dict[Any, Any] = dict(zip(prog.inputs, inputs, strict=True))
        env |= self.constants(prog)
        with self.caching_facts(prog):
            for eqn in prog.equations:
                values = self.add_equation(eqn, [self.read(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, values, strict=False))
        return [self.read(env, v) for v in prog.outputs]

    @contextlib.contextmanager
    def caching_facts(self, prog: Program) -> Generator[None]:
        """Within this context, facts about equations are cached on program `prog`."""
        outer, self._facts = self._facts, prog.cache.setdefault("flattening", {})
        try:
            yield
        finally:
            self._facts = outer

    def constants(self, prog: Program) -> dict[Var, FlatValue]:
        """Return the values of a program's constants, by their variables."""
        return {v: self.constant(id(x), shape(v.aval)) for v, x in prog.consts}

    def read(self, env: Mapping[Any, Any], v: Any) -> Any:
        """Return the value of a variable in an environment, or a constant value for a literal."""
        if not isinstance(v, Literal):
            return env[v]
        return self.constant(self.fact(v, "literal", lambda: literal_text(v)), shape(v.aval))

    def operation_key(self, eqn: JaxprEqn) -> OperationKey:
        """Return the operation of an equation, as a key."""
        return self.fact(eqn, "operation", lambda: OperationKey(eqn))

    def fact(self, of: JaxprEqn | Literal, what: Any, make: Callable[[], T]) -> T:
        """Return a fact that depends on an equation or literal alone, computed once.

        `what` names the fact, and `make` computes it.
        """
        key = id(of), what
        if key not in self._facts:
            self._facts[key] = make()
        return self._facts[key]

    def traits(self, primitive: Primitive) -> Traits:
        """Return the traits of a primitive."""
        if primitive not in self._traits:
            self._traits[primitive] = traits(primitive)
        return self._traits[primitive]

    def is_compile_time(self, value: FlatValue) -> bool:
        """Whether the compiler can compute a value at compile time."""
        return value.kind == "constant" or value in self.compile_time

    def constant(self, key: Any, size: tuple[int, ...]) -> FlatValue:
        """Return the value of a constant, which takes no bytes."""
        return self._results.setdefault(("constant", key), [FlatValue(0, "constant", size)])[0]

    def add_step(self, primitive: Primitive, key: Any, eqn: JaxprEqn, operands: list[FlatValue],
                 types: Sequence[Any] | None = None) -> list[FlatValue]:  # fmt: skip
        """Add a step, and return its results. An equal earlier step is not added again.

        Args:
          primitive: the primitive of the step.
          key: what tells the step from other steps of this primitive.
          eqn: the equation that it comes from.
          operands: its operands.
          types: the types of its results, as avals or as values to copy; by default as in `eqn`.
        """
        values = self._results.get((primitive, key)) if not has_effects(eqn) else None
        if values is None:
            if types is None:
                types = [v.aval for v in eqn.outvars]
            values = [
                FlatValue(t.bytes, "made", t.shape) if type(t) is FlatValue
                else FlatValue(self.bytes(t), "made", shape(t)) for t in types
            ]  # fmt: skip
            inputs = [c for c in operands if c.kind != "constant"]
            # An operation with an effect alone returns a token, in XLA too.
            results = values or [FlatValue(0, "made")]
            step = FlatStep(primitive, self.traits(primitive), eqn, inputs, results)
            for value in results:
                value.maker = step
            if self.compile_time.issuperset(inputs):
                self.compile_time.update(values)
            self._steps.append(step)
            self._results[primitive, key] = values
        return values
