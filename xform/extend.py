"""Declare derivative rules for your own primitives, in the same way as xform's own rules.

>>> import jax
>>> from jax import lax
>>> from jax.extend.core import Primitive
>>> cube_p = Primitive("cube_of_the_docs")
>>> _ = cube_p.def_impl(lambda x: x * x * x)
>>> _ = cube_p.def_abstract_eval(lambda x: x)
>>> _ = xform.extend.pointwise(cube_p, lambda y, x: 3.0 * x * x)
>>> float(xform.grad(cube_p.bind)(jnp.float32(2.0)))
12.0

Each function declares one kind of rule:

- `pointwise` takes partial derivatives `di(y, *x)`;
- `linear` takes a transpose `(ct, *x)`;
- `bilinear` takes one transpose for each side;
- `constant` takes any number of primitives, whose derivatives are zero;
- `composite` takes a jvp written in JAX operations, and xform derives the pullback from it. The jvp
  must return the primitive's outputs, bit for bit, or None; for None, the primitive is bound.

Formulas take the primitive's parameters as keyword-only arguments. Some formula must take every
parameter that is not None, False or empty. A subclass of `Structured` describes a primitive that
contains programs. Test your rules with `xform.testing.check_rule`.

A rule belongs to the Primitive object, whatever its name. `traits` has further facts for the
planner and the passes: `Traits(fusion="elementwise")` says that XLA fuses the primitive, `flops=`
gives its cost, and `random=True` forbids recomputing it.
"""

from xform.interpret.node import Node, Structured
from xform.registry.table import RULES, add_rule
from xform.registry.traits import Traits
from xform.registry.words import bilinear, composite, constant, linear, pointwise

__all__ = [
    "RULES",
    "Node",
    "Structured",
    "Traits",
    "add_rule",
    "bilinear",
    "composite",
    "constant",
    "linear",
    "pointwise",
]
