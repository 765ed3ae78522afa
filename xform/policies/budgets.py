"""Budgets: policies that give a number of bytes, rather than a choice of saved values.

`budget("8 GiB")` bounds the peak memory of a differentiated function. `budget("2 GiB",
of="saved")` bounds the values saved for its backward pass. `fit()`, which "auto" stands for, bounds
the peak by the device's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from xform.errors import WrongArgument
from xform.program.dimensions import Sample
from xform.terminal.text import byte_count, human_bytes

# Whether a policy keeps the remat regions of a program, or dissolves them first.
Regions = Literal["marked", "open"]
_OF = ("peak", "saved")
_SOLVERS = ("auto", "exact")


@dataclasses.dataclass(frozen=True)
class Budget:
    """A policy that recomputes least within a number of bytes.

    When called for one primitive, as JAX calls a policy, it saves nothing.

    Attributes:
      bytes: the number of bytes.
      of: "peak" for arguments, outputs and temporary memory; "saved" for the values saved for the
        backward pass.
      solver: "auto" or "exact".
      batch_size: the number of examples that shared the given bytes; None if it was not given.
      device: the device whose memory the budget is; empty if the bytes were given.
      regions: "marked", or "open" to dissolve remat regions, see `policies.open_regions`.
      verify: whether the compiler decides, under `jit`, which plans fit a budget of the peak.
      slices: whether regions of the program may run in slices along an axis.
      symbolic: the size of each symbolic dimension at which bytes are counted, by name; empty if
        it was not given.
      typed: the bytes as text, as the user typed them; empty if they were given as a number.
    """

    bytes: int
    of: str = "peak"
    solver: str = "auto"
    batch_size: int | None = None
    device: str = ""
    regions: Regions = "marked"
    verify: bool = True
    slices: bool = False
    symbolic: Sample = ()
    typed: str = dataclasses.field(default="", compare=False)

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        """Return False: JAX saves nothing."""
        return False

    @property
    def options(self) -> str:
        """The arguments of `budget` after the first, without defaults, as source code."""
        given = {"of": self.of, "batch_size": self.batch_size, "solver": self.solver,
                 "verify": self.verify, "slices": self.slices,
                 "symbolic": dict(self.symbolic)}  # fmt: skip
        defaults = {"of": "peak", "batch_size": None, "solver": "auto", "verify": True,
                    "slices": False, "symbolic": {}}  # fmt: skip
        return "".join(f", {k}={x!r}" for k, x in given.items() if x != defaults[k])

    @property
    def exact_amount(self) -> str | int:
        """The first argument of `budget`: the text that the user typed, or a number of bytes."""
        if self.typed and byte_count(self.typed) // (self.batch_size or 1) == self.bytes:
            return self.typed
        return self.bytes * (self.batch_size or 1)

    @property
    def amount(self) -> str:
        """The bytes as the user typed them, or rounded in a larger unit."""
        amount = self.exact_amount
        return amount if isinstance(amount, str) else human_bytes(amount)

    def __repr__(self) -> str:
        if self.device:
            return policy_text(self.regions, f"auto, {self.amount} of {self.device}")
        return policy_text(self.regions, f"budget({self.amount!r}{self.options})")


@dataclasses.dataclass(frozen=True)
class Fit:
    """A budget of the peak: the memory of the device that the plan is for.

    When called for one primitive, as JAX calls a policy, it saves nothing.

    Attributes:
      reserve: bytes of that memory that the derivative must not use.
      batch_size: the number of examples that share the memory; None if it was not given.
      regions: "marked", or "open" to dissolve remat regions, see `policies.open_regions`.
      symbolic: the size of each symbolic dimension, as for a `Budget`.
      typed: the reserve as text, as the user typed it; empty if it was given as a number.
    """

    reserve: int = 0
    batch_size: int | None = None
    regions: Regions = "marked"
    symbolic: Sample = ()
    typed: str = dataclasses.field(default="", compare=False)

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        """Return False: JAX saves nothing."""
        return False

    def __repr__(self) -> str:
        reserve = self.typed or human_bytes(self.reserve)
        given = [f"reserve={reserve!r}"] if self.reserve else []
        given += [f"batch_size={self.batch_size}"] if self.batch_size else []
        given += [f"symbolic={dict(self.symbolic)}"] if self.symbolic else []
        return policy_text(self.regions, f"fit({', '.join(given)})" if given else "auto")

    def within(self, capacity: int, device: str) -> Budget:
        """Return the budget on a device with `capacity` bytes of memory."""
        available = max(capacity - self.reserve, 0)
        return Budget(
            available // (self.batch_size or 1),
            batch_size=self.batch_size,
            device=device,
            regions=self.regions,
            symbolic=self.symbolic,
        )


def policy_text(regions: Regions, text: str) -> str:
    """Return `text`, the text of a policy; with open regions, `open_regions(text)`."""
    return f"open_regions({text})" if regions == "open" else text


def budget(
    amount: float | str,
    *,
    of: str = "peak",
    batch_size: int | None = None,
    solver: str = "auto",
    verify: bool = True,
    slices: bool = False,
    symbolic: Mapping[str, int] | None = None,
) -> Budget:
    """Return a policy that fits a derivative into a number of bytes and recomputes least.

    On a GPU or TPU with a known link to its host (`planner/costs/link.py`), values may also be
    offloaded to the host's memory, `pinned_host`, instead of being recomputed. A value is offloaded
    only if it is idle for longer than the transfer there and back. All offloaded values together
    are no more than the link carries in the time of the forward pass. Offloaded bytes do not count.
    The states that a scan saves in each iteration can be offloaded too, each in its own iteration.
    These stay on the device: values inside branches and `remat` regions, the few states that a loop
    stores for its recomputation, and all values of programs that are too large for an integer
    program.

    A budget of the peak may save more inside `remat` regions without a policy, and may split and
    nest the loops in them. A region's own policy holds under every budget.

    Args:
      amount: bytes on each device, such as `16e9`, or a string with a unit: `"6 GiB"`, `"500 MB"`.
      of: what the budget bounds. `"peak"`: arguments, outputs and temporary memory of the
        derivative that has this policy. The program around the derivative counts only in
        `xform.plan`. A `remat` region has no peak of its own and takes only `"saved"`.
        `"saved"`: the values that are computed and saved for the backward pass
        (`xform.residuals(...).total_bytes`), without the arguments, the outputs, and the temporary
        memory of the backward pass.
      batch_size: how many examples share the bytes. Under `vmap` a function is planned for one
        example, so give the size of the mapped axis. If it is None, the bytes are for one example,
        and a warning says so. In a budget of the peak, values that all examples share count once
        for each example.
      solver: how the values to save are chosen. `"auto"` solves an integer program for up to 3,000
        equations, and approximates it for more. `"exact"` solves it for any number of equations
        (HiGHS takes minutes from 10,000 on).
      verify: whether the compiler decides, under `jit`, which plans fit a budget of the peak. If
        False, the peak is simulated. The simulated peak stays below the budget by a margin of 1% on
        a CPU and 5% elsewhere, if a plan is small enough. Under `vmap`, inside a `shard_map` and
        outside `jit` the peak is always simulated. `xform.plan` has its own `verify`.
      slices: whether regions of the program may become loops over slices of an axis, such as the
        logits and the loss of some tokens at a time. They are tried if no other plan fits. Sums
        over slices are added in another order, so results differ by rounding. In a program with
        slices, remat regions are dissolved. For budgets of the peak.
      symbolic: for a function that `jax.export` traces with symbolic dimensions: the size of each,
        such as `{"b": 64}`, at which bytes and FLOPs are counted. The budget holds at these sizes
        only: larger sizes may take more bytes. A budget without them is an error there.

    Returns:
      A policy. If no plan fits, planning raises `errors.BudgetInfeasible`, with the smallest bytes
      found as `floor_bytes`.

    Raises:
      WrongArgument: `amount` is negative or not a number of bytes, or another argument is invalid.

    Cost: planning solves one integer program as large as the program (a second for 24 unrolled
    transformer layers). Beyond 3,000 equations it solves one for each distinct block, and some
    forty minimum cuts. A budget of the peak makes some fifty plans and simulates them until one
    fits. With `verify`, at most eight plans are compiled, each once in a process.

    >>> import xform
    >>> xform.policies.budget("1.5 MiB")
    budget('1.5 MiB')
    >>> xform.policies.budget("1.5 MiB", of="saved")
    budget('1.5 MiB', of='saved')
    """
    request = f"budget({amount!r})"
    n = bytes_of(amount, request)
    for name, value, known in (("of", of, _OF), ("solver", solver, _SOLVERS)):
        if value not in known:
            raise WrongArgument(
                request,
                f"unknown {name}={value!r}",
                "",
                f"use one of {', '.join(map(repr, known))}",
            )
    _check_batch_size(request, batch_size)
    if slices and of != "peak":
        raise WrongArgument(
            request,
            f"slices=True with of={of!r}: slices lower a peak, not the bytes of saved values",
            "",
            "use a budget of the peak, or leave slices out",
        )
    typed = amount if isinstance(amount, str) else ""
    sizes = _symbolic_sizes(request, symbolic)
    return Budget(n // (batch_size or 1), of, solver, batch_size, verify=verify, slices=slices,
                  symbolic=sizes, typed=typed)  # fmt: skip


def fit(
    reserve: float | str = 0,
    *,
    batch_size: int | None = None,
    symbolic: Mapping[str, int] | None = None,
) -> Fit:
    """Return a policy that fits a derivative into the memory of the device that the plan is for.

    It is a `budget` of the peak, arguments and outputs included. For a device of this process, the
    memory is the number that the backend reports; for another kind of device, the number that xform
    has for it. (`xform.compare` and the commands have an option `capacity`.) If the memory is
    unknown, as on a CPU, nothing is bounded and the default policy `min_cut` is used. On a GPU,
    `xform.jit` and `xform.plan` also keep below the bytes above which XLA recomputes by itself, if
    a plan is that small. `policy="auto"` means `fit()`.

    Args:
      reserve: bytes of that memory, or a string such as `"2 GiB"`, for everything outside the
        differentiated function, such as an optimizer's state, which is unknown inside a `jit`.
        `xform.compare` and `python -m xform memory` count such bytes themselves.
      batch_size: how many examples share the memory. Under `vmap` a function is planned for one
        example, so give the size of the mapped axis. If it is None, one example may take all of it,
        and a warning says so.
      symbolic: the size of each symbolic dimension, as for `budget`.

    Returns:
      A policy. If no plan fits, planning raises `errors.BudgetInfeasible`, with the smallest bytes
      found as `floor_bytes`.

    Raises:
      WrongArgument: `reserve` is not a number of bytes, or `batch_size` not a positive integer.

    Cost: as for a `budget` of the peak; one simulation if the default fits.

    >>> import xform
    >>> xform.policies.fit(reserve="2 GiB")
    fit(reserve='2 GiB')
    """
    request = f"fit(reserve={reserve!r})"
    n = bytes_of(reserve, request)
    _check_batch_size(request, batch_size)
    typed = reserve if isinstance(reserve, str) else ""
    return Fit(n, batch_size, symbolic=_symbolic_sizes(request, symbolic), typed=typed)


def bounds_peak(policy: Any) -> bool:
    """Return whether a policy limits a peak, of a derivative or of a step: a budget, or `fit`."""
    return isinstance(policy, Fit) or (isinstance(policy, Budget) and policy.of == "peak")


def bytes_of(amount: float | str, request: str) -> int:
    """Return a number of bytes, or a string such as "6 GiB", as bytes.

    `request` is the first line of an error.
    """
    try:
        return byte_count(amount)
    except (TypeError, ValueError):
        raise WrongArgument(
            request,
            "it is not a number of bytes",
            "",
            "give a whole number of bytes, or a string such as '6 GiB' or '500 MB'",
        ) from None


def _symbolic_sizes(request: str, symbolic: Mapping[str, int] | None) -> Sample:
    """Return the sizes of symbolic dimensions as pairs, in the order of their names."""
    sizes: Any = {} if symbolic is None else symbolic
    if isinstance(sizes, Mapping) and all(map(_is_positive, sizes.values())):
        return tuple(sorted((str(name), int(size)) for name, size in sizes.items()))
    raise WrongArgument(
        request,
        f"symbolic={symbolic!r} does not map names of dimensions to sizes",
        "",
        "give a positive integer for each name, such as symbolic={'b': 64}",
    )


def _is_positive(size: Any) -> bool:
    """Return whether a value is a positive integer."""
    is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
    return is_integer and bool(size > 0)


def _check_batch_size(request: str, size: Any) -> None:
    """Raise `WrongArgument` unless `size` is None or a positive integer."""
    if size is not None and not _is_positive(size):
        raise WrongArgument(
            request,
            f"batch_size={size!r} is not a number of examples",
            "",
            "give a positive integer",
        )
