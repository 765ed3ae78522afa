"""Flax's examples/seq2seq (Linen), which learns to add numbers, for a few steps."""

import random
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(sys.argv[1]) / "flax/examples/seq2seq"))
import train
from absl import app, flags

from experiments.trainers.printed import print_metrics

print_metrics()
random.seed(0)
np.random.seed(0)
flags.FLAGS.set_default("num_train_steps", int(sys.argv[2]))
flags.FLAGS.set_default("decode_frequency", 1)
flags.FLAGS.set_default("workdir", tempfile.mkdtemp())
app.run(train.main, sys.argv[:1])
