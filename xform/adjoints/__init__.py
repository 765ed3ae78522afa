"""Gradients at values inside a function: at named values, or at all values as a graph."""

from xform.adjoints.computational_graph import graph
from xform.adjoints.named_gradients import partials
from xform.adjoints.naming import name

__all__ = ["graph", "name", "partials"]
