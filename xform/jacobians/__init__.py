"""`xform.jacobian`: the cheapest way to a Jacobian."""
