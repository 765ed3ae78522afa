"""What saving, sending and recomputing cost."""
