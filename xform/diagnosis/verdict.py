"""The verdict on each layer, with a reason and a remedy, from its measurements.

A verdict concerns the layer itself. Some layers have abnormal numbers only because of another one,
such as the layers after a NaN or the layers before a dead layer. Their verdict is fine, and
`because` names the layer at fault.

A row is a layer, or a sum of layer results, in one iteration of the loops around it. Siblings are
rows with the same operation and shapes (`kin`). Each function that yields faults looks for one
kind.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xform.diagnosis import thresholds
from xform.diagnosis.row import LayerHealth

FINE = "fine"
VERDICTS = ("nonfinite", "dead", "saturated", "exploding", "vanishing", "shattered", FINE)
_FAN_IN = "initialize its weights with variance 1 / fan-in (2 / fan-in before a ReLU)"
_ADD_PATH = "add the block's input to its result (a residual path), as similar blocks do"
_KEEP_PATH = (
    "do not scale the block's input down before the sum, and check that the block's last layer is "
    "not zero"
)
_GUARD = "limit the operation's inputs (jnp.where on its result leaves a NaN in its gradient)"
_CHECK_BATCH = "its input has a NaN or Inf: check the batch, and operations before the layer"
_SMALLER_BLOCKS = "scale the blocks down with depth"


class _Remedy(NamedTuple):
    """What to do about a fault: at a layer, and at a sum, which has no weights and no bias."""

    layer: str
    sum: str

    def at(self, row: LayerHealth) -> str:
        """Return the remedy for a row."""
        return self.sum if row.kind == "sum" else self.layer


_REVIVE = _Remedy(
    "initialize its bias to 0, lower the learning rate, or use a leaky ReLU or GELU",
    "initialize the biases before it to 0, lower the learning rate, or use a leaky ReLU or GELU",
)
_SHRINK_INPUT = _Remedy(
    f"normalize the input of its activation, or {_FAN_IN}", "normalize it before its activation"
)
_SHRINK_RESULT = _Remedy(
    f"{_FAN_IN}, or normalize or clip its result", "normalize or clip its operands"
)
_GROW_RESULT = _Remedy(f"{_FAN_IN}, or normalize its result", "normalize its operands")


# Index of the row, verdict, reason, remedy.
Fault = tuple[int, str, str, str]
# Verdict, reason and remedy, by index of the row.
Faults = dict[int, tuple[str, str, str]]


def with_verdicts(rows: Sequence[LayerHealth]) -> list[LayerHealth]:
    """Add verdicts to rows in execution order."""
    faults: Faults = {}
    stages = (
        (_first_nonfinite,),
        (_dead_or_saturated, _unusual_gains, _missing_paths, _tiny_operands),
        (_drifting_gradients, _shattered_gradients),
    )
    for stage in stages:
        if faults:  # a fault also changes the numbers of other layers, which later stages judge
            break
        for i, verdict, reason, remedy in (fault for find in stage for fault in find(rows)):
            faults.setdefault(i, (verdict, reason, remedy))
    return [_with_verdict(rows, i, faults) for i in range(len(rows))]


def _with_verdict(rows: Sequence[LayerHealth], i: int, faults: Faults) -> LayerHealth:
    """Return row `i` with its verdict."""
    row = rows[i]
    if i in faults:
        verdict, reason, remedy = faults[i]
        return dataclasses.replace(row, verdict=verdict, reason=reason, remedy=remedy)
    because = _because(rows, i, faults)
    return dataclasses.replace(
        row, verdict=FINE, because="" if because is None else rows[because].title
    )


def _because(rows: Sequence[LayerHealth], i: int, faults: Faults) -> int | None:
    """Return the index of the layer at fault that causes abnormal numbers in row `i`, or None."""
    row = rows[i]
    if row.nonfinite or row.gradient_nonfinite:
        return next(iter(faults), None)
    if row.input == 0:
        return next((j for j in sorted(faults, reverse=True) if j < i), None)
    if row.gradient == 0:
        return next((j for j in sorted(faults) if j > i), None)
    return None


def _first_nonfinite(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find the layer with the first NaN or Inf, in the forward pass or else the backward pass."""
    forward = next((i for i, r in enumerate(rows) if r.nonfinite), None)
    backward = next((i for i in reversed(range(len(rows))) if rows[i].gradient_nonfinite), None)
    if forward is not None:
        row = rows[forward]
        reason = (
            f"{row.nonfinite:.0f} of its {row.size} results are NaN or Inf, and none in earlier "
            "layers"
        )
        given = row.input is None or math.isfinite(row.input)
        yield forward, "nonfinite", reason, _GUARD if given else _CHECK_BATCH
    elif backward is not None:
        row = rows[backward]
        elements = f"{row.gradient_nonfinite:.0f} of its {row.size} gradients"
        reason = f"{elements} are NaN or Inf, and none in later layers"
        yield backward, "nonfinite", reason, _GUARD


