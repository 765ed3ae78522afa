"""Gradients at values inside a function: at named values, or at all values as a graph.

`graph` returns a `ComputationalGraph`. It consists of `GraphValue`, `GraphOperation` and `Edge`
objects, a `Partial` (a local derivative) on each edge, and a list of `AdjointUpdate`s, which is its
backward pass.
"""

from xform.adjoints.computational_graph import ComputationalGraph, graph
from xform.adjoints.named_gradients import name, partials
from xform.adjoints.parts import AdjointUpdate, Edge, GraphOperation, GraphValue, Partial

__all__ = [
    "AdjointUpdate",
    "ComputationalGraph",
    "Edge",
    "GraphOperation",
    "GraphValue",
    "Partial",
    "graph",
    "name",
    "partials",
]
