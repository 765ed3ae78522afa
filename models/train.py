"""Train a transformer on bytes: `python -m models.train --help`."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import typer
from rich.console import Console

import xform
from models.cli import INTERRUPTED, one_line_errors
from models.config import PRESETS, TransformerConfig
from models.errors import InputError
from models.loop import train
from models.optim import OptimConfig
from models.run import RunConfig
from models.step import init_state, make_step
from models.transformer import abstract_transformer, parameter_count

Preset = Literal[
    "tiny", "small", "gpt2-124m", "gpt2-1.5b", "tinyllama-1.1b", "llama2-7b", "llama3-8b"
]
Policy = Literal[
    "none",
    "save_everything",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_names",
    "save_nothing",
]


def option(help: str, **settings: Any) -> Any:
    """A typed command-line option."""
    return typer.Option(help=help, **settings)


def configure(preset: str, **sizes: Any) -> TransformerConfig:
    """A preset with the sizes that are not `None` in place of its own."""
    given = {name: size for name, size in sizes.items() if size is not None}
    try:
        return dataclasses.replace(PRESETS[preset], **given)
    except ValueError as error:
        raise InputError(str(error)) from None


def main(
    preset: Annotated[Preset, option("Sizes to start from.")] = "tiny",
    out: Annotated[Path, option("Folder for log.jsonl and checkpoints/.")] = Path("runs/tiny"),
    data: Annotated[
        Path | None,
        option(
            "File or folder of text; without it, Python's own standard library.", show_default=False
        ),
    ] = None,
    steps: Annotated[int, option("Updates in the whole run.", min=1)] = 1000,
    batch: Annotated[int, option("Sequences held at once.", min=1)] = 16,
    accumulate: Annotated[int, option("Batches summed into one update.", min=1)] = 1,
    learning_rate: Annotated[float, option("Peak of the schedule.", min=0.0)] = 3e-3,
    warmup: Annotated[int, option("Updates of rising learning rate.", min=0)] = 50,
    weight_decay: Annotated[float, option("AdamW's, on matrices only.", min=0.0)] = 0.1,
    clip: Annotated[float, option("Largest global norm of a gradient.", min=0.0)] = 1.0,
    dtype: Annotated[
        Literal["f32", "bf16"], option("Of the computation; parameters stay f32.")
    ] = "f32",
    policy: Annotated[Policy, option("What each block saves for its backward pass.")] = "none",
    scan: Annotated[bool, option("Loop over stacked layers or write them out.")] = True,
    context: Annotated[int | None, option("Tokens in a window.", min=1)] = None,
    width: Annotated[int | None, option("Of the residual stream.", min=1)] = None,
    depth: Annotated[int | None, option("Number of blocks.", min=1)] = None,
    heads: Annotated[int | None, option("Query heads.", min=1)] = None,
    kv_heads: Annotated[int | None, option("Key and value heads.", min=1)] = None,
    hidden: Annotated[int | None, option("Of the feed-forward blocks.", min=1)] = None,
    swiglu: Annotated[bool | None, option("SwiGLU or GELU.", show_default=False)] = None,
    seed: Annotated[int, option("Of initial values and data order.", min=0)] = 0,
    eval_every: Annotated[int, option("Updates between validations.", min=1)] = 100,
    eval_windows: Annotated[int, option("Windows in one validation.", min=1)] = 64,
    save_every: Annotated[int, option("Updates between checkpoints.", min=1)] = 100,
    keep: Annotated[int, option("Checkpoints to keep.", min=1)] = 3,
    background_saves: Annotated[bool, option("Train on while a checkpoint is written.")] = True,
    log_every: Annotated[int, option("Updates between lines without a terminal.", min=1)] = 25,
    max_seconds: Annotated[float, option("Save and stop after this time.", min=0.0)] = math.inf,
    resume: Annotated[bool, option("Go on from the last checkpoint in --out.")] = False,
    resume_step: Annotated[
        int | None, option("Go on from this checkpoint instead of the last.", show_default=False)
    ] = None,
    dry_run: Annotated[
        bool, option("Compile the step and print its memory; allocate nothing.")
    ] = False,
) -> None:
    """Train a decoder on the bytes of text through xform's own reverse mode."""
    console = Console()
    with one_line_errors():
        model = configure(
            preset,
            context=context,
            width=width,
            depth=depth,
            heads=heads,
            kv_heads=kv_heads,
            hidden=hidden,
            swiglu=swiglu,
            scan=scan,
            dtype=dtype,
            policy=None if policy == "none" else policy,
        )
        run = RunConfig(
            model=model,
            optim=OptimConfig(steps, learning_rate, warmup, weight_decay, clip),
            out=out,
            data=data,
            batch=batch,
            accumulate=accumulate,
            seed=seed,
            eval_every=eval_every,
            eval_windows=eval_windows,
            save_every=save_every,
            keep=keep,
            background_saves=background_saves,
            log_every=log_every,
            max_seconds=max_seconds,
            resume=resume or resume_step is not None,
            resume_step=resume_step,
        )
        count = parameter_count(abstract_transformer(model))
        tokens = f"{run.batch * run.accumulate} x {model.context} tokens per step"
        console.print(f"{preset}: {count:,} parameters, {tokens}")
        if dry_run:
            console.print(str(step_memory(run)), highlight=False, markup=False)
            return
        outcome = train(run, console)
        console.print(f"saved step {outcome.step} in {run.out}")
        if outcome.interrupted:
            raise typer.Exit(INTERRUPTED)


def step_memory(run: RunConfig) -> Any:
    """The compiler's account of one step, from shapes alone."""
    state = jax.eval_shape(lambda: init_state(run.model, run.optim, run.seed))
    tokens = jax.ShapeDtypeStruct(run.tokens_shape(), np.uint8)
    step = jax.jit(make_step(run.model, run.optim), donate_argnums=0)
    return xform.memory_analysis(step, state, tokens)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(main)

if __name__ == "__main__":
    app()
