"""The numbers of a run as TensorBoard's events, by the package `tensorboardX`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.data.extras import needed


def check_writer() -> Any:
    """The package that writes events; `InputError` without it."""
    return needed("tensorboardX", "--tensorboard", "tensorboard")


class Board:
    """Events in a folder; those of steps that a run does again are hidden by the new ones."""

    def __init__(self, folder: Path, *, after: int | None) -> None:
        first = 0 if after is None else after + 1
        self._writer = check_writer().SummaryWriter(str(folder), purge_step=first)

    def write(self, record: dict[str, Any]) -> None:
        """A scalar for each number of a record, at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, float):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
