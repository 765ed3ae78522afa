"""Gradients at values inside a function: at named values, or at all values as a graph."""
