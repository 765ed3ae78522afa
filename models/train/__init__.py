"""The training step, the training loop, and the files of a run."""
