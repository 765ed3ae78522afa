"""Compare our trainer's step with a plain step of the same model: time, bytes and losses."""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments.report import keep, write_table
from experiments.timing import seconds
from experiments.trainer.picture import draw
from experiments.trainer.plain import Loss, compile_plain, of_pictures, of_text
from models.data.batches import ALONE
from models.errors import InputError
from models.nets.gpt2 import GPT2Config
from models.nets.presets import PRESETS
from models.train.config import RunConfig
from models.train.kinds import of_model
from models.train.optim import OptimConfig
from models.train.planned import plan_step, policy_of
from models.train.state import init_state

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MIB = 2**20
STEPS = 20
OPTIM = OptimConfig(steps=STEPS, warmup_steps=5, learning_rate=1e-3)
GPT2 = GPT2Config(vocab=8192, context=512, width=256, depth=8, heads=8, dropout=0.0)
MODELS: dict[str, Any] = {
    "gpt2-scanned": GPT2,
    "gpt2-unrolled": dataclasses.replace(GPT2, scan_layers=False),
    "resnet20": PRESETS["resnet20"],
}
BATCHES = {"gpt2-scanned": 4, "gpt2-unrolled": 4, "resnet20": 128}
PLAIN, CHUNKED, DEFAULT, HALF = "plain", "plain, in chunks", "ours", "ours, half the temp bytes"
HEAD = ["model", "trainer", "temp MiB", "/ plain", "all MiB", "/ plain",
        "time / plain", "quartiles", "time / plain, in chunks", "quartiles",
        f"furthest loss, {STEPS} steps"]  # fmt: skip

Sizes = dict[str, int]


class Trainer:
    """A compiled step, its current state, and its measurements.

    `step` maps a state and a batch to the next state and the loss.
    """

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, sizes: Sizes) -> None:
        self.step, self.state, self.sizes = step, state, sizes
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def advance(self, batch: Any) -> None:
        """Train on one batch, and time it."""
        self.seconds.append(seconds(self._advance, (batch,)))

    def _advance(self, batch: Any) -> Any:
        self.state, loss = self.step(self.state, batch)
        self.losses.append(float(loss))
        return self.state


def sizes_of(step: jax.stages.Compiled) -> Sizes:
    """Return temporary bytes and all bytes, from the compiler."""
    memory: Any = step.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {"temp": memory.temp_size_in_bytes, "total": total}


def plain(run: RunConfig, loss: Loss) -> Trainer:
    """Return the plain trainer of a loss, with batches like ours: it adds up one slice."""
    first = init_state(run.model, OPTIM, 0)
    state = (first.params, first.statistics, first.opt_state)

    def of_slices(params: Any, rest: Any, batch: Any) -> Any:
        return loss(params, rest, jax.tree.map(lambda x: x[0], batch))

    step = compile_plain(of_slices, OPTIM, state, run.batch_type())
    return Trainer(step, state, sizes_of(step))


def ours(run: RunConfig, policy: str) -> Trainer:
    """Return our trainer, whose backward pass follows a policy."""
    planned = plan_step(dataclasses.replace(run, policy=policy), policy_of(policy))

    def step(state: Any, batch: Any) -> Any:
        state, metrics = planned.step(state, batch)
        return state, metrics["loss"]

    return Trainer(step, init_state(run.model, OPTIM, 0), sizes_of(planned.step))


def trainers(run: RunConfig) -> dict[str, Trainer]:
    """Return all trainers with the same first state, except those whose budget is refused."""
    model = run.model
    if isinstance(model, GPT2Config):
        whole = dataclasses.replace(model, query_chunk_size=model.context)
        usual = plain(run, of_text(whole, chunk=None))
        found = {PLAIN: usual, CHUNKED: plain(run, of_text(model, chunk=128))}
    else:
        usual = plain(run, of_pictures(model))
        found = {PLAIN: usual}
    half = usual.sizes["total"] - usual.sizes["temp"] // 2
    found[DEFAULT] = ours(run, "min_cut")
    try:
        found[HALF] = ours(run, f"budget:{half // MIB}MiB")
    except InputError as refused:
        print(refused, flush=True)
    return found


def measure(name: str) -> dict[str, Any]:
    """Train all on the same batches, in turns: each takes a step, then each takes the next.

    The order changes with every step, so that a slow machine slows all of them.
    """
    run = dataclasses.replace(of_model(MODELS[name]), optim=OPTIM, batch=BATCHES[name])
    sides = trainers(run)
    with tempfile.TemporaryDirectory() as folder:
        run = dataclasses.replace(run, out=Path(folder) / "run")
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        batches = run.batches(run.load(), ALONE, here)
        for step in range(STEPS):
            batch = next(batches)
            order = list(sides.values())
            for side in order if step % 2 else order[::-1]:
                side.advance(batch)
            losses = {trainer: side.losses[-1] for trainer, side in sides.items()}
            print(name, step + 1, losses, flush=True)
    return {trainer: compared(side, sides) for trainer, side in sides.items()}


def compared(side: Trainer, sides: dict[str, Trainer]) -> dict[str, Any]:
    """Return the bytes of one trainer, and its time and losses relative to the plain ones.

    Times are ratios, one for each step except the first: their quartiles and median.
    """
    times = {
        name: statistics.quantiles(np.divide(side.seconds, sides[name].seconds)[1:], n=4)
        for name in (PLAIN, CHUNKED)
        if name in sides
    }
    furthest = max(np.abs(np.subtract(side.losses, sides[PLAIN].losses)).tolist())
    return {**side.sizes, "times": times, "losses": side.losses, "furthest": furthest}


def rows(model: str, found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of a model."""
    usual = found[PLAIN]
    table: list[list[str]] = []
    for name, one in found.items():
        cells = [model, name]
        for key in ("temp", "total"):
            cells += [f"{one[key] / MIB:.0f}", f"{one[key] / usual[key]:.2f}"]
        for other, (low, middle, high) in one["times"].items():
            same = other == name
            cells += ["1", ""] if same else [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        cells += [""] * (len(HEAD) - 1 - len(cells))  # without chunks
        table.append([*cells, f"{one['furthest']:.1e}"])
    if HALF not in found:
        table.append([model, HALF, "refused", *[""] * (len(HEAD) - 3)])
    return table


def main() -> None:
    """Measure the named models, or all; table and plot show all measurements so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    for model in parser.parse_args().models:
        results = keep(RESULTS, model, measure(model))
        results = {name: results[name] for name in MODELS if name in results}
        write_table(HERE, HEAD, [row for item in results.items() for row in rows(*item)])
        draw(results, HERE / "trainer.png")


if __name__ == "__main__":
    main()
