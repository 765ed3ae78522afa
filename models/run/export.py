"""A trained model as a Hugging Face folder: `python -m models export --out RUN --to FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from models.errors import InputError
from models.nets.huggingface import save
from models.run.flags import Parser
from models.run.trained import trained
from models.settings import replaced, setting


@dataclasses.dataclass(frozen=True)
class Export:
    """What goes where."""

    out: Path = setting(Path("runs/tiny"), "Folder of the run.")
    to: Path = setting(Path("exported"), "Folder to make, which `transformers` reads.")
    dtype: str = setting("float32", "Of the weights there.", choices=("float32", "bfloat16"))


def main(arguments: list[str]) -> int:
    """Write the model of a run's newest checkpoint as config.json and safetensors."""
    parser = Parser(prog="python -m models export", description=main.__doc__)
    parser.add_settings(Export())
    asked = replaced(Export(), parser.parse(arguments), by_flag=True)
    try:
        save(trained(asked.out), asked.to, jnp.dtype(asked.dtype))
    except OSError as error:
        raise InputError(f"cannot write {asked.to}: {error.strerror}") from None
    print(f"wrote {asked.to}")
    return 0
