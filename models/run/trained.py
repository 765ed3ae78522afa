"""The model of a run, as its newest checkpoint has it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from flax import nnx

from models.errors import InputError
from models.nets.presets import abstract
from models.train.config import read_config
from models.train.folder import CHECKPOINTS
from models.train.state import abstract_state
from models.train.store import Damaged, Store


def trained(out: Path) -> Any:
    """The model of the run in a folder.

    Raises:
      InputError: there is no checkpoint, or it is damaged.
    """
    folder = out / CHECKPOINTS
    if not folder.is_dir():
        raise InputError(f"no checkpoints in {out}")
    with contextlib.closing(Store(folder, read_only=True)) as store:
        if not (steps := store.steps()):
            raise InputError(f"no checkpoints in {out}")
        try:
            run = read_config(store.meta(steps[-1])["config"], "the checkpoint")
            params = store.restore(steps[-1], abstract_state(run.model, run.optim)).result
        except Damaged as error:
            raise InputError(f"checkpoint {steps[-1]} in {out} is damaged ({error})") from None
    return nnx.merge(nnx.graphdef(abstract(run.model)), params)
