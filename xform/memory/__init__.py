"""Memory of compiled functions, as the compiler reports it."""
