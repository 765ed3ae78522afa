"""The table of primitives: the rule of each, and its traits."""
