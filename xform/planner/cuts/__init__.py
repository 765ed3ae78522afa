"""Choose the values of one Joint that cost least to save."""
