"""The training step, its loop, and what a run leaves on disk."""
