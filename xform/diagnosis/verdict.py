"""What is wrong with a layer, by its numbers: a verdict, its reason, and a remedy.

A verdict is about the layer itself. A layer that only suffers from another, as all do behind a NaN
and before a dead layer, is fine, and says because of which one it has such numbers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from xform.diagnosis import thresholds as at
from xform.diagnosis.row import LayerHealth

FINE = "fine"
VERDICTS = ("nonfinite", "dead", "saturated", "exploding", "vanishing", "shattered", FINE)
_FAN_IN = "draw its weights with variance 1 / fan-in (2 / fan-in before a ReLU)"
_PATH = "add what the block reads to what it makes, as the blocks like it do"
_GUARD = "bound what the operation reads before it, rather than choose a result behind it"
_ALIVE = "start its bias at 0, lower the learning rate, or use a leaky ReLU or GELU"
_SMALLER = f"normalize what it activates, or {_FAN_IN}"
_SMOOTHER = "lead a path around each block, scaled down with depth, or draw orthogonal weights"


def judged(rows: Sequence[LayerHealth]) -> list[LayerHealth]:
    """The rows, in the order in which they run, with verdicts."""
    faults: dict[int, tuple[str, str, str]] = {}
    for group in ((_nonfinite,), (_units, _scales, _paths, _zeroed), (_drifts, _shattered)):
        if faults:  # they change the numbers that the next would judge, in other layers too
            break
        for i, *words in (fault for find in group for fault in find(rows)):
            faults.setdefault(i, (words[0], words[1], words[2]))
    return [_with(rows, i, faults) for i in range(len(rows))]


Fault = tuple[int, str, str, str]
Faults = dict[int, tuple[str, str, str]]


def _with(rows: Sequence[LayerHealth], i: int, faults: Faults) -> LayerHealth:
    row = rows[i]
    if i in faults:
        verdict, reason, remedy = faults[i]
        return dataclasses.replace(row, verdict=verdict, reason=reason, remedy=remedy)
    because = _because(rows, i, faults)
    return dataclasses.replace(
        row, verdict=FINE, because="" if because is None else rows[because].title
    )


def _because(rows: Sequence[LayerHealth], i: int, faults: Faults) -> int | None:
    """The faulty layer from which a layer has numbers that are out of order."""
    row = rows[i]
    if row.nonfinite or row.gradient_nonfinite:
        return next(iter(faults), None)
    if row.input == 0:
        return next((j for j in sorted(faults, reverse=True) if j < i), None)
    if row.gradient == 0:
        return next((j for j in sorted(faults) if j > i), None)
    return None


def _nonfinite(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    forward = next((i for i, r in enumerate(rows) if r.nonfinite), None)
    backward = next((i for i in reversed(range(len(rows))) if rows[i].gradient_nonfinite), None)
    if forward is not None:
        few = f"{rows[forward].nonfinite:.0f} of its {rows[forward].size} results"
        yield forward, "nonfinite", f"{few} are NaN or Inf, and none before", _GUARD
    elif backward is not None:
        few = f"{rows[backward].gradient_nonfinite:.0f} of its {rows[backward].size} gradients"
        yield backward, "nonfinite", f"{few} are NaN or Inf, and none of later layers", _GUARD


def _units(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    for i, row in enumerate(rows):
        if row.input == 0:  # then what it makes is no fault of its own
            continue
        if row.dead is not None and row.dead >= at.DEAD:
            yield i, "dead", f"{row.dead:.0%} of its units are zero for every example", _ALIVE
        elif row.saturated is not None and row.saturated >= at.SATURATED:
            yield i, "saturated", f"{row.saturated:.0%} of its activations are flat", _SMALLER


def _scales(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    for i, gain, usual, limit in _gains(rows):
        words = f"its result is {gain:.2g} times what it reads"
        beside = "" if math.isnan(usual) else f", {usual:.2g} in layers like it"
        middle = 1.0 if math.isnan(usual) else usual
        if gain > limit * middle:
            yield i, "exploding", words + beside, _FAN_IN + ", or normalize or clip its result"
        elif gain * limit < middle:
            yield i, "vanishing", words + beside, _FAN_IN + ", or normalize its result"


def _gains(rows: Sequence[LayerHealth]) -> Iterator[tuple[int, float, float, float]]:
    """Of each layer its result to what it reads, what is usual, and how far it may be from that."""
    kin, cousins = (_grouped(rows, name) for name in ("kin", "operation"))
    for i, row in enumerate(rows):
        if not row.gain:
            continue
        if len(kin[row.kin]) >= at.SIBLINGS:
            yield i, row.gain, statistics.median(kin[row.kin]), at.SCALE
        elif len(cousins[row.operation]) >= at.SIBLINGS:
            yield i, row.gain, statistics.median(cousins[row.operation]), at.SCALE_COUSINS
        else:
            yield i, row.gain, math.nan, at.SCALE_ALONE


def _grouped(rows: Sequence[LayerHealth], name: str) -> dict[str, list[float]]:
    """The gains of rows that have something in common."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.gain:
            groups.setdefault(getattr(row, name), []).append(row.gain)
    return groups


