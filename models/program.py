"""How a command is called: `python -m models train`, or `xform train` of an installed package."""

# `xform.commands.trainer` sets it to "xform".
NAME = "python -m models"
