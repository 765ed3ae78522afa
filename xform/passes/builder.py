"""A program made from another, equation by equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.ir import Atom, Program
from xform.passes.structured import nested


class Builder:
    """A program in the making: another, equation by equation, with other names for its values.

    Attributes:
      changed: whether it differs from the one that it is made from.
      equations: those so far.
      producer: the equation that makes each value, so far.
    """

    def __init__(self, prog: Program):
        self._prog = prog
        self._names: dict[Any, Atom] = {}
        self._consts = dict(prog.consts)
        self.equations: list[JaxprEqn] = []
        self.producer: dict[Any, JaxprEqn] = {}
        self.changed = False

    def atoms(self, atoms: Sequence[Atom]) -> list[Atom]:
        """What stands for values of the old program."""
        return [self._names.get(v, v) if isinstance(v, Var) else v for v in atoms]

    def renamed(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation of the old program with its inputs by their new names."""
        inputs = self.atoms(eqn.invars)
        same = all(a is b for a, b in zip(inputs, eqn.invars, strict=True))
        return eqn if same else eqn.replace(invars=inputs)

    def add(self, eqn: JaxprEqn) -> None:
        """Another equation, with new names."""
        self.equations.append(eqn)
        self.producer.update(dict.fromkeys(eqn.outvars, eqn))

    def alias(self, variables: Sequence[Var], atoms: Sequence[Atom]) -> None:
        """From now on atoms stand for variables."""
        self.changed = True
        self._names.update(zip(variables, atoms, strict=True))

    def constant(self, v: Var, value: Any) -> None:
        """From now on a variable is a constant."""
        self.changed = True
        self._consts[v] = value

    def splice(self, prog: Program, inputs: Sequence[Atom]) -> list[Atom]:
        """The equations of a program, with variables of their own, and what stands for its outputs.

        Inputs are by their new names.
        """
        self.changed = True
        self._consts.update(prog.consts)
        own: dict[Any, Atom] = dict(zip(prog.inputs, inputs, strict=True))
        called = lambda atoms: [own.get(v, v) if isinstance(v, Var) else v for v in atoms]
        for eqn in prog.equations:
            fresh = [Var(v.aval) for v in eqn.outvars]
            self.add(eqn.replace(invars=called(eqn.invars), outvars=fresh))
            own.update(zip(eqn.outvars, fresh, strict=True))
        return called(prog.outputs)

    def program(self) -> Program:
        """The program that was made; the old one if nothing changed."""
        if not self.changed:
            return self._prog
        outputs = tuple(self.atoms(self._prog.outputs))
        read: set[Any] = {v for e in self.equations for v in e.invars if isinstance(v, Var)}
        read.update(v for v in outputs if isinstance(v, Var))
        consts = tuple((v, x) for v, x in self._consts.items() if v in read)
        return Program(self._prog.inputs, consts, tuple(self.equations), outputs)


def inside(prog: Program, f: Callable[[Program], Program]) -> Program:
    """The program with `f` done to the programs of its loops, branches and calls."""
    build = Builder(prog)
    for eqn in prog.equations:
        replacement = nested(eqn, f)
        if replacement is None:
            build.add(build.renamed(eqn))
        else:
            build.alias(eqn.outvars, build.splice(replacement, build.atoms(eqn.invars)))
    return build.program()
