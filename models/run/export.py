"""Write a trained model to a folder: `python -m models export --run RUN --to FOLDER`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from models import program
from models.data.extras import optional_module
from models.errors import InputError
from models.nets import exported, huggingface
from models.run.flags import Parser
from models.run.trained import load_run, load_text_model
from models.settings import replaced, setting


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Settings of the command `export`."""

    run: Path = setting(Path("runs/tiny"), f"Folder of a run, the --out of `{program.NAME} train`.")
    to: Path = setting(Path("exported"), "Folder to create.")
    format: str = setting(
        "huggingface",
        "huggingface: a folder that `transformers` can load; jax: a function serialized by"
        " `jax.export`, which runs without the model's code.",
        choices=("huggingface", "jax"),
    )
    dtype: str = setting("float32", "dtype of the saved weights.", choices=("float32", "bfloat16"))
    platform: tuple[str, ...] = setting(
        (),
        "With --format jax, the platform that the function runs on: cpu, cuda, rocm or tpu; repeat"
        " the flag for several. The default is the platform of this machine.",
    )


def main(arguments: list[str]) -> int:
    """Write the model of a run's newest checkpoint to a folder."""
    parser = Parser(prog=f"{program.NAME} export", description=main.__doc__)
    parser.add_settings(ExportOptions())
    options = replaced(ExportOptions(), parser.parse(arguments), by_flag=True)
    try:
        if options.format == "jax":
            optional_module("flatbuffers", "--format jax", "train")
            dtype = jnp.dtype(options.dtype)
            run, model = load_run(options.run)
            exported.save(model, options.to, dtype, options.platform, run.reads())
        else:
            model = load_text_model(options.run, "--format huggingface")
            huggingface.save(model, options.to, jnp.dtype(options.dtype))
    except OSError as error:
        raise InputError(f"cannot write {options.to}: {error.strerror}") from None
    print(f"wrote {options.to}")
    return 0
