"""`xform.jacobian`: Jacobians by forward mode, reverse mode or a cheaper mix of both.

`jacobian` has the transform. `segments` cuts a program where it is one value wide, and `work`
counts the FLOPs of each part. `chain` finds the cheapest order to multiply the Jacobians of the
parts, and `choice` decides. `accumulate` and `units` evaluate the choice, and `explain` explains
it.
"""
