"""Print programs: one line per equation, with nested programs below their equation.

`listing` prints a whole program. `line`, `place`, `operation` and `literal` print parts of an
equation, for other listings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xform._jax import JaxprEqn, Literal
from xform.program.ir import Program, program
from xform.program.source import frame
from xform.registry.table import flow_of
from xform.terminal.text import columns, shorten_place

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
# A function of a variable or literal and its text. It returns the text to print, such as in colour.
Paint = Callable[[Any, str], str]


class VariableNames:
    """Gives names to variables: a, b, ... z, ba, bb, in the order of their first use.

    An *atom* is a variable or a literal. `paint` changes the text of each atom, for example its
    colour; None: no change.
    """

    def __init__(self, paint: Paint | None = None) -> None:
        self._names: dict[Any, str] = {}
        self._paint = paint or (lambda _, text: text)

    def __call__(self, atom: Any) -> str:
        """Return the name of a variable, or the value of a literal, painted."""
        return self._paint(atom, self.plain(atom))

    def plain(self, atom: Any) -> str:
        """Return the name of a variable, or the value of a literal, without paint."""
        if isinstance(atom, Literal):
            return literal(atom)
        if atom not in self._names:
            self._names[atom] = _name(len(self._names))
        return self._names[atom]

    def typed(self, atoms: Sequence[Any]) -> str:
        """Return the names of atoms with their types, such as `a:f32[3] b:i32[]`, painted."""
        texts = [(v, f"{self.plain(v)}:{v.aval.str_short(True)}") for v in atoms]
        return " ".join(self._paint(v, text) for v, text in texts)


def listing(prog: Program, lines: bool = False, note: Callable[[JaxprEqn], str] | None = None,
            paint: Paint | None = None) -> str:  # fmt: skip
    """Return a program as text.

    Args:
      prog: the program.
      lines: whether to print the user's source line after each equation.
      note: returns a note to print after an equation.
      paint: gets a variable or literal and its text, and returns the text to print, for example in
        colour; None: the text stays.

    >>> from xform import passes
    >>> from xform.program import ir
    >>> print(passes.listing(ir.trace(lambda x: [jnp.sin(x) * 2.0], jnp.ones(3))))
    inputs  a:f32[3]
      b:f32[3] = sin a
      c:f32[3] = mul b 2.0
    outputs c
    """
    names = VariableNames(paint)
    head = f"inputs  {names.typed(prog.inputs)}".rstrip()
    if prog.consts:
        head += f"\nconsts  {names.typed([v for v, _ in prog.consts])}"
    rows = list(_rows(prog, names, "  ", lines, note))
    body = columns(rows) if rows else ""
    tail = f"outputs {' '.join(map(names, prog.outputs))}".rstrip()
    return "\n".join(filter(None, (head, body, tail)))


def _rows(prog: Program, names: VariableNames, indent: str, lines: bool,
          note: Callable[[JaxprEqn], str] | None) -> Iterator[list[str]]:  # fmt: skip
    """Yield the columns of each line of a listing; nested programs are indented."""
    for eqn in prog.equations:
        row = [indent + line(eqn, names)]
        row += [note(eqn)] if note else []
        row += [place(eqn)] if lines else []
        yield row
        for label, inner in _programs(eqn):
            blank = [""] * (len(row) - 1)
            consts = names.typed([v for v, _ in inner.consts])
            head = f"{indent}  {label}: {names.typed(inner.inputs)}"
            yield [f"{head} ; {consts}" if consts else head, *blank]
            yield from _rows(inner, names, indent + "    ", lines, note)
            yield [f"{indent}  return {' '.join(map(names, inner.outputs))}", *blank]


def place(eqn: JaxprEqn) -> str:
    """Return the user's source line of an equation as a comment; empty if it is unknown."""
    where = shorten_place(frame(eqn))
    return f"# {where}" if where else ""


def line(eqn: JaxprEqn, names: VariableNames) -> str:
    """Return an equation in one line, without its nested programs. New variables get names."""
    inputs = " ".join(map(names, eqn.invars))
    text = operation(eqn) + (f" {inputs}" if inputs else "")
    return f"{names.typed(eqn.outvars)} = {text}" if eqn.outvars else text


def operation(eqn: JaxprEqn) -> str:
    """Return the primitive of an equation as text, with the parameters that are worth reading."""
    params = ", ".join(f"{k}={_param_text(v)}" for k, v in eqn.params.items() if _is_shown(k, v))
    return eqn.primitive.name + (f"[{params}]" if params else "")


def _programs(eqn: JaxprEqn) -> Iterator[tuple[str, Program]]:
    """Yield the nested programs of an equation, each with a label such as "body"."""
    flow = flow_of(eqn)
    if flow is None:
        jaxprs = (eqn.params.get(key) for key in ("jaxpr", "call_jaxpr"))
        yield from (("body", program(j)) for j in jaxprs if hasattr(j, "eqns"))
        return
    if flow.condition is not None:
        yield "condition", flow.condition.program
    for i, body in enumerate(flow.bodies):
        yield "body" if flow.index is None else f"branch {i}", body.program


def _is_shown(key: str, value: Any) -> bool:
    """Return whether to print a parameter: it has a simple value, and not the usual one."""
    if key in _HIDDEN or value is None or value is False or (key, value) == ("unroll", 1):
        return False
    return _is_simple(value)


def _is_simple(value: Any) -> bool:
    """Return whether a value is a number, text, dtype or class, or a sequence of these.

    A sequence must have an entry that is neither None nor False.
    """
    if isinstance(value, tuple | list):
        return all(map(_is_simple, value)) and any(x is not None and x is not False for x in value)
    return value is None or isinstance(value, bool | int | float | str | np.dtype | type)


# Parameters that are not printed: numbers of inputs, which the listing shows anyway, and the mesh.
_HIDDEN = frozenset(("num_consts", "num_carry", "cond_nconsts", "body_nconsts", "ctx_mesh"))


def _param_text(value: Any) -> str:
    if isinstance(value, np.dtype | type):
        return np.dtype(value).name
    return value if isinstance(value, str) else str(value).replace(" ", "")


def literal(atom: Any) -> str:
    """Return the value of a literal as text."""
    plain = isinstance(atom.aval.dtype, np.dtype)
    return str(np.asarray(atom.val)[()]) if plain else "key"


def _name(i: int) -> str:
    """Return the name of the variable number `i`: a, b, ... z, ba, bb."""
    letters = ""
    while True:
        letters = _ALPHABET[i % 26] + letters
        i = i // 26 - 1
        if i < 0:
            return letters
