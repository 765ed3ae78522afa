"""Flax NNX models and a trainer for them. They use only the public API of `xform`."""

# How a command is called. `xform train` of an installed package sets it to "xform".
PROGRAM = "python -m models"
