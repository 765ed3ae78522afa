"""Terminal output: text tables, units, a progress line, suppressed startup messages of JAX."""
