"""`fits`, `max_batch` and `why_oom`: questions about a function and the memory of a device.

`fits` tells whether the function fits, `max_batch` finds the largest batch with which it fits, and
`why_oom` explains why it does not fit. All three compile the function for the device
(`analysis.py`) and read the compiler's bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xform.errors import BudgetInfeasible, WrongArgument
from xform.introspection.callables import check_callable, definition_site, function_name
from xform.memory.analysis import memory_analysis
from xform.memory.batch import Argnums, resizer_by_axis, resizer_by_inputs
from xform.memory.report import MemoryReport
from xform.memory.targets import missing, parse_target
from xform.policies.sample import check_known_sizes
from xform.terminal import progress_line
from xform.terminal.notebook import Result
from xform.terminal.text import columns, human_bytes

MOST_COMPILES = 8
# A compiler rounds the size of a program that it refuses by at most this many bytes.
_ROUNDING_BYTES = 2**30 // 100


@dataclasses.dataclass(frozen=True, repr=False)
class LargestBatch(Result):
    """The largest batch that fits a target. Prints a line for each batch that was tried.

    Attributes:
      size: the largest batch that fits.
      fits: the report of that batch.
      over: the report of the next larger batch, which does not fit. If `f` has a budget and no plan
        for that batch is within it, `over` is the error that says so. None if the largest allowed
        batch fits, or if the next larger batch was not among the eight that were compiled.
      tried: total bytes of every batch that was tried; None for a batch without a plan, and for one
        that the compiler refused without reporting its size.
      of: a description of the batch, such as "axis 0 of x".
    """

    size: int
    fits: MemoryReport
    over: MemoryReport | BudgetInfeasible | None
    tried: Mapping[int, int | None]
    of: str = ""

    @property
    def compiles(self) -> int:
        """The number of batches that were tried."""
        return len(self.tried)

    def to_dict(self) -> dict[str, Any]:
        """Return the largest batch, the bytes of all batches and the report as plain data."""
        return {"size": self.size, "of": self.of, "tried": dict(self.tried),
                "proven": self.over is not None, "report": self.fits.to_dict()}  # fmt: skip

    def heading(self) -> str:
        """Return the largest batch and its bytes."""
        return f"{self._answer()}, {human_bytes(self.fits.total_bytes)}"

    def _answer(self) -> str:
        """Return one line: the function, the target and the largest batch."""
        known = (
            "the largest batch is" if self.over is not None else "the largest batch known to fit is"
        )
        head = f"{self.fits.function} on {self.fits.target}: {known} {self.size}"
        return head + (f" ({self.of})" if self.of else "")

    def __str__(self) -> str:
        # Every tried batch up to `size` fits, and every larger one does not.
        rows = [[str(n), human_bytes(b), "fits" if n <= self.size else "over"]
                for n, b in sorted(self.tried.items())]  # fmt: skip
        description = f"\n{self.fits.description}".rstrip()
        table = columns([["batch", "bytes", ""], *rows], right=(0, 1))
        return f"{self._answer()}{description}\n\n{table}"


def fits(f: Callable[..., Any], *args: Any, target: str, **options: Any) -> MemoryReport:
    """Compile a function for a target and report whether it fits.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit`, whose donation, shardings
        and static arguments are kept.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      target: a device, such as `"tpu:v5e:1x1"` or `"gpu:h100"`. Its capacity must be known, or be
        given as `capacity`.
      **options: options of `memory_analysis`, such as `capacity` or `mesh`; all other names are
        keyword arguments of `f`.

    Returns:
      A `MemoryReport` of each device. Its `fits` is True or False, and `head_room_bytes` says by
      how many bytes.

    Raises:
      WrongArgument: the target or its capacity is unknown.
      MissingExtra: a package that is needed to compile for the target is not installed.

    Cost: one compilation; nothing is run.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> xform.fits(lambda x: x @ x, x, target="cpu", capacity="6 MiB").fits
    False
    """
    known = parse_target(target).device.capacity_bytes is not None
    if not known and options.get("capacity") is None:
        raise WrongArgument(
            f"whether {function_name(f)} fits on target={target!r}",
            "the memory of that device is not known", "",
            "give its memory, such as capacity='14 GiB', or name a TPU or GPU, such as "
            "'tpu:v5e:1x1' or 'gpu:h100'",
        )  # fmt: skip
    return memory_analysis(f, *args, target=target, **options)


def max_batch(f: Callable[..., Any], *args: Any, target: str, batch_axis: int = 0,
              batch_argnums: Argnums = "auto", multiple_of: int = 1, max_size: int = 2**20,
              inputs: Callable[..., Sequence[Any]] | None = None,
              progress: Callable[[int, str], None] | None = None,
              **options: Any) -> LargestBatch:  # fmt: skip
    """Find the largest batch size at which a function fits a target. Nothing is run.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit`, whose donation, shardings
        and static arguments are kept. It must accept any batch size. If it plans for a
        budget, a batch without a plan counts as too large.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees, with some batch size.
      target: a device, such as `"tpu:v5e:1x1"` or `"gpu:h100"`. Its capacity must be known, or be
        given as `capacity`.
      batch_axis: the axis of the batch in the arrays of the arguments that have a batch.
      batch_argnums: positions of the arguments that have a batch, in all of their arrays. None
        means all arguments. "auto" takes the last argument with arrays, and every other argument
        whose arrays all have the same size on `batch_axis`. If `f` cannot be traced with another
        size in all of these, "auto" takes the last one alone.
      multiple_of: only batch sizes that are multiples of this integer are tried. Give the number of
        devices if the batch is sharded.
      max_size: the largest batch size that is tried.
      inputs: a function that returns the tuple of positional arguments for a batch size,
        `inputs(batch=n)`; then pass no `args`.
      progress: a function `progress(batch_size, target)`, called with an int and the name of the
        target before each compilation. None: no calls.
      **options: options of `memory_analysis`, such as `capacity` or `mesh`; all other names are
        keyword arguments of `f`.

    Returns:
      A `LargestBatch`: the largest size that fits, and the report of the next larger one, which
        does not. If the bytes jump as the batch grows, eight compilations may not be enough to find
        the largest batch. Then `over` is None.

    Raises:
      WrongArgument: not even the smallest batch fits, the arguments have no such axis, or no batch
        up to `max_size` is a multiple of `multiple_of`.
      BudgetInfeasible: there is no plan for the smallest batch within the budget in `f`.

    Cost: at most eight compilations. Bytes grow nearly linearly with the batch. So the next batch
    comes from a line through the size nearest to the capacity and one far from it.

    >>> w, x = jnp.ones((256, 256)), jnp.ones((8, 256))
    >>> batch = xform.memory.max_batch(lambda w, x: x @ w, w, x, target="cpu", capacity="1 MiB")
    >>> batch.size
    384
    """
    check_callable(f, "max_batch")
    check_known_sizes(f"max_batch of {function_name(f)}", (args, options))
    _check_sizes(multiple_of, max_size)
    resizer = (
        resizer_by_inputs(inputs) if inputs else resizer_by_axis(f, args, batch_argnums, batch_axis)
    )
    tried: dict[int, MemoryReport] = {}
    unplannable: dict[int, BudgetInfeasible] = {}

    def try_batch(units: int) -> bool:
        """Compile a batch of `units` times `multiple_of`; return whether it fits."""
        batch = units * multiple_of
        if progress is not None:
            progress(batch, target)
        n = len(tried) + len(unplannable)
        progress_line.update(f"batch {batch}, {n} of at most {MOST_COMPILES} sizes tried")
        try:
            resized = resizer.make_arguments(batch)
            tried[units] = fits(f, *resized, target=target, **options)
        except BudgetInfeasible as error:
            unplannable[units] = error
            return False
        except TypeError as error:
            raise WrongArgument(
                f"max_batch of {function_name(f)} with a batch of {batch}",
                f"it cannot be traced: {str(error).splitlines()[0]}", definition_site(f),
                "name all arguments that have the batch in batch_argnums; so far "
                f"{resizer.description}",
            ) from error  # fmt: skip
        return bool(tried[units].fits)

    start = max(1, resizer.start_size // multiple_of)
    # In units of `multiple_of`: the largest batch that fits and the smallest that does not, so far.
    low, high = 0, max_size // multiple_of + 1
    guess = min(start, high - 1)
    with progress_line.show(f"finding the largest batch of {function_name(f)}"):
        while high - low > 1 and len(tried) + len(unplannable) < MOST_COMPILES:
            low, high = (guess, high) if try_batch(guess) else (low, guess)
            guess = _next_batch(tried, low, high, high in tried or high in unplannable)
    sizes = {n * multiple_of: r.total_bytes for n, r in tried.items()}
    sizes |= {n * multiple_of: None for n in unplannable}
    if not low:
        if high in unplannable:
            raise unplannable[high]
        smallest = tried[high]
        raise WrongArgument(
            f"max_batch on target={target!r}",
            f"a batch of {high * multiple_of} does not fit: {smallest.verdict()}",
            "",
            "use a policy that saves less, shard over more devices, or name a larger device",
        )
    over = tried.get(low + 1, unplannable.get(low + 1))
    return LargestBatch(low * multiple_of, tried[low], over, sizes, resizer.description)


def why_oom(f: Callable[..., Any], *args: Any, target: str, **options: Any) -> Reason:
    """Explain why a function does not fit a target: the buffers at its peak, and advice.

    A compiler that refuses a program reports little about it. The program is then compiled for
    devices with more memory, of the same kind if possible, until one accepts it.

    Args:
      f: a function of pytrees of arrays, or a function made by `jax.jit`, whose donation, shardings
        and static arguments are kept.
      *args: arrays or `jax.ShapeDtypeStruct`s in pytrees.
      target: the device that the function does not fit. Its capacity must be known, or be given as
        `capacity`.
      **options: options of `memory_analysis`, such as `capacity` or `mesh`; all other names are
        keyword arguments of `f`.

    Returns:
      A `Reason`. It prints the verdict, the report of the buffers at the peak, and the advice.

    Raises:
      WrongArgument: the target or its capacity is unknown.
      MissingExtra: a package that is needed to compile for the target is not installed.

    Cost: one compilation, or up to three if the compiler refuses the program. Nothing is run.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    >>> print(xform.memory.why_oom(lambda x: x @ x, x, target="cpu", capacity="6 MiB"))
    <lambda> needs 8.0 MiB of each cpu, which has 6.0 MiB: it is over by 2.0 MiB
    ...
    """
    target_report = fits(f, *args, target=target, **options)
    report = target_report
    for other in _larger_targets(target_report) if target_report.assignment is None else ():
        # The advice is for the capacity of the original target.
        same_capacity: dict[str, Any] = {**options, "capacity": target_report.capacity_bytes}
        report = memory_analysis(f, *args, target=other, **same_capacity)
        if report.assignment is not None:
            break
    return Reason(target_report, report)


@dataclasses.dataclass(frozen=True, repr=False)
class Reason(Result):
    """Why a function does not fit. Prints the verdict and a report with its advice.

    Attributes:
      target_report: the report for the target; it has no buffers if the compiler refused the
        program.
      report: a report with the buffers at the peak, for the device `report.target`.
    """

    target_report: MemoryReport
    report: MemoryReport

    def heading(self) -> str:
        """Return the verdict."""
        return self.target_report.verdict()

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict and the report as plain data."""
        return {"verdict": self.heading(), "report": self.report.to_dict()}

    def __str__(self) -> str:
        verdict = self.heading()
        if self.report.target != self.target_report.target:
            verdict += (f". {self.target_report.device.name}'s compiler reports nothing else; "
                        f"the report below is for {self.report.target}")  # fmt: skip
        return f"{verdict}\n\n{self.report}"


