"""Our trainer's step beside a plain one of the same model: time, bytes and losses."""

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
from experiments.trainer.plain import compile_plain
from models.data.corpus import load_corpus
from models.errors import InputError
from models.nets.gpt2 import GPT2Config
from models.train.config import RunConfig
from models.train.kinds import of_model
from models.train.optim import OptimConfig
from models.train.planned import plan_step, policy_of
from models.train.state import init_state

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MIB = 2**20
MODEL = GPT2Config(vocab=8192, context=512, width=256, depth=8, heads=8, dropout=0.0)
BATCH, STEPS = 4, 20
OPTIM = OptimConfig(steps=STEPS, warmup=5, learning_rate=1e-3)
LAYOUTS = {"scanned": True, "unrolled": False}
PLAIN, CHUNKED, DEFAULT, HALF = "plain", "plain, in chunks", "ours", "ours, half the temp bytes"
HEAD = ["layers", "trainer", "temp MiB", "/ plain", "all MiB", "/ plain",
        "time / plain", "quartiles", "time / plain, in chunks", "quartiles",
        f"furthest loss, {STEPS} steps"]  # fmt: skip

Sizes = dict[str, int]


class Trainer:
    """A compiled step, the state that it is at, and what it has measured.

    `step` maps a state and a batch to the next state and the loss.
    """

    def __init__(self, step: Callable[[Any, Any], Any], state: Any, sizes: Sizes) -> None:
        self.step, self.state, self.sizes = step, state, sizes
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def advance(self, tokens: jax.Array) -> None:
        """Train on one batch, by the clock."""
        self.seconds.append(seconds(self._advance, (tokens,)))

    def _advance(self, tokens: jax.Array) -> Any:
        self.state, loss = self.step(self.state, tokens)
        self.losses.append(float(loss))
        return self.state


def sizes_of(step: jax.stages.Compiled) -> Sizes:
    """Temporary bytes, and all, by the compiler."""
    memory: Any = step.memory_analysis()
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes
    total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {"temp": memory.temp_size_in_bytes, "total": total}


def plain(model: GPT2Config, *, whole: bool) -> Trainer:
    """The plain trainer: all scores and logits at once if `whole`, else as our model has them."""
    if whole:
        model = dataclasses.replace(model, chunk=model.context)
    first = init_state(model, OPTIM, 0)
    state = (first.params, first.opt_state)
    tokens = jax.ShapeDtypeStruct((BATCH, model.context + 1), np.uint8)
    step = compile_plain(model, OPTIM, state, tokens, chunk=None if whole else 128)
    return Trainer(step, state, sizes_of(step))


def ours(run: RunConfig, policy: str) -> Trainer:
    """Our trainer, whose backward pass keeps what a policy says."""
    planned = plan_step(dataclasses.replace(run, policy=policy), policy_of(policy))

    def step(state: Any, tokens: jax.Array) -> Any:
        state, metrics = planned.step(state, tokens[None])
        return state, metrics["loss"]

    return Trainer(step, init_state(run.model, OPTIM, 0), sizes_of(planned.step))


def trainers(model: GPT2Config) -> dict[str, Trainer]:
    """All of them, each with the same first state; none within a budget that is refused."""
    run = dataclasses.replace(of_model(model), optim=OPTIM, batch=BATCH)
    usual = plain(model, whole=True)
    half = usual.sizes["total"] - usual.sizes["temp"] // 2
    found = {PLAIN: usual, CHUNKED: plain(model, whole=False), DEFAULT: ours(run, "default")}
    try:
        found[HALF] = ours(run, f"budget:{half // MIB}MiB")
    except InputError as refused:
        print(refused, flush=True)
    return found


def measure(layout: str) -> dict[str, Any]:
    """Train all side by side on the same batches: each takes a step, then each the next.

    Who goes first changes with every step, so that what slows the machine slows all of them.
    """
    model = dataclasses.replace(MODEL, scan=LAYOUTS[layout])
    sides = trainers(model)
    with tempfile.TemporaryDirectory() as folder:
        corpus = load_corpus((), model.context, vocab=model.vocab, work=Path(folder))
    batches = corpus.batches(window=model.context, batch=BATCH)
    for step in range(STEPS):
        tokens = jax.numpy.asarray(next(batches)[0])
        order = list(sides.values())
        for side in order if step % 2 else order[::-1]:
            side.advance(tokens)
        print(layout, step + 1, {name: side.losses[-1] for name, side in sides.items()}, flush=True)
    return {name: compared(side, sides) for name, side in sides.items()}


def compared(side: Trainer, sides: dict[str, Trainer]) -> dict[str, Any]:
    """What one measured: bytes, and time and losses beside those of the plain ones.

    Times are ratios, one for each step but the first: their quartiles and median.
    """
    times = {
        name: statistics.quantiles(np.divide(side.seconds, sides[name].seconds)[1:], n=4)
        for name in (PLAIN, CHUNKED)
    }
    furthest = max(np.abs(np.subtract(side.losses, sides[PLAIN].losses)).tolist())
    return {**side.sizes, "times": times, "losses": side.losses, "furthest": furthest}


def rows(layout: str, found: dict[str, Any]) -> list[list[str]]:
    """The rows of a layout."""
    usual = found[PLAIN]
    table: list[list[str]] = []
    for name, one in found.items():
        cells = [layout, name]
        for key in ("temp", "total"):
            cells += [f"{one[key] / MIB:.0f}", f"{one[key] / usual[key]:.2f}"]
        for other, (low, middle, high) in one["times"].items():
            same = other == name
            cells += ["1", ""] if same else [f"{middle:.3f}", f"{low:.3f} to {high:.3f}"]
        table.append([*cells, f"{one['furthest']:.1e}"])
    if HALF not in found:
        table.append([layout, HALF, "refused", *[""] * (len(HEAD) - 3)])
    return table


def main() -> None:
    """Measure the layouts that are named, or all; table and plot show all so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layouts", nargs="*", default=list(LAYOUTS), help=", ".join(LAYOUTS))
    for layout in parser.parse_args().layouts:
        results = keep(RESULTS, layout, measure(layout))
        results = {name: results[name] for name in LAYOUTS if name in results}
        write_table(HERE, HEAD, [row for item in results.items() for row in rows(*item)])
        draw(results, HERE / "trainer.png")


if __name__ == "__main__":
    main()
