"""How much time does checking the health of all layers add to a training step?

python -m experiments.health.cost
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.report import write_table
from experiments.timing import paired
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.train.health import diagnosis
from models.train.kinds import of_model
from models.train.optim import OptimConfig
from models.train.state import init_state
from models.train.step import make_step

HERE = Path(__file__).parent
MODELS: dict[str, Any] = {
    "GPT-2, 4 layers of 256": GPT2Config(256, 256, 256, 4, 4, dropout=0.0),
    "Llama, 3 layers of 192, unrolled": LlamaConfig(
        256, 128, 192, 3, 4, kv_heads=2, mlp_width=512, scan_layers=False
    ),
}
BATCH, PAIRS = 4, 15


def measure(model: Any) -> tuple[float, float, float]:
    """Return the time of a step with readings over one without: the median and quartiles."""
    run = dataclasses.replace(of_model(model), batch=BATCH, optim=OptimConfig())
    state = init_state(run.model, run.optim, 0)
    tokens = np.random.default_rng(0).integers(0, 255, run.batch_type().shape).astype(np.uint8)
    with_health = jax.jit(make_step(run.model, run.optim, health=diagnosis(run)))
    without = jax.jit(make_step(run.model, run.optim))
    return paired(with_health, without, (state, tokens), PAIRS)


def main() -> None:
    """Measure, and write the table."""
    table: list[list[str]] = []
    for name, model in MODELS.items():
        middle, low, high = measure(model)
        table.append([name, f"{middle:.3f}", f"{low:.3f} to {high:.3f}"])
        print(table[-1], flush=True)
    write_table(HERE, ["model", "time of a step, with / without", "quartiles"], table, "cost")


if __name__ == "__main__":
    main()
