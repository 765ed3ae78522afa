"""Flax NNX models and a trainer for them. They use only the public API of `xform`."""
