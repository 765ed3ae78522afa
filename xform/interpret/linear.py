"""Whether a function is linear: its second part reads no value of the active inputs."""

from __future__ import annotations

from xform._jax import JaxprEqn, Var, frame
from xform.errors import NotLinear
from xform.interpret.joint import Plan, reads_of
from xform.interpret.node import fork_p, join_p
from xform.ir import Mask


def check_linear(plan: Plan, active: Mask) -> None:
    """Raise NotLinear where the transpose would need the point at which it is taken."""
    joint = plan.joint
    moving = {v for v, on in zip(joint.inputs, active, strict=True) if on}
    origin: dict[Var, JaxprEqn] = {}
    for eqn in joint.first:
        if any(isinstance(v, Var) and v in moving for v in eqn.invars):
            moving.update(eqn.outvars)
            origin.update((v, eqn) for v in eqn.outvars)
            if eqn.primitive is fork_p:
                node = eqn.params["node"]
                for inner in plan.inner[node]:
                    check_linear(inner, inner.joint.active)
    for eqn in plan.order:
        again = eqn in joint.first
        for v in () if again else reads_of(eqn, plan.inner):
            token = eqn.primitive is join_p and v is eqn.invars[0]
            if v in moving and not token:
                raise NotLinear(
                    "linear_transpose",
                    f"the function is not linear: the transpose of {eqn.primitive.name} needs the "
                    f"value of an argument",
                    frame(eqn),
                    "use vjp, which transposes the derivative at a point",
                )
