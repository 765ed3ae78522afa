"""The public transforms."""
