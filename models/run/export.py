"""Write a trained model to a folder: `python -m models export --out RUN --to FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from models.data.extras import needed
from models.errors import InputError
from models.nets import exported, huggingface
from models.run.flags import Parser
from models.run.trained import trained, trained_text
from models.settings import replaced, setting


@dataclasses.dataclass(frozen=True)
class Export:
    """Settings of the command."""

    out: Path = setting(Path("runs/tiny"), "Folder of the run.")
    to: Path = setting(Path("exported"), "Folder to create.")
    format: str = setting(
        "huggingface",
        "huggingface: a folder for `transformers`; jax: a `jax.export` function, which runs without"
        " the model's code.",
        choices=("huggingface", "jax"),
    )
    dtype: str = setting("float32", "dtype of the saved weights.", choices=("float32", "bfloat16"))
    platform: tuple[str, ...] = setting(
        (),
        "Platform of the jax format: cpu, cuda, rocm or tpu; repeat the flag for several. The"
        " default is the platform of this machine.",
    )


def main(arguments: list[str]) -> int:
    """Write the model of a run's newest checkpoint to a folder."""
    parser = Parser(prog="python -m models export", description=main.__doc__)
    parser.add_settings(Export())
    asked = replaced(Export(), parser.parse(arguments), by_flag=True)
    try:
        if asked.format == "jax":
            needed("flatbuffers", "--format jax", "train")
            dtype = jnp.dtype(asked.dtype)
            run, model = trained(asked.out)
            exported.save(model, asked.to, dtype, asked.platform, run.reads())
        else:
            model = trained_text(asked.out, "--format huggingface")
            huggingface.save(model, asked.to, jnp.dtype(asked.dtype))
    except OSError as error:
        raise InputError(f"cannot write {asked.to}: {error.strerror}") from None
    print(f"wrote {asked.to}")
    return 0
