"""Generators of candidate plans for a budget of the peak."""
