"""`xform.jacobian`: Jacobians by forward mode, reverse mode or a cheaper mix of both."""
