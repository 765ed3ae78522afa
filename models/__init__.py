"""Flax NNX models and their training, written against the public API of `xform` alone."""
