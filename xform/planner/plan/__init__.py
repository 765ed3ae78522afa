"""Decisions as data, and the public `Plan` that holds them."""
