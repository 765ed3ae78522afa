"""Does `slices=True` reach the memory of programs whose authors cut them by hand?"""
