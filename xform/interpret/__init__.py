"""The interpreters: they differentiate programs, and run forward and backward passes."""
