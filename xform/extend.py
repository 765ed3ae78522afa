"""Declare derivative rules for your own primitives, in the words of the library's own rules.

>>> import jax
>>> from jax import lax
>>> from jax.extend.core import Primitive
>>> cube_p = Primitive("cube_of_the_docs")
>>> _ = cube_p.def_impl(lambda x: x * x * x)
>>> _ = cube_p.def_abstract_eval(lambda x: x)
>>> _ = xform.extend.pointwise(cube_p, lambda y, x: 3.0 * x * x)
>>> float(xform.grad(cube_p.bind)(jnp.float32(2.0)))
12.0

`pointwise` takes partial derivatives `di(y, *x)`, `linear` a transpose `(ct, *x)`, `bilinear` one
transpose for each side, `constant` any number of primitives, `composite` a jvp written in JAX
operations, from which the pullback is derived; its outputs are the primitive's own, bit for bit, or
None, and then the primitive is bound. Formulas take the primitive's parameters as
keyword-only arguments, and every parameter that is not None, False or empty must be taken by one of
them. A subclass of `Structured` describes a primitive that holds programs. Test what you declare
with `xform.testing.check_rule`.

A rule is that of the Primitive object, whatever its name. `traits` tells planner and passes what
else is known of it: `Traits(fusion="elementwise")` that XLA fuses it, `flops=` what it costs,
`random=True` that it is not to be run again.
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
