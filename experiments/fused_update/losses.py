"""Losses of the demo's model with the update within the backward pass, and after it.

With `--control` both updates are separate, and one run starts from parameters that differ in the
last bit. So it shows how far rounding alone drives two runs apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.report import write_table
from models.data.batches import share_of
from models.run.demo import BATCH, MODEL
from models.train.optim import OptimConfig
from models.train.state import init_state
from models.train.step import compile_step
from models.train.text import TextRun

HERE = Path(__file__).parent
# AdamW, and no norm over all gradients.
OPTIM = OptimConfig(clip_norm=math.inf, spike_factor=math.inf, warmup_steps=30, steps=300)


def losses(steps: int, control: bool) -> list[list[float]]:
    """Return the losses of two runs on the same batches: separate, and fused or the control."""
    with tempfile.TemporaryDirectory() as folder:
        run = TextRun(model=MODEL, out=Path(folder), batch=BATCH)
        device = SingleDeviceSharding(jax.devices()[0])
        batches = run.batches(run.load(), share_of(device, BATCH), device)
        both = [OPTIM, dataclasses.replace(OPTIM, fused_update=not control)]
        compiled = [compile_step(MODEL, o, run.batch_type()) for o in both]
        states = [init_state(MODEL, o, 0) for o in both]
        if control:
            other = jax.tree.map(lambda x: x * (1 + 2.0**-23), states[1].params)
            states[1] = dataclasses.replace(states[1], params=other)
        found: list[list[float]] = [[], []]
        for i in range(steps):
            batch = next(batches)
            for which, step in enumerate(compiled):
                states[which], metrics = step(states[which], batch)
                found[which].append(float(metrics["loss"]))
            if (i + 1) % 10 == 0:
                print(i + 1, *(one[-1] for one in found), _largest(found), flush=True)
    return found


def _largest(found: list[list[float]]) -> float:
    return float(np.max(np.abs(np.subtract(*found))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--control", action="store_true")
    args = parser.parse_args()
    found = losses(args.steps, args.control)
    head = ["the other run", "steps", "first loss", "last loss, separate", "last loss, other",
            "largest difference", "in 20 steps"]  # fmt: skip
    separate, other = found
    name = "the last bit of each parameter changed" if args.control else "fused update"
    row = [name, str(len(other)), f"{separate[0]:.6f}", f"{separate[-1]:.6f}", f"{other[-1]:.6f}",
           f"{_largest(found):.1e}", f"{_largest([one[:20] for one in found]):.1e}"]  # fmt: skip
    write_table(HERE, head, [row], "control" if args.control else "losses")


if __name__ == "__main__":
    main()
