"""A compiler's memory, simulated from the program alone."""
