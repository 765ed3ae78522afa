"""Kauldron's examples/mnist_autoencoder on random images, for a few steps."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(sys.argv[1]) / "kauldron"))
import tensorflow_datasets as tfds
from absl import flags
from examples import mnist_autoencoder
from kauldron import konfig
from kauldron.train import metric_writer


def print_loss(self, step, scalars, **_):
    """Print the loss of a step; Kauldron's writer logs it with `absl`."""
    for name in ("losses/total", "losses/recon"):
        if name in scalars:
            print(f"loss {step} {float(scalars[name])!r}", flush=True)
            return


metric_writer.KDMetricWriter.write_scalars = print_loss
config = mnist_autoencoder.get_config()
config.workdir = tempfile.mkdtemp()
config.num_train_steps = int(sys.argv[2]) - 1  # Kauldron runs one step more
config.log_metrics_every = 1
config.train_ds.num_workers = 0  # worker processes would not see the random images
config.evals = {}
flags.FLAGS(sys.argv[:1])
with tfds.testing.mock_data(num_examples=2048):
    konfig.resolve(config).train()
