"""Sparse Jacobians and Hessians: sparsity patterns, and computing only the nonzeros; Laplacians."""
