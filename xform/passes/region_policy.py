"""Give remat regions with named values another policy.

A remat region is the body of a function under `jax.checkpoint`. A named value is a result of
`jax.ad_checkpoint.checkpoint_name`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from xform._jax import JaxprEqn, jaxpr_and_consts, jaxprs_of
from xform.passes.base import Pass
from xform.passes.structured import is_remat_region
from xform.program.hijax import lower_equation
from xform.program.ir import Program
from xform.program.nested import map_equation
from xform.registry.table import traits


@dataclasses.dataclass(frozen=True)
class RegionPolicy(Pass):
    """Replace the policy of each remat region that has a named value inside.

    Use it for a program whose regions are marked inside a library, where `jax.checkpoint` has no
    policy or another one. Regions without named values keep their policies. The function that the
    pass returns can be differentiated by JAX and by xform.

    Attributes:
      policy: the new policy, of `jax.checkpoint_policies` or `xform.policies`.

    >>> from jax.ad_checkpoint import checkpoint_name
    >>> from xform import passes
    >>> layer = jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ x, "e")))
    >>> saving = passes.RegionPolicy(jax.checkpoint_policies.save_only_these_names("e"))(layer)
    >>> [xform.residuals(f, jnp.ones((8, 8))).total_bytes for f in (layer, saving)]
    [0, 256]
    """

    name: ClassVar[str] = "region_policy"
    policy: Callable[..., Any]

    def rewrite(self, prog: Program) -> Program:
        equations = tuple(map_equation(eqn, self._with_policy) for eqn in prog.equations)
        return Program(prog.inputs, prog.consts, equations, prog.outputs)

    def program(self, prog: Program) -> Program:
        """Return the program with the new policy in its regions, nested ones included."""
        return self.rewrite(prog)

    def _with_policy(self, eqn: JaxprEqn) -> JaxprEqn:
        """Return an equation with the new policy if it is a remat region with a named value."""
        eqn = lower_equation(eqn)
        if not is_remat_region(eqn) or not _has_names(eqn):
            return eqn
        return eqn.replace(params=eqn.params | {"policy": self.policy})


def _has_names(eqn: JaxprEqn) -> bool:
    """Return whether an equation has a named value inside."""
    inside = (lower_equation(e) for j in jaxprs_of(eqn) for e in jaxpr_and_consts(j)[0].eqns)
    return any(traits(e.primitive).label or _has_names(e) for e in inside)
