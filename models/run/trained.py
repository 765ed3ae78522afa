"""Load the model of a run from its newest checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from flax import nnx

from models.errors import InputError
from models.nets.presets import abstract
from models.train.config import RunConfig
from models.train.folder import CHECKPOINTS
from models.train.kinds import read_config
from models.train.state import abstract_state
from models.train.store import Damaged, Store
from models.train.text import TextRun


def load_run(out: Path) -> tuple[RunConfig, Any]:
    """Load the settings and the model of the run in a folder.

    Raises:
      InputError: there is no checkpoint, or it is damaged.
    """
    folder = out / CHECKPOINTS
    if not folder.is_dir():
        raise InputError(f"no checkpoints in {out}: name the folder of a run")
    with contextlib.closing(Store(folder, read_only=True)) as store:
        if not (steps := store.steps()):
            raise InputError(f"no checkpoints in {out}: name the folder of a run")
        try:
            run = read_config(store.meta(steps[-1])["config"], "the checkpoint")
            result = store.restore(steps[-1], abstract_state(run.model, run.optim)).result
        except Damaged as error:
            raise InputError(
                f"checkpoint {steps[-1]} in {out} is damaged ({error}): remove it to use the one"
                " before it"
            ) from None
    return run, nnx.merge(nnx.graphdef(abstract(run.model)), result)


def load_text_model(out: Path, request: str) -> Any:
    """Load the model of a run on text.

    Args:
      out: the folder of the run.
      request: the command or option that needs the model, for the error message.

    Raises:
      InputError: there is no checkpoint, it is damaged, or the run is not on text.
    """
    run, model = load_run(out)
    if not isinstance(run, TextRun):
        raise InputError(f"{request} needs a model of text, but the run in {out} is on {run.on}")
    return model
