"""Sparse Jacobians and Hessians: sparsity patterns, and computing only the nonzeros; Laplacians."""

from xform.sparse.detection import sparsity
from xform.sparse.forward_laplacian import laplacian
from xform.sparse.matrix import hessian, jacobian
from xform.sparse.pattern import Pattern

__all__ = ["Pattern", "hessian", "jacobian", "laplacian", "sparsity"]
