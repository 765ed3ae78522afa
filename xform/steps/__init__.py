"""Training steps: one byte budget for a compiled step, and for all derivatives that it takes."""
