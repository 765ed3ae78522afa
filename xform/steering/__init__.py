"""What xform adds to a program so that XLA compiles it to less memory.

None of it changes a value. Each file says which compilers need it, what it costs, and its switch
(`settings.py`). `experiments/steering` measures programs with each switch on and off.
"""
