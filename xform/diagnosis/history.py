"""`HealthHistory`: the reports of a stream over the steps of a run."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xform.diagnosis import history_plot
from xform.diagnosis.alerts import Alert
from xform.diagnosis.records import NUMBERS, Record, read_records
from xform.terminal.notebook import Result
from xform.terminal.text import columns, shorten_place

# With more layers than this, only layers with an alert and the first and last ones are printed.
_MAX_LAYERS = 40
_HEAD = ["layer", "activation", "gradient", "grad/weight", "update/weight", "where"]
_PRINTED = ("activation", "gradient", "gradient_to_weight", "update_to_weight")


@dataclasses.dataclass(frozen=True)
class LayerHistory:
    """The numbers of one layer, in one iteration of the loops around it, over the reports.

    Attributes:
      name: title of the layer.
      kind: "layer", or "sum" for a sum of layer results.
      place: number of the layer in the program.
      where: the line of the user's code.
      numbers: for each number of `LayerHealth`, such as "activation", its value in each report. It
        is NaN where the layer has no such number, or one that is not finite.
    """

    name: str
    kind: str
    place: int
    where: str
    numbers: dict[str, tuple[float, ...]]


@dataclasses.dataclass(frozen=True, repr=False)
class HealthHistory(Result):
    """The reports of a `HealthStream`. It prints the first and last numbers, and plots all.

    Attributes:
      steps: number of the step of each report.
      losses: the loss in each report; NaN if it was not finite.
      layers: the layers in execution order.
      alerts: all alerts.

    >>> import tempfile
    >>> from xform.diagnosis import Diagnosis, HealthHistory, HealthStream
    >>> loss = lambda w, x: jnp.sum((x @ w) ** 2)
    >>> w, x = jnp.eye(4), jnp.ones((2, 4))
    >>> diagnosis = Diagnosis(loss, w, x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stream = HealthStream(diagnosis, f"{folder}/health.jsonl", every=10)
    ...     for i, scale in ((0, 1), (10, 2), (20, 2), (30, 90)):
    ...         value, grads, readings = diagnosis.value_and_grad(scale * w, x)
    ...         alerts = stream.write(i, value, readings)
    ...     history = HealthHistory.load(f"{folder}/health.jsonl")
    step 30: growing activation at w (...): its activation is 90, 45 times its median before ...
    >>> history.layers[0].numbers["activation"]
    (1.0, 2.0, 2.0, 90.0)
    """

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    layers: tuple[LayerHistory, ...]
    alerts: tuple[Alert, ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> HealthHistory:
        """Load the JSON lines of a `HealthStream`. `xform.load` reads a file by `save`.

        Raises:
          WrongArgument: the file cannot be read, or is not one of a stream.
        """
        records = read_records(Path(path))
        # A layer in a branch that did not run is missing in some reports. The longest report gives
        # the order of the layers.
        by_key = [{(r["place"], r["layer"]): r for r in record["rows"]} for record in records]
        first: dict[Any, Record] = {}
        for rows in by_key:
            first = rows | first if len(rows) > len(first) else first | rows
        layers = [
            LayerHistory(row["layer"], row["kind"], row["place"], row["where"],
                         {n: numbers for n in NUMBERS if (numbers := _series(by_key, key, n))})
            for key, row in first.items()
        ]  # fmt: skip
        alerts = [
            Alert(**alert | {name: tuple(alert[name]) for name in ("layers", "places")})
            for record in records
            for alert in record["alerts"]
        ]
        losses = tuple(_or_nan(record["loss"]) for record in records)
        return cls(tuple(r["step"] for r in records), losses, tuple(layers), tuple(alerts))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw loss, activations, gradients and updates of all layers over the steps, with alerts.

        Raises:
          MissingExtra: matplotlib is not installed.
          WrongArgument: the file name does not end in a supported picture format.
          FileNotWritten: the file cannot be written.
        """
        curves = {n: [x.numbers[n] for x in self.layers if x.kind == "layer" and n in x.numbers]
                  for n in _PRINTED}  # fmt: skip
        marks = [(alert.step, f"{alert.cause}: {alert.layer}") for alert in self.alerts]
        history_plot.draw(path, self.heading(), self.steps, self.losses, curves, marks)

    def heading(self) -> str:
        """Return one line: the steps, the loss and the number of alerts."""
        if not self.steps:
            return "no health report"
        n, count = len(self.steps), len(self.alerts)
        reports = f"{n} report{'s' if n > 1 else ''}"
        alerts = f"{count or 'no'} alert{'' if count == 1 else 's'}"
        steps = f"steps {self.steps[0]} to {self.steps[-1]}"
        return f"{reports}, {steps}, loss {_span(self.losses)}, {alerts}"

    def __str__(self) -> str:
        layers = [layer for layer in self.layers if layer.kind == "layer"]
        alerted = {place for alert in self.alerts for place in alert.places}
        few, last = len(layers) <= _MAX_LAYERS, len(layers) - 3
        shown = [layer for i, layer in enumerate(layers)
                 if few or i < 3 or i >= last or layer.place in alerted]  # fmt: skip
        cells = [[layer.name, *(_span(layer.numbers.get(n, ())) for n in _PRINTED),
                  shorten_place(layer.where)] for layer in shown]  # fmt: skip
        omitted = len(layers) - len(shown)
        more = [f"and {omitted} more layers without an alert"] if omitted else []
        table = columns([_HEAD, *cells], right=range(1, len(_HEAD) - 1))
        return "\n".join([self.heading(), table, *more, *map(str, self.alerts)])


def _series(by_key: Sequence[dict[Any, Record]], key: Any, name: str) -> tuple[float, ...]:
    """Return a number of one layer in all reports; () if no report has it."""
    values = [rows.get(key, {}).get(name) for rows in by_key]
    return () if all(x is None for x in values) else tuple(map(_or_nan, values))


def _or_nan(x: float | None) -> float:
    return math.nan if x is None else x


def _span(values: Sequence[float]) -> str:
    """Return the first and the last of some numbers as text."""
    if not values:
        return ""
    return f"{values[0]:.2g}" if len(values) == 1 else f"{values[0]:.2g} to {values[-1]:.2g}"
