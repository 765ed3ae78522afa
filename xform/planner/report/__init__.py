"""Plans as tables, text and pictures."""