def _dead_or_saturated(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find layers whose activation is zero or flat for nearly all units."""
    for i, row in enumerate(rows):
        if row.input == 0:  # its zeros come from an earlier layer
            continue
        if row.dead is not None and row.dead >= thresholds.DEAD_SHARE:
            yield (
                i,
                "dead",
                f"{row.dead:.0%} of its units are zero for every example",
                _REVIVE.at(row),
            )
        elif row.saturated is not None and row.saturated >= thresholds.SATURATED_SHARE:
            reason = f"{row.saturated:.0%} of its activations have a slope near zero"
            yield i, "saturated", reason, _SHRINK_INPUT.at(row)


def _unusual_gains(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find layers whose gain is far from that of similar layers."""
    for i, gain, median, limit in _gains(rows):
        reason = f"it scales its input by {gain:.2g}"
        if not math.isnan(median):
            reason += f", similar layers by {median:.2g}"
        expected = 1.0 if math.isnan(median) else median
        if gain > limit * expected:
            yield i, "exploding", reason, _SHRINK_RESULT.at(rows[i])
        elif gain * limit < expected:
            yield i, "vanishing", reason, _GROW_RESULT.at(rows[i])


def _gains(rows: Sequence[LayerHealth]) -> Iterator[tuple[int, float, float, float]]:
    """Yield index, gain, median gain of similar layers, and largest allowed factor between both.

    If there are too few similar layers, the median is NaN. Then the gain is compared with 1.
    """
    by_kin, by_operation = (_gains_by(rows, name) for name in ("kin", "operation"))
    for i, row in enumerate(rows):
        if not row.gain:
            continue
        siblings, same_operation = by_kin[row.kin], by_operation[row.operation]
        if len(siblings) >= thresholds.MIN_SIBLINGS:
            yield i, row.gain, statistics.median(siblings), thresholds.GAIN_FACTOR
        elif len(same_operation) >= thresholds.MIN_SIBLINGS:
            median = statistics.median(same_operation)
            yield i, row.gain, median, thresholds.GAIN_FACTOR_BY_OPERATION
        else:
            yield i, row.gain, math.nan, thresholds.GAIN_FACTOR_ALONE


def _gains_by(rows: Sequence[LayerHealth], name: str) -> dict[str, list[float]]:
    """Return the gains of the rows, grouped by their attribute `name`."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.gain:
            groups.setdefault(getattr(row, name), []).append(row.gain)
    return groups


def _missing_paths(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find layers without a residual path around them, although most similar layers have one."""
    layers = [i for i, r in enumerate(rows) if r.kind == "layer"]
    bypassed = [i for i in layers if rows[i].bypassed]
    if not bypassed:
        return
    without_path: list[int] = []
    for i in layers:
        siblings = [rows[j].bypassed for j in layers if rows[j].kin == rows[i].kin]
        is_unusual = not rows[i].bypassed and 2 * sum(siblings) > len(siblings)
        if is_unusual and bypassed[0] < i < bypassed[-1]:
            without_path.append(i)
    for i in without_path:
        # Report only the last layer of a block, where the sum should be.
        later = [j for j in layers if j > i]
        if not later or later[0] not in without_path:
            reason = "it has no residual path around it, and similar layers have one"
            yield i, "vanishing", reason, _ADD_PATH


def _tiny_operands(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find sums with an operand that is nearly zero, although similar sums have no such operand."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.least is not None:
            groups.setdefault(row.kin, []).append(row.least)
    for i, row in enumerate(rows):
        if row.least is None or len(groups[row.kin]) < thresholds.MIN_SIBLINGS:
            continue
        if _in_first_iteration(rows, i):
            continue
        median = statistics.median(groups[row.kin])
        if row.least < thresholds.OPERAND_RATIO * median and not _after_zeros(rows, i):
            sizes = f"its smallest operand is {row.least:.1g} of the largest"
            reason = f"{sizes}, {median:.1g} in similar sums"
            yield i, "vanishing", reason, _KEEP_PATH


def _after_zeros(rows: Sequence[LayerHealth], i: int) -> bool:
    """Return whether the result of a layer between the previous sum and this sum is all zeros."""
    earlier = range(i - 1, -1, -1)
    branch = itertools.takewhile(lambda j: rows[j].kind == "layer", earlier)
    return any(rows[j].activation == 0 for j in branch)


def _in_first_iteration(rows: Sequence[LayerHealth], i: int) -> bool:
    """Return whether a row is in the first iteration of a loop, where the state may be zero."""
    return bool(rows[i].trip) and all(rows[j].place != rows[i].place for j in range(i))


def _shattered_gradients(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find layers where gradients of neighbouring examples are as unrelated as noise.

    Nothing is reported unless the gradients of neighbouring examples are related at the last layer.
    """
    layers = [r for r in rows if r.kind == "layer"]
    known = [r for r in layers if r.correlation is not None and r.gradient]
    if not known or (last := known[-1].correlation or 0.0) < thresholds.MIN_LAST_COSINE:
        return
    for i, row in enumerate(rows):
        if row not in known or row.correlation is None or row.noise is None:
            continue
        limit = thresholds.SHATTERED_FACTOR * row.noise
        if row.noise <= thresholds.MAX_RANDOM_COSINE and row.correlation < limit < last:
            reason = (
                f"gradients of neighbouring examples have cosine {row.correlation:.2g}, like "
                f"noise, and {last:.2g} at the last layer"
            )
            paths = "" if row.bypassed else "add a residual path around each block and "
            yield i, "shattered", reason, f"{paths}{_SMALLER_BLOCKS}, or use orthogonal weights"


def _drifting_gradients(rows: Sequence[LayerHealth]) -> Iterator[Fault]:
    """Find gradients that vanish or explode over many layers, with no single layer at fault."""
    norms = [r.gradient * math.sqrt(r.size) for r in rows]
    known = [i for i, n in enumerate(norms) if n > 0 and rows[i].kind == "layer"]
    if not known:
        return
    last, most = norms[known[-1]], 0.0
    for i in reversed(known):
        ratio = norms[i] / most if most else 1.0
        most = max(most, norms[i])
        if ratio < thresholds.VANISHED_RATIO:
            reason = f"its gradient has {ratio:.1g} times the norm of a later layer's gradient"
            paths = _SMALLER_BLOCKS if rows[i].bypassed else "add residual paths"
            yield i, "vanishing", reason, f"{_FAN_IN}, {paths}, or normalize"
        elif norms[i] > thresholds.EXPLODED_RATIO * last:
            times = f"{norms[i] / last:.1g} times"
            reason = f"its gradient has {times} the norm of the last layer's gradient"
            yield i, "exploding", reason, f"{_FAN_IN}, clip gradients, or normalize"
