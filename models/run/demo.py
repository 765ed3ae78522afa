"""A demonstration that takes a few minutes on two CPU cores: `python -m models demo`.

It prints the memory of the gradient under each policy. It trains a tokenizer (byte-level BPE) and a
small GPT-2 on the source files of the Python standard library, within a memory budget. Then it
samples from the model, and compares the memory of the training step with that of a step with
`jax.grad`. It writes plots and numbers to a folder.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx
from rich.panel import Panel

import xform
from models import program
from models.data.tokenizer import load_tokenizer
from models.errors import InputError
from models.nets.presets import TRAINED, abstract, parameter_count
from models.run.flags import Parser
from models.run.generate import GenerationOptions, texts
from models.run.memory_table import measure, table
from models.run.plots import plot_losses, plot_memory, plot_peaks
from models.settings import replaced, setting
from models.train.display import Output
from models.train.folder import LOG, PLAN, TOKENIZER
from models.train.log import read_records
from models.train.loop import train
from models.train.optim import OptimConfig, optimizer
from models.train.planned import load_plan, mebibytes
from models.train.state import TrainState, abstract_state
from models.train.step import make_loss, make_step
from models.train.text import TextRun

MODEL: Any = dataclasses.replace(TRAINED["tiny"], vocab=2048)
OPTIM = OptimConfig(optimizer="muon", learning_rate=1e-2, warmup_steps=30)
BATCH = 16


@dataclasses.dataclass(frozen=True)
class Demo:
    """Settings of the command `demo`."""

    out: Path = setting(Path("runs/demo"), "Folder for plots and numbers.")
    steps: int = setting(300, "Number of training steps.", least=1)
    policy: str = setting(
        "budget:100MiB", "Which values are saved for the backward pass, as for `train`."
    )
    max_seconds: float = setting(360.0, "Stop training after this many seconds.", least=1)


def peaks(run: TextRun, plan: xform.Plan) -> dict[str, Any]:
    """Return memory reports of two training steps by name: with `jax.grad`, and with a plan.

    Both donate their state.
    """
    gradient = jax.value_and_grad(make_loss(run.model), has_aux=True)

    def jax_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        (loss, _), grads = gradient(state.params, state.statistics, tokens[0])
        updates, opt_state = optimizer(run.optim).update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return dataclasses.replace(state, params=params, opt_state=opt_state), loss

    steps = {"jax.grad": jax_step, run.policy: make_step(run.model, run.optim, plan)}
    args = abstract_state(run.model, run.optim), run.batch_type()
    return {
        name: xform.memory_analysis(step, *args, donate_argnums=0) for name, step in steps.items()
    }


def main(arguments: list[str]) -> int:
    """Measure, train, sample from and plot a small GPT-2 within a memory budget."""
    parser = Parser(prog=f"{program.NAME} demo", description=main.__doc__)
    parser.add_settings(Demo())
    demo = replaced(Demo(), parser.parse(arguments), by_flag=True)
    console = Output()
    started = time.perf_counter()
    shape = f"{MODEL.depth} layers, {BATCH} x {MODEL.context} tokens, {MODEL.dtype}"
    console.print("Compiling the gradient under each policy ...")
    rows = measure(MODEL, BATCH)
    console.print(table(rows, f"Memory of one gradient: {shape}"))

    with tempfile.TemporaryDirectory() as folder:
        run = TextRun(
            model=MODEL,
            tokenizer=f"bpe:{MODEL.vocab}",
            optim=dataclasses.replace(OPTIM, steps=demo.steps),
            out=Path(folder),
            policy=demo.policy,
            batch=BATCH,
            validate_every=50,
            save_every=200,
            max_seconds=demo.max_seconds,
        )
        try:
            outcome = train(run, console)
        except InputError as error:
            raise InputError(
                f"{error} (options that the demo lacks are options of {program.NAME} train)"
            ) from None
        records = read_records(run.out / LOG)
        tokenizer = load_tokenizer(run.out / TOKENIZER)
        plan = load_plan(run.out / PLAN)
    if outcome.signal is not None:
        return 128 + outcome.signal

    out = demo.out
    out.mkdir(parents=True, exist_ok=True)
    metric = TextRun.metric
    validated = [r[metric] for r in records if metric in r]
    console.print(
        f"Validation: {validated[0]:.2f} bits per byte before training, {validated[-1]:.2f} after"
        f" {outcome.step} steps ({validated[-1] / validated[0]:.0%})."
    )
    model = nnx.merge(nnx.graphdef(abstract(MODEL)), outcome.state.params)
    (text,) = texts(model, GenerationOptions(temperature=0.7, length=150), tokenizer)
    console.print(Panel(text, title="sample", highlight=False))

    count = parameter_count(model) / 1e6
    reports = peaks(run, plan)
    sizes = {name: report.total_bytes for name, report in reports.items()}
    peak_texts = ", ".join(f"{mebibytes(size)} with {name}" for name, size in sizes.items())
    console.print(f"Peak memory of a step: {peak_texts}.")
    title = f"A GPT-2 of {count:.1f} M parameters learns the source of Python"
    plot_losses(records, out / "loss.png", title)
    plot_memory(rows, out / "memory.png", f"What each policy saves: {shape}")
    plot_peaks(reports, out / "peak.png", "Live memory of a step, and its categories at the peak")
    results = {
        "steps": outcome.step,
        "validation_bits_per_byte": {"first": validated[0], "last": validated[-1]},
        "seconds": round(time.perf_counter() - started, 1),
        "peak_bytes_of_a_step": sizes,
        "memory": {
            row.name: {
                "temp_bytes": row.temp_bytes,
                "flops_recomputed": row.flops_recomputed,
            }
            for row in rows
        },
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"Wrote loss.png, memory.png, peak.png and results.json to {out}.")
    return 0
