"""The public `Plan`: which values are saved for a backward pass, as data that can be stored."""