def _paths(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Layers around which no path leads, as it does around most like them."""
    layers = [i for i, r in enumerate(rows) if r.kind == "layer"]
    around = [i for i in layers if rows[i].bypassed]
    if not around:
        return
    alone: list[int] = []
    for i in layers:
        kin = [rows[j].bypassed for j in layers if rows[j].kin == rows[i].kin]
        few = not rows[i].bypassed and 2 * sum(kin) > len(kin)
        if few and around[0] < i < around[-1]:
            alone.append(i)
    for i in alone:
        # Of the layers of one block the last is where the sum should be.
        later = [j for j in layers if j > i]
        if not later or later[0] not in alone:
            reason = "all that flows through the model goes through it; a path leads around others"
            yield i, "vanishing", reason, _PATH


def _zeroed(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Sums of which one operand is as good as zero, as it is not in those like them."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.least is not None:
            groups.setdefault(row.kin, []).append(row.least)
    for i, row in enumerate(rows):
        if row.least is None or len(groups[row.kin]) < at.SIBLINGS or _starts(rows, i):
            continue
        usual = statistics.median(groups[row.kin])
        if row.least < at.LEAST * usual and not _silent(rows, i):
            reason = (
                f"of what it adds, one is {row.least:.1g} of the other, {usual:.1g} in its like"
            )
            yield i, "vanishing", reason, _PATH


def _silent(rows: Sequence[LayerHealth], i: int) -> bool:
    """Whether a layer since the last sum makes only zeros: then that is why."""
    since = range(i - 1, -1, -1)
    branch = itertools.takewhile(lambda j: rows[j].kind == "layer", since)
    return any(rows[j].activation == 0 for j in branch)


def _starts(rows: Sequence[LayerHealth], i: int) -> bool:
    """Whether a sum is that of a loop's first step, in which a state may be zero."""
    return bool(rows[i].trip) and all(rows[j].place != rows[i].place for j in range(i))


def _shattered(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    layers = [r for r in rows if r.kind == "layer"]
    known = [r for r in layers if r.correlation is not None and r.gradient]
    if not known or (top := known[-1].correlation or 0.0) < at.TOGETHER:
        return
    for i, row in enumerate(rows):
        if row not in known or row.correlation is None or row.noise is None:
            continue
        if row.noise <= at.CHANCE and row.correlation < at.SHATTERED * row.noise < top:
            noise = f"cosine {row.correlation:.2g}, as noise has, and {top:.2g} at the end"
            yield i, "shattered", f"gradients of neighbours have {noise}", _SMOOTHER


def _drifts(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Gradients that are lost, or grow, over many layers of which none is at fault alone."""
    norms = [r.gradient * math.sqrt(r.size) for r in rows]
    known = [i for i, n in enumerate(norms) if n > 0 and rows[i].kind == "layer"]
    if not known:
        return
    last, most = norms[known[-1]], 0.0
    for i in reversed(known):
        ratio = norms[i] / most if most else 1.0
        most = max(most, norms[i])
        if ratio < at.VANISHED:
            reason = f"its gradient is {ratio:.1g} of that of a later layer"
            yield i, "vanishing", reason, f"{_FAN_IN}, lead paths around layers, or normalize"
        elif norms[i] > at.EXPLODED * last:
            reason = f"its gradient is {norms[i] / last:.1g} times that of the last layer"
            yield i, "exploding", reason, f"{_FAN_IN}, clip gradients, or normalize"
