"""What a backward pass keeps, and what it costs."""
