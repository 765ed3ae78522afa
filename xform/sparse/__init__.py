"""Sparse Jacobians and Hessians: sparsity patterns, and computing only the nonzeros; Laplacians.

`jacobian` and `hessian` return a `SparseMatrixFunction`. Its method `prepare` returns a
`PatternAndColoring`: the `Pattern` of the elements that may be nonzero, and the `Coloring`, which
says which products with vectors are computed.
"""

from xform.sparse.coloring import Coloring
from xform.sparse.compressed import PatternAndColoring, SparseMatrixFunction
from xform.sparse.detection import sparsity
from xform.sparse.forward_laplacian import laplacian
from xform.sparse.matrix import hessian, jacobian
from xform.sparse.pattern import Pattern

__all__ = [
    "Coloring",
    "Pattern",
    "PatternAndColoring",
    "SparseMatrixFunction",
    "hessian",
    "jacobian",
    "laplacian",
    "sparsity",
]
