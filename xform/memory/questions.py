"""What people ask of memory: does it fit, how large a batch does, and why not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xform import alive
from xform.callables import check_callable, function_name
from xform.errors import BudgetInfeasible, WrongArgument
from xform.memory.analysis import memory_analysis
from xform.memory.batch import Argnums, by_axis, by_inputs
from xform.memory.report import MemoryReport
from xform.memory.targets import missing, parse_target
from xform.text import columns, human_bytes

MOST_COMPILES = 8
# What a compiler that refuses a program may round off when it says how large it is.
_ROUNDED = 2**30 // 100


@dataclasses.dataclass(frozen=True)
class Batch:
    """The largest batch that a target has room for; prints as a line for each that was compiled.

    Attributes:
      size: the largest batch that fits.
      fits: its report.
      over: the report of the next larger one, which does not fit, or the error that says that no
        plan keeps its budget; None if the largest that was asked about fits, or eight compilations
        were not enough to meet at one size.
      tried: total bytes of every batch that was asked about; None of one that the compiler refused
        without saying them, or that has no plan.
      of: what the batch is, in words.
    """

    size: int
    fits: MemoryReport
    over: MemoryReport | BudgetInfeasible | None
    tried: Mapping[int, int | None]
    of: str = ""

    @property
    def compiles(self) -> int:
        """How many batches were asked about."""
        return len(self.tried)

    def __str__(self) -> str:
        # By the reports' own `fits`, every batch that fits is at most this, and no other is.
        rows = [[str(n), human_bytes(b), "fits" if n <= self.size else "over"]
                for n, b in sorted(self.tried.items())]  # fmt: skip
        known = "the largest batch is" if self.over else "the largest batch known to fit is"
        head = f"{self.fits.function} on {self.fits.target}: {known} {self.size}"
        head += f" ({self.of})" if self.of else ""
        about = f"\n{self.fits.asked}".rstrip()
        return f"{head}{about}\n\n" + columns([["batch", "bytes", ""], *rows], right=(0, 1))


def fits(f: Callable[..., Any], *args: Any, target: str, **options: Any) -> MemoryReport:
    """Whether a function fits a target: a report whose `fits` says so, and whose numbers say why.

    Args:
      f: as for `memory_analysis`.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      target: a device whose capacity is known, such as `"tpu:v5e:1x1"` or `"gpu:h100"`.
      **options: of `memory_analysis`.

    Returns:
      A `MemoryReport` of the bytes of each device; `fits` is True or False, and `head_room_bytes`
      says by how many.

    Raises:
      WrongArgument: the target is not known, or its capacity is not.
      MissingExtra: what compiling for the target needs is not installed.

    Cost: one compilation; nothing is run.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> xform.fits(lambda x: x @ x, x, target="cpu", capacity="6 MiB").fits
    False
    """
    report = memory_analysis(f, *args, target=target, **options)
    if report.capacity_bytes is None:
        raise WrongArgument(
            f"fits on target={target!r}", "the memory of that device is not known", "",
            "give its memory, such as capacity='14 GiB', or name a TPU or GPU, such as "
            "'tpu:v5e:1x1' or 'gpu:h100'",
        )  # fmt: skip
    return report


def max_batch(f: Callable[..., Any], *args: Any, target: str, batch_axis: int = 0,
              batch_argnums: Argnums = "auto", multiple_of: int = 1, most: int = 2**20,
              inputs: Callable[..., Sequence[Any]] | None = None,
              progress: Callable[[int, str], None] | None = None,
              **options: Any) -> Batch:  # fmt: skip
    """The largest batch with which a function fits a target, by compiling alone.

    Args:
      f: as for `memory_analysis`; it must take any size of the batch. Where it plans for a budget,
        a batch that has no plan is too large.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees, with some batch.
      target: a device whose capacity is known.
      batch_axis: which axis of the leaves of those arguments is the batch.
      batch_argnums: positions of the arguments that have a batch; all their leaves do. None is all
        arguments. "auto" is every argument whose leaves are all as long on that axis as those of
        the last one that has arrays, if `f` takes them so with another batch, else the last one.
      multiple_of: sizes that are asked for, such as the number of devices the batch is sharded on.
      most: the largest batch that is asked about.
      inputs: what returns the arguments, as `inputs(batch=n)`; then there are no `args`.
      progress: is called with batch and target before each compilation.
      **options: of `memory_analysis`.

    Returns:
      A `Batch`: the size, and the next larger one, which does not fit. Where bytes jump with the
        batch, eight compilations may not find the last that fits: `over` is then None.

    Raises:
      WrongArgument: not even the smallest batch fits, the arguments have no such axis, or no batch
        is a multiple of `multiple_of` and at most `most`.
      BudgetInfeasible: the smallest batch has no plan for the budget in `f`.

    Cost: at most eight compilations. Bytes grow nearly linearly with the batch, so a line through
    the nearest to the capacity and another far from it says where to look next.

    >>> w, x = jnp.ones((256, 256)), jnp.ones((8, 256))
    >>> batch = xform.max_batch(lambda w, x: x @ w, w, x, target="cpu", capacity="1 MiB")
    >>> batch.size
    384
    """
    check_callable(f, "max_batch")
    _check_sizes(multiple_of, most)
    resizer = by_inputs(inputs) if inputs else by_axis(f, args, batch_argnums, batch_axis)
    tried: dict[int, MemoryReport] = {}
    without: dict[int, BudgetInfeasible] = {}

    def has_room(units: int) -> bool:
        batch = units * multiple_of
        if progress is not None:
            progress(batch, target)
        n = len(tried) + len(without)
        alive.progress(f"batch {batch}, {n} of at most {MOST_COMPILES} sizes tried")
        try:
            resized = resizer.at(batch)
            tried[units] = fits(f, *resized, target=target, **options)
        except BudgetInfeasible as error:
            without[units] = error
            return False
        return bool(tried[units].fits)

    start = max(1, resizer.start // multiple_of)
    low, high = 0, most // multiple_of + 1
    guess = min(start, high - 1)
    with alive.working(f"finding the largest batch of {function_name(f)}"):
        while high - low > 1 and len(tried) + len(without) < MOST_COMPILES:
            low, high = (guess, high) if has_room(guess) else (low, guess)
            guess = _next(tried, low, high, high in tried or high in without)
    sizes = {n * multiple_of: r.total_bytes for n, r in tried.items()}
    sizes |= {n * multiple_of: None for n in without}
    if not low:
        if high in without:
            raise without[high]
        smallest = tried[high]
        raise WrongArgument(
            f"max_batch on target={target!r}",
            f"a batch of {high * multiple_of} is over: {smallest.compilation.verdict()}",
            "",
            "give grad a policy that saves less, shard over more devices, or name a larger device",
        )
    over = tried.get(low + 1) or without.get(low + 1)
    return Batch(low * multiple_of, tried[low], over, sizes, resizer.of)


def why_oom(f: Callable[..., Any], *args: Any, target: str, **options: Any) -> Reason:
    """Why a function does not fit a target: what is live at its peak, and what would help.

    A compiler that refuses a program says little of it. It is then compiled for a device with more
    memory, of the same kind if there is one, and the report is that of the first that takes it.

    Args:
      f: as for `memory_analysis`.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      target: where it does not fit.
      **options: of `memory_analysis`.

    Returns:
      What prints the verdict, a report of what is live at the peak, and what would help.

    Raises:
      WrongArgument: the target is not known, or its capacity is not.
      MissingExtra: what compiling for the target needs is not installed.

    Cost: one compilation, and at most three where that is refused; nothing is run.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> print(xform.why_oom(lambda x: x @ x, x, target="cpu", capacity="6 MiB"))
    <lambda> needs 8.0 MiB of each cpu, which has 6.0 MiB: it is over by 2.0 MiB
    ...
    """
    asked = fits(f, *args, target=target, **options)
    report = asked
    for other in _roomier(asked) if asked.assignment is None else ():
        # Its advice is for the memory that was asked for.
        less: dict[str, Any] = {**options, "capacity": asked.capacity_bytes}
        report = memory_analysis(f, *args, target=other, **less)
        if report.assignment is not None:
            break
    return Reason(asked, report)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a function does not fit; prints the verdict, and the report with its advice.

    Attributes:
      asked: the report for the target, which may be the compiler's refusal alone.
      report: what is live at the peak, on the device that `report.target` says.
    """

    asked: MemoryReport
    report: MemoryReport

    def __str__(self) -> str:
        verdict = self.asked.compilation.verdict()
        if self.report is not self.asked:
            verdict += (f". {self.asked.compilation.target.device.name}'s compiler says no more; "
                        f"what follows is of {self.report.target}")  # fmt: skip
        return f"{verdict}\n\n{self.report}"


