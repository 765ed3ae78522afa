"""Constant folding: evaluate operations on constants."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

from xform._jax import JaxprEqn, Literal, Tracer, itemsize
from xform.passes.base import Pass
from xform.passes.builder import Builder
from xform.passes.pure import is_pure
from xform.program.ir import Atom, Program, bind
from xform.registry.table import traits


@dataclasses.dataclass(frozen=True)
class Fold(Pass):
    """Constant folding: evaluate operations on literals and constants, and store the results.

    It does not evaluate loops, branches, calls, custom kernels, operations with effects, or
    operations on a mesh of devices.

    Attributes:
      max_bytes: an operation with a result of more bytes is not evaluated.

    >>> from xform import passes
    >>> f = passes.Fold()(lambda x: x * jnp.sin(jnp.arange(3.0)))
    >>> [e.primitive.name for e in jax.make_jaxpr(f)(jnp.ones(3)).eqns]
    ['mul']
    """

    name: ClassVar[str] = "fold"
    max_bytes: int = 64 * 1024

    def rewrite(self, prog: Program) -> Program:
        build = Builder(prog)
        known: dict[Any, Any] = {v: x for v, x in prog.consts if not isinstance(x, Tracer)}
        for eqn in prog.equations:
            if not self._folds(eqn) or not all(_is_known(v, known) for v in eqn.invars):
                build.add(build.renamed(eqn))
                continue
            with jax.ensure_compile_time_eval():
                values = bind(eqn, [v.val if isinstance(v, Literal) else known[v]
                                    for v in eqn.invars])  # fmt: skip
            for v, value in zip(eqn.outvars, values, strict=True):
                known[v] = value
                if _may_be_literal(v.aval):
                    build.alias([v], [Literal(np.asarray(value), v.aval)])
                else:
                    build.constant(v, value)
        return build.program()

    def _folds(self, eqn: JaxprEqn) -> bool:
        """Return whether the equation may be evaluated if its operands are known."""
        if not traits(eqn.primitive).folds or not is_pure(eqn) or _on_a_mesh(eqn):
            return False
        return all(_bytes(v.aval) <= self.max_bytes for v in eqn.outvars)


def _is_known(atom: Atom, known: dict[Any, Any]) -> bool:
    return isinstance(atom, Literal) or atom in known


def _on_a_mesh(eqn: JaxprEqn) -> bool:
    """Return whether an equation runs on a mesh of devices, or names a mesh axis."""
    axes = eqn.params.get("axes") or ()
    if "axis_name" in eqn.params or any(isinstance(a, str) for a in axes):
        return True
    return not getattr(eqn.ctx.cur_abstract_mesh, "empty", True)


def _may_be_literal(aval: Any) -> bool:
    """Return whether a value may be a literal: a scalar that is not weakly typed.

    A weakly typed value is stored as a constant, because a literal would lose the weak type.
    """
    plain = isinstance(aval.dtype, np.dtype) and not aval.weak_type
    return plain and aval.shape == ()


def _bytes(aval: Any) -> float:
    """Bytes of a value; infinite if unknown."""
    sizes = aval.shape
    if not all(isinstance(n, int) for n in sizes) or not hasattr(aval, "dtype"):
        return float("inf")
    return float(np.prod(sizes, dtype=np.float64)) * itemsize(aval.dtype)
