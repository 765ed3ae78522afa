"""Derivatives of regions that run in slices, and programs with such regions.

`loss` computes value and gradient of a loss in one loop. `decision` applies decisions of a plan to
a program. `search` finds regions for a number of bytes, without a derivative. (With a derivative,
`planner/search_slices.py` does.) `xform.slices` finds the regions.
"""
