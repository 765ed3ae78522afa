"""A traced function as data: equations, programs, names, fingerprints and arithmetic."""
