"""What xform adds to a program so that XLA compiles it to less memory.

None of it changes a value. Each file names the compilers that need it.
"""
