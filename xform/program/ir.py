"""Programs: traced functions as data.

A `Program` holds the equations of a jaxpr. `trace` makes one from a function, and `program` from a
jaxpr, such as the body of a loop. `retrace` makes one from a function that rewrites another.
`evaluate` runs it: it binds the equations in the current trace, so it works eagerly, under `jit`,
under `vmap` and inside other transforms. A `Mask` has one bool for each input or output; `gather`
and `spread` select values by a mask, and `union` combines masks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from xform._jax import JaxprEqn, Var, jaxpr_and_consts, trace_to_jaxpr
from xform._jax.meshes import auto_axes
from xform._jax.mutable import input_type
from xform.program.dimensions import SampledCache
from xform.program.equation import Atom as Atom
from xform.program.equation import apply as apply
from xform.program.equation import bind as bind
from xform.program.equation import context as context
from xform.program.equation import read as read
from xform.program.equation import write as write
from xform.program.hijax import lower_equation
from xform.program.references import makes_references, remove_references
from xform.program.source import name_stack

Mask = tuple[bool, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A traced function: its `equations` compute `outputs` from `inputs`, in order.

    `consts` pairs variables with the values that the function closed over. `cache` holds data that
    is derived from this program, such as its forward and backward pass. Programs compare by
    identity.
    """

    inputs: tuple[Var, ...]
    consts: tuple[tuple[Var, Any], ...]
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Atom, ...]
    cache: dict[Any, Any] = dataclasses.field(default_factory=SampledCache, repr=False)

    @property
    def in_avals(self) -> list[Any]:
        return [v.aval for v in self.inputs]

    @property
    def in_types(self) -> list[Any]:
        """Types to trace the program with. These are `in_avals`, except for mutable values.

        For a mutable value, the type also has the value's initial state.
        """
        return [input_type(v) for v in self.inputs]

    @property
    def out_avals(self) -> list[Any]:
        return [v.aval for v in self.outputs]


_PROGRAMS: weakref.WeakKeyDictionary[Any, Program] = weakref.WeakKeyDictionary()


def program(jaxpr: Any) -> Program:
    """Return the Program of a Jaxpr or ClosedJaxpr. It is cached for as long as the jaxpr lives."""
    prog = _PROGRAMS.get(jaxpr)
    if prog is None:
        prog = _PROGRAMS[jaxpr] = _read(*jaxpr_and_consts(jaxpr))
    return prog


def clear_program_cache() -> None:
    """Clear the cache of `program`. Call this when data in the Programs' caches becomes invalid."""
    _PROGRAMS.clear()


def lift_constants(prog: Program) -> tuple[Program, list[Any]]:
    """Return the program with its constants as leading inputs, and the constants' values."""
    inputs = (*(v for v, _ in prog.consts), *prog.inputs)
    return Program(inputs, (), prog.equations, prog.outputs), [x for _, x in prog.consts]


def _read(jaxpr: Any, consts: Sequence[Any]) -> Program:
    """Return a jaxpr and the values of its constants as a Program.

    Mutable references that the jaxpr creates become values, and operation objects of JAX become
    primitives (`xform.program.references`, `xform.program.hijax`).
    """
    if makes_references(jaxpr):
        jaxpr, consts = jaxpr_and_consts(remove_references(jaxpr, consts))
    variables = (*jaxpr.constvars, *jaxpr.invars)
    n = len(consts)
    pairs = tuple(zip(variables[:n], consts, strict=True))
    return Program(
        variables[n:], pairs, tuple(map(lower_equation, jaxpr.eqns)), tuple(jaxpr.outvars)
    )


def trace(f: Callable[..., Any], *args: Any) -> Program:
    """Trace `f` at `args` (values or types) to a Program. `f` takes and returns flat sequences."""
    with seldom_collected():
        return _read(*trace_to_jaxpr(f, args))


def retrace(prog: Program, f: Callable[..., Any]) -> Program:
    """Trace `f`, which does the same as `prog` in another way, at the types of its inputs.

    The mesh is that of `prog`: a value without inputs, such as an iota, has the current mesh in its
    type. So the result does not depend on where a program is rewritten.
    """
    mesh = next((m for m in map(_mesh, prog.equations) if m is not None), None)
    if mesh is None or AxisType.Manual in mesh.axis_types:
        return trace(f, *prog.in_types)
    with jax.sharding.use_abstract_mesh(mesh):
        return trace(f, *prog.in_types)


def has_auto_axes(prog: Program) -> bool:
    """Return whether values may be sharded over `Auto` axes, which types do not mention."""
    of_types = (getattr(getattr(a, "sharding", None), "mesh", None) for a in prog.in_avals)
    meshes = {*of_types, *map(_mesh, prog.equations)} - {None}
    return any(map(auto_axes, meshes))


def _mesh(eqn: JaxprEqn) -> Any:
    """Return the mesh that an equation was traced on, or None."""
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    return None if mesh is None or mesh.empty else mesh


# While tracing, Python collects garbage after this many new objects.
_SELDOM = 50_000


@contextlib.contextmanager
def seldom_collected(on: bool = True) -> Generator[None]:
    """Return a context in which Python collects garbage less often, to trace and plan faster.

    Nearly all objects of a trace or a plan stay alive. At 100,000 equations, garbage collection
    would take a third of the time. It is not disabled, so the garbage of a user's function is still
    collected. Pass `on=False` where operations run eagerly: there a reference cycle may hold large
    arrays.
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


def evaluate(
    prog: Program, args: Sequence[Any], run: Callable[[JaxprEqn, list[Any], Any], list[Any]] = bind
) -> list[Any]:
    """Run a program; returns its outputs as a list. Values are dropped after their last use.

    `run` runs one equation, as `bind` does, from its inputs and the name stack around the program.
    """
    env = environment(prog, args)
    unread_after = last_uses(prog.equations, prog.outputs)
    outer = name_stack()
    for eqn in prog.equations:
        write(env, eqn.outvars, run(eqn, [read(env, v) for v in eqn.invars], outer))
        for v in unread_after.get(id(eqn), ()):
            env.pop(v, None)
    return [read(env, v) for v in prog.outputs]


def environment(prog: Program, args: Sequence[Any]) -> dict[Var, Any]:
    """Return a dict from the variables of a program's inputs and constants to their values."""
    env = dict(prog.consts)
    env.update(zip(prog.inputs, args, strict=True))
    return env


def last_uses(equations: Sequence[JaxprEqn], outputs: Sequence[Atom]) -> dict[int, list[Var]]:
    """Return a dict from the `id` of each equation to the variables that nothing reads after it."""
    read_later = {v for v in outputs if isinstance(v, Var)}
    unread_after: dict[int, list[Var]] = {}
    for eqn in reversed(equations):
        for v in (*eqn.outvars, *eqn.invars):
            if isinstance(v, Var) and v not in read_later:
                read_later.add(v)
                unread_after.setdefault(id(eqn), []).append(v)
    return unread_after


def spread(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return a list with the next of `values` where `mask` is True, and None elsewhere."""
    rest = iter(values)
    return [next(rest) if on else None for on in mask]


def gather(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values at the positions where `mask` is True. This is the inverse of `spread`."""
    return [v for v, on in zip(values, mask, strict=True) if on]


def union(*masks: Sequence[bool]) -> Mask:
    """Return the positions at which any of the masks is True, as a mask."""
    return tuple(any(column) for column in zip(*masks, strict=True))
