"""Build a new program from an old one, equation by equation, as a pass does.

A pass goes through the equations of the old program in order. For each it calls one of the methods
of a `Builder`: `add` keeps the equation, `alias` drops it and gives its results other names, and
`splice` adds the equations of a small program. An equation that is kept still reads the variables
of the old program; `renamed` replaces those that have a new name. An *atom* is a variable or a
literal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.passes.structured import map_bodies
from xform.program.ir import Atom, Program


class Builder:
    """Builds a new program from an old one. A variable of the old program may get a new name.

    Attributes:
      changed: whether the new program differs from the old one. A pass that only drops equations
        must set it itself.
      equations: the equations added so far.
      producer: the equation that makes each value, for the equations added so far.
    """

    def __init__(self, prog: Program):
        self._prog = prog
        self._names: dict[Any, Atom] = {}
        self._consts = dict(prog.consts)
        self.equations: list[JaxprEqn] = []
        self.producer: dict[Any, JaxprEqn] = {}
        self.changed = False

    def atoms(self, atoms: Sequence[Atom]) -> list[Atom]:
        """Return the new names of atoms of the old program."""
        return [self._names.get(v, v) if isinstance(v, Var) else v for v in atoms]

    def renamed(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation of the old program, with its inputs under their new names."""
        inputs = self.atoms(eqn.invars)
        same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        return eqn if same else eqn.replace(invars=inputs)

    def add(self, eqn: JaxprEqn) -> None:
        """Add an equation. Its inputs must have their new names, see `renamed`."""
        self.equations.append(eqn)
        self.producer.update(dict.fromkeys(eqn.outvars, eqn))

    def alias(self, variables: Sequence[Var], atoms: Sequence[Atom]) -> None:
        """Make `atoms` the new names of variables of the old program, for all later equations."""
        self.changed = True
        self._names.update(zip(variables, atoms, strict=True))

    def constant(self, v: Var, value: Any) -> None:
        """Make a variable of the old program a constant of the new one."""
        self.changed = True
        self._consts[v] = value

    def splice(self, prog: Program, inputs: Sequence[Atom]) -> list[Atom]:
        """Add the equations of another program, with fresh variables; return its outputs.

        `inputs` are atoms of the new program, in place of the other program's inputs.
        """
        self.changed = True
        self._consts.update(prog.consts)
        names: dict[Any, Atom] = dict(zip(prog.inputs, inputs, strict=True))
        rename = lambda atoms: [names.get(v, v) if isinstance(v, Var) else v for v in atoms]
        for eqn in prog.equations:
            fresh = [Var(v.aval) for v in eqn.outvars]
            self.add(eqn.replace(invars=rename(eqn.invars), outvars=fresh))
            names.update(zip(eqn.outvars, fresh, strict=True))
        return rename(prog.outputs)

    def program(self) -> Program:
        """Return the new program, without unread constants; the old one if nothing changed."""
        if not self.changed:
            return self._prog
        outputs = tuple(self.atoms(self._prog.outputs))
        read: set[Any] = {v for e in self.equations for v in e.invars if isinstance(v, Var)}
        read.update(v for v in outputs if isinstance(v, Var))
        consts = tuple((v, x) for v, x in self._consts.items() if v in read)
        return Program(self._prog.inputs, consts, tuple(self.equations), outputs)


def map_nested_programs(prog: Program, f: Callable[[Program], Program]) -> Program:
    """Return `prog` with `f` applied to the bodies of its loops, branches and calls.

    `f` itself has to handle the programs inside those bodies.
    """
    build = Builder(prog)
    for eqn in prog.equations:
        replacement = map_bodies(eqn, f)
        if replacement is None:
            build.add(build.renamed(eqn))
        else:
            build.alias(eqn.outvars, build.splice(replacement, build.atoms(eqn.invars)))
    return build.program()
