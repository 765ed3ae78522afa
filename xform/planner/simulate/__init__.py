"""Predict the memory of a compiled program from the program alone, without compiling it."""
