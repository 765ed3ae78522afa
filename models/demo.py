"""The whole path in a few minutes on two CPU cores: `python -m models.demo`.

Prints the memory of the gradient under each policy, trains the tiny transformer on the sources of
the Python standard library, samples from it, and writes plots and figures to a folder.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.panel import Panel

from models.cli import INTERRUPTED, one_line_errors
from models.config import PRESETS
from models.loop import train
from models.memory_table import measure, table
from models.optim import OptimConfig
from models.plots import plot_losses, plot_memory
from models.record import read_records
from models.run import RunConfig
from models.sample import generate
from models.transformer import abstract_transformer, parameter_count

MODEL = PRESETS["tiny"]
BATCH = 16
PROMPT = b"def "


def main(
    out: Annotated[Path, typer.Option(help="Folder for plots.")] = Path("experiments/demo"),
    steps: Annotated[int, typer.Option(help="Updates to train for.", min=1)] = 800,
    max_seconds: Annotated[
        float, typer.Option(help="Stop training after this time, on a slow machine.", min=1.0)
    ] = 360.0,
) -> None:
    """Memory table, training, sample and plots of the tiny transformer."""
    console = Console()
    started = time.perf_counter()
    with one_line_errors():
        shape = f"{MODEL.depth} layers, {BATCH} x {MODEL.context} tokens, {MODEL.dtype}"
        with console.status("Compiling the gradient under each policy ..."):
            rows = measure(MODEL, BATCH)
        console.print(table(rows, f"Memory of one gradient: {shape}"))

        with tempfile.TemporaryDirectory() as folder:
            run = RunConfig(
                model=MODEL,
                optim=OptimConfig(steps),
                out=Path(folder),
                batch=BATCH,
                eval_every=50,
                save_every=200,
                max_seconds=max_seconds,
            )
            outcome = train(run, console)
            records = read_records(run.out / "log.jsonl")
        if outcome.interrupted:
            raise typer.Exit(INTERRUPTED)

        out.mkdir(parents=True, exist_ok=True)
        judged = [r["validation_bits_per_byte"] for r in records if "loss" not in r]
        console.print(
            f"Validation: {judged[0]:.2f} bits per byte before training, {judged[-1]:.2f} after"
            f" {outcome.step} steps ({judged[-1] / judged[0]:.0%})."
        )
        text = generate(MODEL, outcome.state.params, PROMPT, length=400, temperature=0.7)
        console.print(Panel(text.decode(errors="replace"), title="a sample", highlight=False))

        count = parameter_count(abstract_transformer(MODEL)) / 1e6
        title = f"A transformer of {count:.1f} M parameters learns the source of Python"
        plot_losses(records, out / "loss.png", title)
        plot_memory(rows, out / "memory.png", f"What each policy saves: {shape}")
        results = {
            "steps": outcome.step,
            "validation_bits_per_byte": {"first": judged[0], "last": judged[-1]},
            "seconds": round(time.perf_counter() - started, 1),
            "memory": {
                row.name: {
                    "temp_bytes": row.temp_bytes,
                    "flops_recomputed": row.flops_recomputed,
                }
                for row in rows
            },
        }
        (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"Wrote loss.png, memory.png and results.json to {out}.")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
