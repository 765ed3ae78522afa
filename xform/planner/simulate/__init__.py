"""Simulate a compiler's memory from the program alone."""
