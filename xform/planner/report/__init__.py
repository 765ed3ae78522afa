"""Reports of plans as tables, text and pictures."""
