"""Inline remat regions, so that their policies no longer decide which values are saved.

A remat region is the body of a function under `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from xform.passes.base import Pass
from xform.passes.inline import inline_bodies, region_body
from xform.program.ir import Program


@dataclasses.dataclass(frozen=True)
class OpenRegions(Pass):
    """Inline remat regions, with a policy or without.

    A derivative of the resulting function chooses the saved values of the whole program, as if
    there were no regions. Two kinds of regions are kept: those inside custom derivative rules, and
    those that JAX has already differentiated.

    >>> from xform import passes
    >>> f = lambda x: jax.checkpoint(jnp.sin)(x) + 1
    >>> [e.primitive.name for e in jax.make_jaxpr(passes.OpenRegions()(f))(1.0).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "open_regions"

    def rewrite(self, prog: Program) -> Program:
        return inline_bodies(prog, region_body)
