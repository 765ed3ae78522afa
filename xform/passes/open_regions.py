"""Remat regions opened: what their authors said is saved no longer holds."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from xform.ir import Program
from xform.passes.base import Pass
from xform.passes.inline import opened
from xform.passes.structured import body, region


@dataclasses.dataclass(frozen=True)
class OpenRegions(Pass):
    """Remat regions, with a policy or without, replaced by what is in them.

    A derivative of the program then decides across them what is saved, as if nobody had marked
    them. Regions that JAX has differentiated already stay, and so do those in custom rules.

    >>> from xform import passes
    >>> f = lambda x: jax.checkpoint(jnp.sin)(x) + 1
    >>> [e.primitive.name for e in jax.make_jaxpr(passes.OpenRegions()(f))(1.0).eqns]
    ['sin', 'add']
    """

    name: ClassVar[str] = "open_regions"

    def rewrite(self, prog: Program) -> Program:
        return opened(prog, lambda eqn: body(eqn) if region(eqn) else None)
