"""Flax's examples/mnist (NNX) on random digits, for one epoch."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]) / "flax/examples/mnist"))
import ml_collections
import tensorflow_datasets as tfds
import train
from absl import logging

logging.info = lambda text, *_: print("loss", text) if "train_loss" in text else None
config = ml_collections.ConfigDict(
    {"learning_rate": 0.005, "momentum": 0.9, "batch_size": 128, "num_epochs": 1}
)
with tfds.testing.mock_data(num_examples=128 * int(sys.argv[2])):
    train.train_and_evaluate(config, tempfile.mkdtemp())
