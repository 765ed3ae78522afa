"""Training data: text, pictures and series, split, shuffled, and resumable at any step."""
