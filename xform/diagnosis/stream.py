"""`HealthStream`: health reports every few steps of a long run."""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from xform.diagnosis.alerts import Alert, AlertLimits, Sizes, find_alerts, sizes_of
from xform.diagnosis.diagnosis import Diagnosis, Readings
from xform.diagnosis.records import append_record, keep_records, record_of
from xform.diagnosis.row import LayerHealth
from xform.errors import WrongArgument

# The numbers that go to TensorBoard.
_SCALARS = ("activation", "gradient", "gradient_to_weight", "update_to_weight", "dead", "saturated")


class Board(Protocol):
    """A writer of TensorBoard events, such as `tensorboardX.SummaryWriter`."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any:
        """Write a number."""

    def add_text(self, tag: str, text: str, step: int, /) -> Any:
        """Write a text."""


class HealthStream:
    """Write a health report every few steps of a training loop, and alert if a layer needs a look.

    The readings come from the step itself: a second compiled step, which uses
    `Diagnosis.value_and_grad` in place of `xform.value_and_grad`, and which the loop runs if `due`
    says so. All other steps stay as they are.

    Each report is one line of JSON in a file, with the activation, gradient, weight and update of
    each layer. `HealthHistory.load` reads the file and plots it over the steps.

    Args:
      diagnosis: the diagnosis of the loss.
      path: the JSON-lines file; None writes no file. An existing file is replaced, or continued
        with `after`.
      every: number of steps between reports.
      limits: the numbers beyond which a layer causes an alert; None: the defaults of `AlertLimits`.
        A verdict other than fine is always an alert.
      board: a writer of TensorBoard events with `add_scalar(tag, value, step)` and
        `add_text(tag, text, step)`, such as `SummaryWriter` of tensorboardX or PyTorch.
      on_alert: called with each `Alert`. There is one for each cause and layer, however long it
        lasts. Iterations of a loop count as one layer. It may raise an error to end the run.
      after: in a resumed run the number of the last step before. Reports of later steps are removed
        from the file, and the alerts before it are not repeated.

    Raises:
      WrongArgument: `every` is not positive, or the file to continue is not one of a stream.
      FileNotWritten: the file cannot be written.

    Cost: the step with readings takes 1.0 to 1.3 times as long as one without, and the report some
    milliseconds on the host. See experiments/health.

    >>> import functools, tempfile
    >>> from xform.diagnosis import Diagnosis, HealthHistory, HealthStream
    >>> def loss(ws, x):
    ...     return jnp.mean((jax.nn.relu(x @ ws[0]) @ ws[1]) ** 2)
    >>> ws, x = [jnp.eye(8), jnp.ones((8, 1))], jnp.ones((4, 8))
    >>> diagnosis = Diagnosis(loss, ws, x)
    >>> @functools.partial(jax.jit, static_argnames="measure")
    ... def step(ws, x, measure):
    ...     gradient = diagnosis.value_and_grad if measure else xform.value_and_grad(loss)
    ...     value, grads, *readings = gradient(ws, x)
    ...     after = jax.tree.map(lambda w, g: w - 1e-5 * g, ws, grads)
    ...     return after, value, [diagnosis.updated(r, ws, after) for r in readings]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stream = HealthStream(diagnosis, f"{folder}/health.jsonl", every=50)
    ...     for i in range(101):
    ...         ws, value, readings = step(ws, x, measure=stream.due(i))
    ...         if stream.due(i):
    ...             alerts = stream.write(i, value, *readings)
    ...     history = HealthHistory.load(f"{folder}/health.jsonl")
    >>> history.steps
    (0, 50, 100)
    >>> [layer.name for layer in history.layers]
    ['ws.0', 'ws.1']
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 50,
        limits: AlertLimits | None = None,
        board: Board | None = None,
        on_alert: Callable[[Alert], object] = print,
        after: int | None = None,
    ) -> None:
        if every < 1:
            raise WrongArgument(
                f"HealthStream with every={every}", "every must be at least 1", "",
                "pass the number of steps between reports",
            )  # fmt: skip
        self._diagnosis, self._every, self._limits = diagnosis, every, limits or AlertLimits()
        self._board, self._on_alert = board, on_alert
        self._path = None if path is None else Path(path)
        self._known: set[tuple[str, int]] = set()
        self._earlier: collections.deque[Sizes] = collections.deque(maxlen=self._limits.window)
        for record in [] if self._path is None else keep_records(self._path, after):
            self._remember(record)

    def due(self, step: int) -> bool:
        """Return whether step number `step` needs readings."""
        return step % self._every == 0

    def write(self, step: int, loss: Any, readings: Readings) -> list[Alert]:
        """Write the report of a step. This cannot be jitted.

        Args:
          step: number of the step.
          loss: the loss of the step, a scalar.
          readings: what `Diagnosis.value_and_grad` or `Diagnosis.updated` returned.

        Returns:
          The new alerts, which `on_alert` has got too.

        Raises:
          FileNotWritten: the file cannot be written.
        """
        report = self._diagnosis.report([loss], readings)
        rows, (value,) = report.rows, report.losses
        alerts = find_alerts(step, rows, self._earlier, self._limits, self._known)
        self._earlier.append(sizes_of(rows))
        if self._path is not None:
            append_record(self._path, record_of(step, value, rows, alerts))
        if self._board is not None:
            _write_events(self._board, step, rows, alerts)
        for alert in alerts:
            self._on_alert(alert)
        return alerts

    def _remember(self, record: dict[str, Any]) -> None:
        """Take the sizes and alerts of an earlier report into account."""
        rows = [row for row in record["rows"] if row["activation"] and row["gradient"]]
        self._earlier.append(
            {(r["place"], r["layer"]): (r["activation"], r["gradient"]) for r in rows}
        )
        for alert in record["alerts"]:
            self._known.update((alert["cause"], place) for place in alert["places"])


def _write_events(board: Board, step: int, rows: Sequence[LayerHealth], alerts: Sequence[Alert]
                  ) -> None:  # fmt: skip
    """Write the numbers of each layer as scalars, and the alerts as text."""
    for row in rows:
        if row.kind != "layer":
            continue
        title = re.sub(r"[^-\w.]+", ".", row.title).strip(".")  # TensorBoard allows few characters
        for name in _SCALARS:
            if (value := getattr(row, name)) is not None:
                board.add_scalar(f"health/{name}/{title}", value, step)
    for alert in alerts:
        board.add_text("health/alerts", str(alert), step)
