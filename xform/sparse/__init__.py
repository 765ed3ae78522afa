"""Derivatives that are mostly zero: where they are not, and how to compute only that."""
