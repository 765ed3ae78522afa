"""Functions of Flax NNX modules as pure functions of arrays, for the transforms of the core.

`arguments` imports Flax only if it is loaded and an argument holds a module.
"""