def _roomier(report: MemoryReport) -> Iterator[str]:
    """Targets of as many devices with more memory, that compile alike and can be compiled for."""
    count = report.compilation.devices
    shapes = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    platform = report.compilation.target.platform
    others = [f"cpu:{count}"]
    if platform == "cuda":
        others.insert(0, f"gpu:b200:{count}")
    elif platform == "tpu" and count in shapes:
        others.insert(0, f"tpu:v5p:{shapes[count]}")
    yield from (name for name in others if not missing(parse_target(name)))


def _next(tried: Mapping[int, MemoryReport], low: int, high: int, over: bool) -> int:
    """Where bytes should meet the capacity, by a line through the nearest batch and the farthest.

    Near the capacity bytes do not rise evenly, so two batches there say nothing of the slope. Of a
    refused program the compiler says a rounded sum, which counts where there is nothing better, or
    no sum at all, which does not. `over`: whether `high` is known not to fit; where nothing else is
    known, sizes are halved by their ratio.
    """
    exact = {n for n, r in tried.items() if not r.compilation.refused}
    sizes = {n: r.total_bytes for n, r in tried.items() if len(exact) < 2 or n in exact}
    known = {n: size for n, size in sizes.items() if size is not None}
    guess = high
    if known:
        room = {n: (tried[n].head_room_bytes or 0) - _ROUNDED * (n not in exact) for n in known}
        near = min(known, key=lambda n: (abs(room[n]), n))
        far = max(known, key=lambda n: abs(n - near))
        slope = (known[near] - (known[far] if far != near else 0)) / (near - far or near)
        guess = near + math.floor(room[near] / slope) if slope > 0 else high
    if guess < high:
        return max(guess, low + 1)
    return max(math.isqrt(low * high), low + 1) if over else high - 1


def _check_sizes(multiple_of: int, most: int) -> None:
    numbers: list[Any] = [multiple_of, most]
    whole = all(isinstance(n, int | np.integer) for n in numbers)
    if not whole or not 1 <= multiple_of <= most:
        raise WrongArgument(
            f"max_batch with multiple_of={multiple_of!r}, most={most!r}",
            "there is no positive multiple of the one that is at most the other",
            "",
            "give a multiple_of from 1 to most",
        )
