"""Which values of one Joint cost least to save."""
