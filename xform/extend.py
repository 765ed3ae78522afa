"""Declare derivative rules for your own JAX primitives, in the same way as xform's own rules.

>>> import jax
>>> from jax import lax
>>> from jax.extend.core import Primitive
>>> cube_p = Primitive("cube_of_the_docs")
>>> _ = cube_p.def_impl(lambda x: x * x * x)
>>> _ = cube_p.def_abstract_eval(lambda x: x)
>>> _ = xform.extend.pointwise(cube_p, lambda y, x: 3.0 * x * x)
>>> float(xform.grad(cube_p.bind)(jnp.float32(2.0)))
12.0

Each function declares one kind of rule, from one or more formulas. In them `x` are the inputs of
the primitive, `y` is its output, and `ct` is the cotangent of the output:

- `pointwise` takes a formula `(y, *x)` for the partial derivative by each input;
- `linear` takes the transpose `(ct, *x)`;
- `bilinear` takes one transpose for each of the two inputs;
- `constant` takes any number of primitives, whose derivatives are zero;
- `composite` takes a jvp written in JAX operations, and xform derives the pullback from it. The jvp
  must return the primitive's outputs, bit for bit, or None; for None, the primitive is bound.

Formulas take the primitive's parameters as keyword-only arguments. Every parameter that is not
None, False or empty must be taken by a formula. For a primitive that contains programs, such as a
loop, write a subclass of `Structured`. Its method `flow` returns a `Flow`, which says how values
pass through the programs. Test your rules with `xform.testing.check_rule`.

A rule belongs to the Primitive object, not to its name. The argument `traits` gives further facts:
`Traits(fusion="elementwise")` says that XLA fuses the primitive with its neighbours, `flops=` gives
its cost, `random=True` lets no budget recompute it, and `repeatable=False` lets no policy do so.
"""

from xform.interpret.node import Node, Structured
from xform.program.flow import Body, Flow
from xform.registry.table import RULES, add_rule
from xform.registry.traits import Traits
from xform.registry.words import bilinear, composite, constant, linear, pointwise

__all__ = [
    "RULES",
    "Body",
    "Flow",
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
