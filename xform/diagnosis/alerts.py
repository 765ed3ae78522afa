"""Alerts of a long run: layers that are at fault, or whose numbers leave their limits."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from xform.diagnosis.row import LayerHealth
from xform.terminal.text import shorten_place

# Place and title: a layer in one iteration of the loops around it.
RowKey = tuple[int, str]
# Root mean squares of a layer's result and of its gradient, by layer, in one report.
Sizes = Mapping[RowKey, tuple[float, float]]


# With fewer reports before, no size is usual: many activations grow at the start of training.
_LEAST_REPORTS = 3
_CLIP = "lower the learning rate, clip gradients, or skip updates that are not finite"


@dataclasses.dataclass(frozen=True)
class AlertLimits:
    """Limits of the numbers of a layer. A stream alerts if a layer leaves them. None: no limit.

    The defaults lie above the largest values of ten perceptrons that train; see
    experiments/health.

    Attributes:
      largest_update: largest norm of the update of a layer's weights, divided by that of the
        weights.
      smallest_update: the smallest one. Without a limit by default, because schedules that end at 0
        and frozen layers have none.
      activation_growth: largest factor between the root mean square of a layer's result and its
        median in the reports before.
      gradient_growth: the same for the loss's gradient with respect to the result.
      window: number of reports in the medians.
    """

    largest_update: float | None = 0.5
    smallest_update: float | None = None
    activation_growth: float | None = 30.0
    gradient_growth: float | None = 1000.0
    window: int = 10


@dataclasses.dataclass(frozen=True)
class Alert:
    """One cause, at one or several layers. It prints as a line of text.

    Attributes:
      step: number of the step.
      cause: a verdict, such as "dead", or "large update", "small update", "growing activation" or
        "growing gradient".
      layers: titles of all layers with this cause. The first one is explained: the first in
        execution order, or for a limit the one furthest beyond it.
      places: the different `LayerHealth.place` of these layers.
      where: the line of the user's code that makes the layer.
      reason, remedy: explanation, with the numbers.
    """

    step: int
    cause: str
    layers: tuple[str, ...]
    places: tuple[int, ...]
    where: str
    reason: str
    remedy: str

    @property
    def layer(self) -> str:
        """Title of the layer that is explained."""
        return self.layers[0]

    def __str__(self) -> str:
        others = f" and {len(self.layers) - 1} more" if len(self.layers) > 1 else ""
        place = f" ({where})" if (where := shorten_place(self.where)) else ""
        return (
            f"step {self.step}: {self.cause} at {self.layer}{others}{place}: {self.reason}; "
            f"{self.remedy}"
        )


@dataclasses.dataclass(frozen=True)
class _Finding:
    """A cause at one layer. `excess` orders the layers with the same cause, the worst first."""

    cause: str
    row: LayerHealth
    reason: str
    remedy: str
    excess: float = 0.0


def key_of(row: LayerHealth) -> RowKey:
    """Return the key of a layer in one iteration, the same in all reports of a loss."""
    return row.place, row.title


def sizes_of(rows: Sequence[LayerHealth]) -> Sizes:
    """Return the sizes of all layers in a report."""
    return {key_of(row): (row.activation, row.gradient) for row in rows}


def find_alerts(step: int, rows: Sequence[LayerHealth], earlier: Sequence[Sizes],
                limits: AlertLimits, known: set[tuple[str, int]]) -> list[Alert]:  # fmt: skip
    """Return one alert for each cause that layers have for the first time.

    Args:
      step: number of the step.
      rows: the layers, with verdicts.
      earlier: sizes in the reports before.
      limits: the limits.
      known: cause and place of what earlier alerts were about. New ones are added to it.
    """
    by_cause: dict[str, list[_Finding]] = {}
    for found in (*_at_fault(rows), *_beyond_limits(rows, earlier, limits)):
        if (found.cause, found.row.place) not in known:
            by_cause.setdefault(found.cause, []).append(found)
    alerts: list[Alert] = []
    for cause, all_found in by_cause.items():
        worst = max(all_found, key=lambda found: found.excess)  # the first of several equal ones
        layers = tuple(dict.fromkeys(f.row.title for f in (worst, *all_found)))
        places = tuple(dict.fromkeys(f.row.place for f in all_found))
        known.update((cause, place) for place in places)
        where, reason, remedy = worst.row.where, worst.reason, worst.remedy
        alerts.append(Alert(step, cause, layers, places, where, reason, remedy))
    return alerts


def _at_fault(rows: Sequence[LayerHealth]) -> Iterator[_Finding]:
    for row in rows:
        if row.weight is not None and not math.isfinite(row.weight):
            yield _Finding("nonfinite", row, "its weights are NaN or Inf", _CLIP)
        elif row.verdict != "fine":
            yield _Finding(row.verdict, row, row.reason, row.remedy)


def _beyond_limits(rows: Sequence[LayerHealth], earlier: Sequence[Sizes], limits: AlertLimits
                   ) -> Iterator[_Finding]:  # fmt: skip
    """Find layers beyond a limit. Layers whose numbers another layer explains are left out."""
    for row in rows:
        if row.verdict != "fine" or row.because:
            continue
        yield from _updates(row, limits)
        before = [sizes[key] for sizes in earlier if (key := key_of(row)) in sizes]
        if len(before) < min(_LEAST_REPORTS, limits.window):
            continue
        for i, (name, now, limit, remedy) in enumerate((
            ("activation", row.activation, limits.activation_growth,
             "check the data, lower the learning rate, or normalize its result"),
            ("gradient", row.gradient, limits.gradient_growth,
             "check the data, lower the learning rate, or clip gradients"),
        )):  # fmt: skip
            usual = statistics.median(sizes[i] for sizes in before)
            if limit is not None and usual > 0 and now > limit * usual:
                times = now / usual
                reason = f"its {name} is {now:.2g}, {times:.2g} times its median before"
                yield _Finding(f"growing {name}", row, f"{reason} (limit {limit:g})", remedy, times)


def _updates(row: LayerHealth, limits: AlertLimits) -> Iterator[_Finding]:
    ratio, most, least = row.update_to_weight, limits.largest_update, limits.smallest_update
    if ratio is None:
        return
    reason = f"its update is {ratio:.2g} of its weights"
    if most is not None and ratio > most:
        remedy = "lower the learning rate, or warm it up"
        yield _Finding("large update", row, f"{reason} (limit {most:g})", remedy, ratio)
    if least is not None and ratio < least:
        remedy = "raise the learning rate, or check that its gradient arrives"
        yield _Finding("small update", row, f"{reason} (limit {least:g})", remedy, -ratio)