def _larger_targets(report: MemoryReport) -> Iterator[str]:
    """Yield targets with as many devices and more memory that this machine can compile for.

    A target of the same platform comes first.
    """
    count = report.devices
    shapes = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
    platform = report.compiled_for.platform
    others = [f"cpu:{count}"]
    if platform == "cuda":
        others.insert(0, f"gpu:b200:{count}")
    elif platform == "tpu" and count in shapes:
        others.insert(0, f"tpu:v5p:{shapes[count]}")
    yield from (name for name in others if not missing(parse_target(name)))


def _next_batch(
    tried: Mapping[int, MemoryReport], low: int, high: int, high_is_too_large: bool
) -> int:
    """Return the next batch to try: between `low`, which fits, and `high`.

    All batches are in units of `multiple_of`. `high_is_too_large` says whether `high` was tried and
    does not fit. Otherwise `high` is one above the largest allowed batch.

    A line of bytes over batches estimates at which batch the bytes reach the capacity. It goes
    through two tried batches: the one whose bytes are nearest to the capacity, and the one farthest
    from that batch. Bytes do not rise evenly near the capacity, so two close batches would give a
    wrong slope. For a refused program the compiler reports a rounded size, and a program that XLA
    recomputes in part is smaller than the line. Such sizes are used only if there are fewer than
    two exact ones. Without a usable line, the next batch is the geometric mean
    of `low` and `high`, or the largest allowed batch if `high` was not tried.
    """
    exact = {n for n, r in tried.items() if not (r.refused or r.recomputed)}
    sizes = {n: r.total_bytes for n, r in tried.items() if len(exact) < 2 or n in exact}
    known = {n: size for n, size in sizes.items() if size is not None}
    guess = high
    if known:
        # A refused size may be rounded down, so assume up to `_ROUNDING_BYTES` less room.
        head_room = {
            n: (tried[n].head_room_bytes or 0) - _ROUNDING_BYTES * (n not in exact) for n in known
        }
        near = min(known, key=lambda n: (abs(head_room[n]), n))
        far = max(known, key=lambda n: abs(n - near))
        slope = (known[near] - (known[far] if far != near else 0)) / (near - far or near)
        guess = near + math.floor(head_room[near] / slope) if slope > 0 else high
    if guess < high:
        return max(guess, low + 1)
    return max(math.isqrt(low * high), low + 1) if high_is_too_large else high - 1


def _check_sizes(multiple_of: int, max_size: int) -> None:
    """Raise `WrongArgument` unless both are integers, with 1 <= `multiple_of` <= `max_size`."""
    numbers: list[Any] = [multiple_of, max_size]
    integers = all(isinstance(n, int | np.integer) for n in numbers)
    if not integers or not 1 <= multiple_of <= max_size:
        raise WrongArgument(
            f"max_batch with multiple_of={multiple_of!r}, max_size={max_size!r}",
            "there is no positive multiple of multiple_of up to max_size",
            "",
            "give integers, with a multiple_of from 1 to max_size",
        )
