"""The description of a training run, and where its state comes from when it begins."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from models.config import TransformerConfig
from models.data import Corpus
from models.errors import InputError
from models.optim import OptimConfig
from models.step import TrainState, init_state
from models.store import Damaged, Meta, Store


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """A training run. `batch` sequences are held at once, `accumulate` times in each step."""

    model: TransformerConfig
    optim: OptimConfig
    out: Path
    data: Path | None = None
    batch: int = 16
    accumulate: int = 1
    seed: int = 0
    eval_every: int = 100
    eval_windows: int = 64
    save_every: int = 100
    keep: int = 3
    background_saves: bool = True
    log_every: int = 25
    max_seconds: float = math.inf
    resume: bool = False
    resume_step: int | None = None

    def tokens_shape(self) -> tuple[int, int, int]:
        """Of what a step reads: `[accumulate, batch, window + 1]`."""
        return (self.accumulate, self.batch, self.model.context + 1)

    def identity(self, corpus: Corpus) -> dict[str, Any]:
        """What must not change between a checkpoint and its continuation."""
        model = {f"model {k}": v for k, v in self.model.shape_fields().items()}
        own = {k: getattr(self, k) for k in ("batch", "accumulate", "seed")}
        return {**model, **own, "data": corpus.fingerprint}


def start(
    run: RunConfig, corpus: Corpus, store: Store, console: Console
) -> tuple[TrainState, Meta | None]:
    """The state to train from, and the dictionary saved with it if it comes from a checkpoint.

    Raises:
      InputError: there is a run that would be overwritten, or none to resume, or it is damaged
        or of another model, data or batch.
    """
    steps = store.steps()
    if not run.resume:
        if steps:
            raise InputError(
                f"{run.out} holds a run saved at step {steps[-1]}: continue it with --resume,"
                " or choose another --out"
            )
        return init_state(run.model, run.optim, run.seed), None
    if not steps:
        raise InputError(f"no checkpoint to resume from in {run.out}")
    step = steps[-1] if run.resume_step is None else run.resume_step
    if step not in steps:
        raise InputError(f"no checkpoint of step {step} in {run.out}, which has {steps}")
    like = jax.eval_shape(lambda: init_state(run.model, run.optim, run.seed))
    try:
        meta = store.meta(step)
        _same_run(run, meta["identity"], run.identity(corpus))
        state = store.restore(step, like)
    except Damaged as error:
        intact = next((s for s in reversed(steps) if s < step and _intact(store, s, like)), None)
        remedy = (
            "no older one is intact"
            if intact is None
            else f"step {intact} is intact, continue from it with --resume-step {intact}"
        )
        raise InputError(f"checkpoint {step} in {run.out} is damaged ({error}); {remedy}") from None
    for place in store.set_aside_after(step):
        console.print(f"kept a later checkpoint as {place}")
    return state, meta


def _same_run(run: RunConfig, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    differing = [k for k in asked if saved.get(k) != asked[k]]
    if differing:
        parts = ", ".join(f"{k} {saved.get(k)} is now {asked[k]}" for k in differing)
        raise InputError(f"the checkpoint in {run.out} is of another run: {parts}")


def _intact(store: Store, step: int, like: TrainState) -> bool:
    try:
        store.restore(step, like)
    except Damaged:
        return False
    return True
