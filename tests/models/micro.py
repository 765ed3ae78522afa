"""A model and a run that train in a second, for the tests of this folder."""

import dataclasses
from pathlib import Path
from typing import Any

from models.nets.presets import TRAINED
from models.train.log import read_records
from models.train.optim import OptimConfig
from models.train.text import TextRun

TEXT = b"def square(x):\n    return x * x\n\n\nfor i in range(10):\n    print(square(i))\n" * 60
SIZES = {"context": 16, "width": 32, "depth": 2, "heads": 4}
SETTINGS = {**SIZES, "batch": 4, "validation-examples": 8, "warmup-steps": 4}
OPTIM = OptimConfig(steps=12, warmup_steps=4)
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
MODEL: Any = dataclasses.replace(TRAINED["tiny"], **SIZES)


def run(folder: Path, **changes: Any) -> TextRun:
    """Return a run of 12 steps in `folder`, on a text that is written there."""
    text = folder / "text"
    text.write_bytes(TEXT)
    base = TextRun(
        model=MODEL,
        optim=OPTIM,
        out=folder / "run",
        data=(str(text),),
        batch=4,
        validate_every=6,
        validation_examples=8,
        save_every=4,
    )
    return dataclasses.replace(base, **changes)


def losses(out: Path) -> list[tuple[int, float | None, float | None]]:
    """Return step, loss and validation loss of every record of a run, to compare bit for bit."""
    return [
        (r["step"], r.get("loss"), r.get("validation_bits_per_byte", r.get("validation_loss")))
        for r in read_records(out / "log.jsonl")
    ]
