"""Build a program from another program, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.passes.structured import nested
from xform.program.ir import Atom, Program


class Builder:
    """Builds a new program from an old one. Values of the old program may get new names.

    Attributes:
      changed: whether the new program differs from the old one.
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
        """Return the new names of some values of the old program."""
        return [self._names.get(v, v) if isinstance(v, Var) else v for v in atoms]

    def renamed(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation of the old program, with the new names of its inputs."""
        inputs = self.atoms(eqn.invars)
        same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        return eqn if same else eqn.replace(invars=inputs)

    def add(self, eqn: JaxprEqn) -> None:
        """Add an equation whose inputs have their new names."""
        self.equations.append(eqn)
        self.producer.update(dict.fromkeys(eqn.outvars, eqn))

    def alias(self, variables: Sequence[Var], atoms: Sequence[Atom]) -> None:
        """Replace variables of the old program by atoms in all later equations."""
        self.changed = True
        self._names.update(zip(variables, atoms, strict=True))

    def constant(self, v: Var, value: Any) -> None:
        """Make a variable of the old program a constant of the new one."""
        self.changed = True
        self._consts[v] = value

    def splice(self, prog: Program, inputs: Sequence[Atom]) -> list[Atom]:
        """Add the equations of another program, with fresh variables, and return its outputs.

        `inputs` have their new names.
        """
        self.changed = True
        self._consts.update(prog.consts)
        own: dict[Any, Atom] = dict(zip(prog.inputs, inputs, strict=True))
        renamed = lambda atoms: [own.get(v, v) if isinstance(v, Var) else v for v in atoms]
        for eqn in prog.equations:
            fresh = [Var(v.aval) for v in eqn.outvars]
            self.add(eqn.replace(invars=renamed(eqn.invars), outvars=fresh))
            own.update(zip(eqn.outvars, fresh, strict=True))
        return renamed(prog.outputs)

    def program(self) -> Program:
        """Return the new program; the old one if nothing changed."""
        if not self.changed:
            return self._prog
        outputs = tuple(self.atoms(self._prog.outputs))
        read: set[Any] = {v for e in self.equations for v in e.invars if isinstance(v, Var)}
        read.update(v for v in outputs if isinstance(v, Var))
        consts = tuple((v, x) for v, x in self._consts.items() if v in read)
        return Program(self._prog.inputs, consts, tuple(self.equations), outputs)


def inside(prog: Program, f: Callable[[Program], Program]) -> Program:
    """Apply `f` to the programs of a program's loops, branches and calls."""
    build = Builder(prog)
    for eqn in prog.equations:
        replacement = nested(eqn, f)
        if replacement is None:
            build.add(build.renamed(eqn))
        else:
            build.alias(eqn.outvars, build.splice(replacement, build.atoms(eqn.invars)))
    return build.program()
