"""Random text in place of the data set `lm1b`, which must be downloaded."""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

EXAMPLES = 4096


def mock_lm1b() -> AbstractContextManager[None]:
    """Return a context that makes `tensorflow_datasets` invent the examples of `lm1b`."""
    import tensorflow as tf
    import tensorflow_datasets as tfds

    tf.random.set_seed(0)  # the order of the examples
    folder = Path(tempfile.mkdtemp())
    for name in ("lm1b", "lm1b/plain_text"):  # trainers ask for the size of each split
        info = folder / name / "1.1.0" / "dataset_info.json"
        info.parent.mkdir(parents=True)
        splits = [{"name": name, "shardLengths": [str(EXAMPLES)]} for name in ("train", "test")]
        info.write_text(json.dumps({"name": "lm1b", "version": "1.1.0", "splits": splits}))
    return tfds.testing.mock_data(num_examples=EXAMPLES, data_dir=str(folder))
