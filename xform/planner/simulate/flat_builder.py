"""Base class for making a flat program, which adds equal steps only once.

A flat program is the list of operations (steps) that XLA gets before fusion (`steps.py`). XLA
merges equal computations, and so does this class.
"""

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
from xform.registry.repeatable import repeatable
from xform.registry.table import traits
from xform.registry.traits import Traits

T = TypeVar("T")


class OperationKey:
    """The operation of an equation without its operands, as a key for dictionaries.

    Two keys are equal if the texts of their operations are equal: the primitive and its parameters.
    The text of a loop is long. So it is made only when two keys with the same hash are compared.
    """

    __slots__ = ("_eqn", "_hash", "_text")

    def __init__(self, eqn: JaxprEqn):
        self._eqn, self._text = eqn, ""
        params = ((k, _hashable(x)) for k, x in eqn.params.items() if x is not None)
        self._hash = hash((eqn.primitive.name, frozenset(params)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, OperationKey) and self._as_text() == other._as_text()

    def _as_text(self) -> str:
        self._text = self._text or operation_text(self._eqn)
        return self._text


def _hashable(param: Any) -> Any:
    """Return a parameter for the hash: integers and tuples as they are, 0 for anything else."""
    if type(param) is tuple:
        return tuple(map(_hashable, param))
    return param if type(param) is int else 0


class FlatBuilder(abc.ABC):
    """Makes a flat program. Adding a step that equals an earlier one returns the earlier results.

    Subclasses define `add_equation`, which turns an equation into steps. Facts that depend on an
    equation alone are cached on its program, because many flat programs are made from one program.

    Attributes:
      profile: the facts about the compiler that the program is for.
      compile_time: the values that the compiler can compute at compile time, besides constants.
    """

    def __init__(self, profile: Profile):
        self.profile = profile
        self.compile_time: set[FlatValue] = set()
        self._steps: list[FlatStep] = []
        # The results of each step by the primitive and key of the step; and constants by their key.
        self._results: dict[Any, list[FlatValue]] = {}
        # Facts about the equations of the current program, see `caching_facts`.
        self._facts: dict[Any, Any] = {}
        self._traits: dict[Primitive, Traits] = {}
        # The bytes of each type, by its `id`. The type is stored too: while it is alive, no other
        # object gets its `id`.
        self._sizes: dict[int, tuple[Any, int]] = {}

    @abc.abstractmethod
    def add_equation(self, eqn: JaxprEqn, operands: list[FlatValue]) -> list[FlatValue]:
        """Add the steps that compute an equation from these operands, and return its results."""

    def bytes(self, aval: Any) -> int:
        """Return the bytes of a type in device memory; 0 if its memory is that of the host."""
        if id(aval) not in self._sizes:
            on_host = getattr(aval, "memory_space", None) == jax.memory.Space.Host
            size = 0 if on_host and not self.profile.host_is_device else self.profile.bytes(aval)
            self._sizes[id(aval)] = aval, size
        return self._sizes[id(aval)][1]

    def inputs(self, variables: Sequence[Var]) -> list[FlatValue]:
        """Return new values for the inputs of a program."""
        return [FlatValue(self.bytes(v.aval), "input", shape(v.aval)) for v in variables]

    def cotangent_inputs(self, variables: Sequence[Var]) -> list[FlatValue]:
        """Return new values for inputs that are cotangents.

        A scalar cotangent is assumed to be the constant 1 that `grad` passes, so the compiler can
        compute with it at compile time.
        """
        cotangents = self.inputs(variables)
        self.compile_time |= {x for x in cotangents if not x.shape}
        return cotangents

    def build(self, inputs: Sequence[FlatValue], outputs: Sequence[FlatValue]) -> FlatProgram:
        """Return the flat program of the steps that the outputs need, and of steps with effects.

        Sets the `readers` of each value.
        """
        needed = set(outputs)
        steps: list[FlatStep] = []
        for step in reversed(self._steps):
            if not needed.isdisjoint(step.results) or has_effects(step.eqn):
                needed.update(step.operands)
                steps.append(step)
        steps.reverse()
        for step in steps:
            for value in dict.fromkeys(step.operands):
                value.readers.append(step)
        return FlatProgram(tuple(inputs), tuple(steps), tuple(outputs))

    def add_program(self, prog: Program, inputs: Sequence[FlatValue]) -> list[FlatValue]:
        """Add the steps of a program with these inputs, and return its outputs."""
        env: dict[Any, Any] = dict(zip(prog.inputs, inputs, strict=True))
        env |= self.constants(prog)
        with self.caching_facts(prog):
            for eqn in prog.equations:
                values = self.add_equation(eqn, [self.read(env, v) for v in eqn.invars])
                env.update(zip(eqn.outvars, values, strict=False))
        return [self.read(env, v) for v in prog.outputs]

    @contextlib.contextmanager
    def caching_facts(self, prog: Program) -> Generator[None]:
        """Return a context in which facts about equations are cached on the program `prog`."""
        outer, self._facts = self._facts, prog.cache.setdefault("flattening", {})
        try:
            yield
        finally:
            self._facts = outer

    def constants(self, prog: Program) -> dict[Var, FlatValue]:
        """Return the values of the constants that a program closes over, by their variables."""
        return {v: self.constant(id(x), shape(v.aval)) for v, x in prog.consts}

    def read(self, env: Mapping[Any, Any], v: Any) -> Any:
        """Return the value of a variable, taken from `env`, or of a literal."""
        if not isinstance(v, Literal):
            return env[v]
        return self.constant(self.fact(v, "literal", lambda: literal_text(v)), shape(v.aval))

    def operation_key(self, eqn: JaxprEqn) -> OperationKey:
        """Return the key of an equation's operation, without its operands."""
        return self.fact(eqn, "operation", lambda: OperationKey(eqn))

    def fact(self, subject: JaxprEqn | Literal, name: Any, compute: Callable[[], T]) -> T:
        """Return a fact that depends on an equation or literal alone. Compute it only once.

        Args:
          subject: the equation or literal.
          name: the name of the fact. Each fact about a subject has its own name.
          compute: computes the fact.
        """
        key = id(subject), name
        if key not in self._facts:
            self._facts[key] = compute()
        return self._facts[key]

    def traits(self, primitive: Primitive) -> Traits:
        """Return what the registry knows about a primitive."""
        if primitive not in self._traits:
            self._traits[primitive] = traits(primitive)
        return self._traits[primitive]

    def is_compile_time(self, value: FlatValue) -> bool:
        """Return whether the compiler knows a value or can compute it at compile time."""
        return value.kind == "constant" or value in self.compile_time

    def constant(self, key: Any, size: tuple[int, ...]) -> FlatValue:
        """Return the value of a constant of shape `size`. Equal keys give the same value.

        A constant counts as zero bytes.
        """
        return self._results.setdefault(("constant", key), [FlatValue(0, "constant", size)])[0]

    def add_step(self, primitive: Primitive, key: Any, eqn: JaxprEqn, operands: list[FlatValue],
                 types: Sequence[Any] | None = None) -> list[FlatValue]:  # fmt: skip
        """Add a step, and return its results. An equal step that was added before is used again.

        Args:
          primitive: the primitive of the step.
          key: identifies the computation: two steps of a primitive with equal keys are equal.
          eqn: the equation that the step comes from.
          operands: its operands.
          types: the types of its results. Each is an aval, or a FlatValue with the bytes and the
            shape of the result. By default these are the types of the results of `eqn`.
        """
        values = self._results.get((primitive, key))
        if values is None or not repeatable(eqn):
            if types is None:
                types = [v.aval for v in eqn.outvars]
            values = [
                FlatValue(t.bytes, "computed", t.shape) if type(t) is FlatValue
                else FlatValue(self.bytes(t), "computed", shape(t)) for t in types
            ]  # fmt: skip
            inputs = [x for x in operands if x.kind != "constant"]
            # In XLA, an operation with an effect and no results returns a token.
            results = values or [FlatValue(0, "computed")]
            step = FlatStep(primitive, self.traits(primitive), eqn, inputs, results)
            for value in results:
                value.maker = step
            if self.compile_time.issuperset(inputs):
                self.compile_time.update(values)
            self._steps.append(step)
            self._results[primitive, key] = values
        return values
