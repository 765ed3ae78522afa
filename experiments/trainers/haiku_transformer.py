"""Haiku's examples/transformer on the library's own sources, for a few steps."""

import random
import sys
import tempfile
from pathlib import Path

from absl import app, logging

sources, steps = Path(sys.argv[1]) / "dm-haiku", int(sys.argv[2])
sys.path.insert(0, str(sources))
from examples.transformer import train  # noqa: E402

text = Path(tempfile.mkdtemp()) / "text.txt"
text.write_text("".join(f.read_text("ascii", "ignore") for f in sorted(sources.glob("haiku/*.py"))))
random.seed(0)
train.MAX_STEPS, train.LOG_EVERY = steps, 1
logging.info = lambda metrics: print("loss", int(metrics["step"]), metrics["loss"])
app.run(train.main, [sys.argv[0], f"--dataset_path={text}"])
