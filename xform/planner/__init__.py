"""The planner: chooses which values the backward pass saves, and predicts bytes and FLOPs."""
