"""The options that several commands have, and how they are read.

`function` reads a function, its inputs and a policy, `reference` its name, and `transform` the
option `--transform`. `reports` has the options for devices and output files. `record` records the
derivatives of the program that `run` runs.
"""
