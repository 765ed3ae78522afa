"""The public `Plan`, and the decisions that it stores as data."""
