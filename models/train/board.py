"""Write the numbers of a run as TensorBoard events, with the package `tensorboardX`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from models.data.extras import optional_module


def check_writer() -> Any:
    """Import and return the package that writes events; `InputError` if it is not installed."""
    return optional_module("tensorboardX", "--tensorboard", "tensorboard")


class Board:
    """A writer of TensorBoard events.

    In a resumed run, events that an earlier process wrote for steps later than `after` are hidden.

    Attributes:
      events: the writer of the package.
    """

    def __init__(self, folder: Path, *, after: int | None) -> None:
        first = 0 if after is None else after + 1
        self.events = check_writer().SummaryWriter(str(folder), purge_step=first)

    def write(self, record: dict[str, Any]) -> None:
        """Write each float of a record as a scalar at its step."""
        for name, value in record.items():
            if name != "step" and isinstance(value, float):
                self.events.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write pending events and close the file."""
        self.events.close()
