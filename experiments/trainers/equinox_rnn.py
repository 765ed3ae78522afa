"""Equinox's docs/examples/train_rnn.ipynb, with a larger state."""

import json
import sys
from pathlib import Path

import numpy as np

book = json.loads((Path(sys.argv[1]) / "equinox/docs/examples/train_rnn.ipynb").read_text())
cells = ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]
code = "\n".join(cells[:-1]).replace('"step={step}, loss=', '"loss {step} ')
exec(compile(code, "train_rnn.ipynb", "exec"))
np.random.seed(0)  # after the imports of the notebook, which draw numbers too
main(dataset_size=1024, batch_size=256, hidden_size=128, steps=int(sys.argv[2]))  # noqa: F821
