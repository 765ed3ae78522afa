"""Programs: what a traced function is to xform.

A `Program` is a jaxpr read as plain data. It is made by `trace` (from a function) or by `program`
(from a jaxpr found in an equation), and run by `evaluate`, which binds its equations again in
whatever trace is current: eagerly, under `jit`, under `vmap`, inside another transform.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var, closed, traced
from xform.equation import Atom as Atom
from xform.equation import apply as apply
from xform.equation import bind as bind
from xform.equation import read as read
from xform.equation import write as write
from xform.hijax import settle
from xform.mutable import input_type
from xform.recent import Recent
from xform.references import makes_references, pure
from xform.source import name_stack

Mask = tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function: `outputs` from `inputs`, by `equations` in order.

    `consts` are the values that the function closed over, with their variables. `cache` holds what
    was derived from this very program (its Joints); programs are equal only if identical.
    """

    inputs: tuple[Var, ...]
    consts: tuple[tuple[Var, Any], ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Atom, ...]
    cache: dict[Any, Any] = dataclasses.field(default_factory=Recent, repr=False)

    @property
    def in_avals(self) -> list[Any]:
        return [v.aval for v in self.inputs]

    @property
    def in_types(self) -> list[Any]:
        """What to trace the program again with: `in_avals`, and what mutable values hold first."""
        return [input_type(v) for v in self.inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [v.aval for v in self.outputs]


_PROGRAMS: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def program(jaxpr: Any) -> Program:
    """The Program of a Jaxpr or ClosedJaxpr; one jaxpr gives one Program, while it lives."""
    prog = _PROGRAMS.get(jaxpr)
    if prog is None:
        prog = _PROGRAMS[jaxpr] = _read(*closed(jaxpr))
    return prog


def forget() -> None:
    """Read jaxprs anew from now on: what was derived from their Programs no longer holds."""
    _PROGRAMS.clear()


def lifted(prog: Program) -> tuple[Program, list[Any]]:
    """The program with what it closed over as leading inputs; and the values of those."""
    inputs = (*(v for v, _ in prog.consts), *prog.inputs)
    return Program(inputs, (), prog.equations, prog.outputs), [x for _, x in prog.consts]


def _read(jaxpr: Any, consts: Sequence[Any]) -> Program:
    if makes_references(jaxpr):
        jaxpr, consts = closed(pure(jaxpr, consts))
    variables = (*jaxpr.constvars, *jaxpr.invars)
    n = len(consts)
    pairs = tuple(zip(variables[:n], consts, strict=True))
    return Program(variables[n:], pairs, tuple(map(settle, jaxpr.eqns)), tuple(jaxpr.outvars))


def trace(f: Callable[..., Any], *args: Any) -> Program:
    """The Program of `f`, which takes flat `args` (values or types) and returns a flat sequence."""
    with seldom_collected():
        return _read(*traced(f, args))


# How many new objects there are between two searches for cycles, where most will stay.
_SELDOM = 50_000


@contextlib.contextmanager
def seldom_collected(on: bool = True) -> Generator[None]:
    """Cycles are searched for less often meanwhile: of a trace, or a plan, nearly all stays.

    Of 100,000 equations the searches would take a third of the time. They are not switched off:
    what a user's function leaves behind is found as ever. Not for operations that run one by one
    (not `on`): there a cycle may hold large arrays.
    """
    young, *older = gc.get_threshold()
    raised = on and 0 < young < _SELDOM
    if raised:
        gc.set_threshold(_SELDOM, *older)
    try:
        yield
    finally:
        if raised:
            gc.set_threshold(young, *older)


def evaluate(prog: Program, args: Sequence[Any]) -> list[Any]:
    """Run a program: its outputs, as a list. Values are dropped after their last use."""
    env = environment(prog, args)
    drop = last_uses(prog.equations, prog.outputs)
    outer = name_stack()
    for eqn in prog.equations:
        write(env, eqn.outvars, bind(eqn, [read(env, v) for v in eqn.invars], outer))
        for v in drop.get(id(eqn), ()):
            env.pop(v, None)
    return [read(env, v) for v in prog.outputs]


def environment(prog: Program, args: Sequence[Any]) -> dict[Var, Any]:
    """Variables of the inputs and constants of a program, with their values."""
    env = dict(prog.consts)
    env.update(zip(prog.inputs, args, strict=True))
    return env


def last_uses(equations: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> dict[int, list[Var]]:
    """For each equation, by `id`, the variables that nothing reads after it."""
    seen = {v for v in outputs if isinstance(v, Var)}
    drop: dict[int, list[Var]] = {}
    for eqn in reversed(equations):
        for v in (*eqn.outvars, *eqn.invars):
            if isinstance(v, Var) and v not in seen:
                seen.add(v)
                drop.setdefault(id(eqn), []).append(v)
    return drop


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Values in the places that are True, None elsewhere."""
    rest = iter(values)
    return [next(rest) if on else None for on in mask]


def gather(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """The values in the places that are True: the inverse of `spread`."""
    return [v for v, on in zip(values, mask, strict=True) if on]
