"""Generators of plans, from the most to the least bytes."""
