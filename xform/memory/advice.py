"""What would take fewer bytes, with numbers."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any, NamedTuple

from xform.memory.attribute import Row
from xform.memory.updates import waiting
from xform.text import human_bytes

# What is a smaller part of the whole is not worth a line.
_PART = 0.02
_MOST = 3
# What grows with the batch, and what does not.
_MADE = ("activation", "recompute", "temporary")
_OF_BATCH = ("argument", *_MADE, "output")
_ARGUMENTS = ("argument", "parameter", "optimizer state")
_STATE = ("parameter", "optimizer state", "gradient")
# A matrix with so many more rows than columns, or the other way, has a row for each class: so many
# of them at least. One is at each end of a network; more are of its layers.
_TALL, _CLASSES, _ENDS = 4, 512, 2
# In how many parts a loss is thought of, and a batch whose gradients are added up.
_PARTS, _SLICES = 8, 4
# Over how many devices a state is thought of.
_DEVICES = (2, 4, 8, 16, 32)


class Step(NamedTuple):
    """Something that can be changed, and the bytes at the peak that it spares.

    `sure` says that all of them go: of what a policy spares only a plan knows.
    """

    bytes: int
    text: str
    sure: bool = True


def advice(report: Any) -> list[str]:
    """What to change so that a function takes fewer bytes; `report` is its `MemoryReport`.

    All bytes are those of this program's buffers at its peak; what the compiler makes of a change
    only it knows. Where the program is over its device, first comes what spares that much alone,
    the cheapest for the user first: donation, sharding, batch, dtype, policy. Otherwise what spares
    most comes first.
    """
    kinds = (_donations, _whole, _spread, _batch, _slices, _applied, _copies, _logits, _wide,
             _activations, _constants)  # fmt: skip
    steps = [step for kind in kinds for step in kind(report)]
    steps = [s for s in steps if s.bytes and s.bytes >= _PART * report.total_bytes]
    over = report.compilation.over_bytes or 0
    enough = [s for s in steps if over and s.sure and s.bytes >= over]
    rest = sorted((s for s in steps if s not in enough), key=lambda s: -s.bytes)
    return [*(f"{s.text}: that may be enough, it is over by {human_bytes(over)}" for s in enough),
            *(s.text for s in rest)]  # fmt: skip


def _donations(report: Any) -> Iterator[Step]:
    """Arguments whose memory an output of their type could take."""
    outputs = collections.Counter(
        (r.dtype, r.shape) for r in report.peak if r.category in ("output", "gradient") and r.output
    )
    spared, names = 0, list[str]()
    for row in report.peak:
        if row.category in _ARGUMENTS and not row.output and outputs[row.dtype, row.shape]:
            outputs[row.dtype, row.shape] -= 1
            spared += row.bytes
            names.append(row.name)
    if names:
        yield Step(
            spared,
            f"donate {_several(names)} (donate_argnums), if nothing needs it afterwards: outputs "
            f"of the same type take that memory, up to {human_bytes(spared)} less",
        )


def _copies(report: Any) -> Iterator[Step]:
    """Values that are there in a second dtype."""
    rows = [r for r in report.peak if r.operation == "convert_element_type"]
    if rows:
        size = sum(r.bytes for r in rows)
        yield Step(size, f"{human_bytes(size)} are copies in another dtype, at {_places(rows)}: "
                   "keep the values in the dtype they are used in, or convert them "
                   "later")  # fmt: skip


def _logits(report: Any) -> Iterator[Step]:
    """Values with a number for each class: a loss can make them for a few positions at a time."""
    kinds = ("argument", "parameter")
    shapes = (r.shape for r in report.peak if r.category in kinds and len(r.shape) == 2)
    matrices = collections.Counter(tuple(sorted(shape)) for shape in shapes)
    tall = (n for (k, n), count in matrices.items()
            if count <= _ENDS and n >= max(_TALL * k, _CLASSES))  # fmt: skip
    if not (classes := max(tall, default=0)):
        return
    rows = [
        r for r in report.peak
        if r.category in _MADE
        and r.shape[-1:] == (classes,) and tuple(sorted(r.shape)) not in matrices
    ]  # fmt: skip
    size = sum(r.bytes for r in rows)
    less = size - size // _PARTS
    yield Step(
        less,
        f"{human_bytes(size)} have a number for each of {classes} classes (logits), at "
        f"{_places(rows)}: take the loss of an {_PARTS}th of the positions at a time, in a "
        f"jax.lax.scan over xform.remat of it, and {human_bytes(less)} less are there at once",
        sure=False,
    )


def _wide(report: Any) -> Iterator[Step]:
    """Activations in float32."""
    rows = [r for r in report.peak if r.category == "activation" and r.dtype == "f32"]
    size = sum(r.bytes for r in rows) // 2
    yield Step(
        size,
        f"activations of {human_bytes(2 * size)} are float32, most at {_places(rows)}: in bfloat16 "
        f"they take {human_bytes(size)} less",
    )


def _batch(report: Any) -> Iterator[Step]:
    """What has the batch in its shape, if the batch can be halved."""
    n = _batch_size(report)
    if n > 1 and n % 2 == 0:
        rows = [r for r in report.peak if r.category in _OF_BATCH and n in r.shape]
        size = sum(r.bytes for r in rows) // 2
        yield Step(
            size,
            f"half the batch, {n // 2} for {n}, takes {human_bytes(size)} less: half of what has "
            "it in its shape",
        )


def _slices(report: Any) -> Iterator[Step]:
    """The same batch in slices, one after another, of which the gradients are added up."""
    n, derived = _batch_size(report), _derived(report)
    if n < _SLICES or n % _SLICES or not derived:
        return
    made = [r for r in report.peak if r.category in _MADE and n in r.shape]
    size = sum(r.bytes for r in made)
    total = sum(r.bytes for r in report.peak if r.category in _ARGUMENTS and r.shape in derived)
    there = sum(r.bytes for r in report.peak if r.category == "gradient")
    beside = max(0, total - there)
    less = size - size // _SLICES - beside
    yield Step(
        less,
        f"the batch in {_SLICES} slices, in a jax.lax.scan that adds up their gradients, takes "
        f"{human_bytes(less)} less, where the loss is a mean over it: {human_bytes(size)} are then "
        f"made for {n // _SLICES} of {n} at a time",
    )


def _applied(report: Any) -> Iterator[Step]:
    """Gradients that wait for each other before they are applied."""
    if found := waiting(report):
        size, at = sum(r.bytes for r in found.rows), f", at {found.where}" if found.where else ""
        yield Step(
            found.spared,
            f"{human_bytes(size)} of gradients wait for a number that is made of all of them (a "
            f"norm, or whether they are finite){at}: with one for each, as of "
            "optax.clip_by_block_rms, a gradient is applied when it is made, and "
            f"{human_bytes(found.spared)} less are there at once",
            sure=False,
        )


def _batch_size(report: Any) -> int:
    """The first size of the first argument with several that no derivative is taken of; or 0."""
    inputs = [r for r in report.peak if r.category == "argument" and r.shape]
    derived = _derived(report)
    sizes = (n for r in inputs if r.shape not in derived for n in r.shape[:-1] if n > 1)
    return next(sizes, 0)


def _derived(report: Any) -> set[tuple[int, ...]]:
    """The shapes of gradients."""
    return {r.shape for r in report.buffers if r.category == "gradient"}


def _whole(report: Any) -> Iterator[Step]:
    """Arguments that every device has all of."""
    if report.compilation.devices == 1:
        return
    rows = [r for r in report.peak if (r.dtype, r.shape) in report.shapes
            and r.category in _ARGUMENTS]  # fmt: skip
    if rows:
        size = sum(r.bytes for r in rows)
        n = report.compilation.devices
        less = size - size // n
        yield Step(
            less,
            f"{_several([r.name for r in rows])} are whole on every device: sharded over {n} they "
            f"take {human_bytes(less)} less",
        )


def _spread(report: Any) -> Iterator[Step]:
    """The state of training over more devices, where one is not enough."""
    over = report.compilation.over_bytes
    if report.compilation.devices > 1 or not over:
        return
    size = sum(r.bytes for r in report.peak if r.category in _STATE)
    n = next((n for n in _DEVICES if size - size // n >= over), _DEVICES[-1])
    less = size - size // n
    yield Step(
        less,
        f"parameters, their gradients and the optimizer's state, sharded over {n} devices, take "
        f"{human_bytes(less)} less on each",
    )


def _activations(report: Any) -> Iterator[Step]:
    """Values that wait for the backward pass."""
    rows = [r for r in report.peak if r.category == "activation"]
    if rows:
        size = sum(r.bytes for r in rows)
        # Only planning the loss tells which peaks are possible, and their recomputed work.
        yield Step(
            size,
            f"{human_bytes(size)} wait for the backward pass, most at {_places(rows)}: "
            'use policy="auto" to fit the device, or xform.policies.budget(...) with a peak that '
            "xform.pareto lists for the loss",
            sure=False,
        )


def _constants(report: Any) -> Iterator[Step]:
    """Arrays that the function closes over; the compiler has constants of its own."""
    size = min(report.constant_bytes or 0, report.compilation.closed_bytes)
    yield Step(
        size,
        f"{human_bytes(size)} are part of the program, as arrays that the function closes over: "
        "pass them as arguments, which can be sharded, donated, and shared with other programs",
        sure=False,
    )


def _several(names: list[str]) -> str:
    rest = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _places(rows: list[Row]) -> str:
    sizes = collections.Counter[str]()
    for row in rows:
        sizes[row.where or row.name] += row.bytes
    return ", ".join(place for place, _ in sizes.most_common(_MOST))
