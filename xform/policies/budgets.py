"""Budgets: policies that are given as bytes, rather than as what is to be saved.

`budget("8 GiB")` bounds the peak of the whole differentiated function, `budget("2 GiB",
of="saved")` what waits for its backward pass, and `fit()`, which the text "auto" stands for, bounds
the peak by the memory of the device that is planned for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from xform.errors import WrongArgument
from xform.terminal.text import byte_count, human_bytes

Regions = Literal["marked", "open"]
_OF = ("peak", "saved")
_SOLVERS = ("auto", "exact")


@dataclasses.dataclass(frozen=True)
class Budget:
    """The least work run again that fits a number of bytes.

    Asked for one primitive, in JAX's protocol, it saves nothing.

    Attributes:
      bytes: how many.
      of: "peak" for arguments, outputs and all that is live between, "saved" for what waits for the
        backward pass.
      solver: "auto" or "exact".
      batch: how many examples shared the bytes that were given; None if that was not said.
      device: the device whose memory it is; empty if the bytes were given.
      regions: "marked", or "open" where remat regions are dissolved, see `policies.open_regions`.
      verify: whether the compiler decides under `jit` which plans fit a peak.
    """

    bytes: int
    of: str = "peak"
    solver: str = "auto"
    batch: int | None = None
    device: str = ""
    regions: Regions = "marked"
    verify: bool = True

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        """False."""
        return False

    @property
    def options(self) -> str:
        """The arguments of `budget` that differ from its defaults, as a call has them."""
        of = f", of={self.of!r}" if self.of != "peak" else ""
        return of if self.verify else f"{of}, verify=False"

    def __repr__(self) -> str:
        text = f"budget({human_bytes(self.bytes)!r}{self.options})"
        text = f"auto, {text} of {self.device}" if self.device else text
        return of_regions(self.regions, text)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A budget of the peak that is the memory of the device that is planned for.

    Asked for one primitive, in JAX's protocol, it saves nothing.

    Attributes:
      reserve: bytes of that memory that are left to others.
      batch: how many examples share it; None if that was not said.
      regions: as of a budget.
    """

    reserve: int = 0
    batch: int | None = None
    regions: Regions = "marked"

    def __call__(self, prim: Any, *_: Any, **params: Any) -> bool:
        """False."""
        return False

    def __repr__(self) -> str:
        text = f"fit(reserve={human_bytes(self.reserve)!r})" if self.reserve else "auto"
        return of_regions(self.regions, text)

    def within(self, capacity: int, device: str) -> Budget:
        """The budget on a device of so many bytes."""
        left = max(capacity - self.reserve, 0)
        return Budget(left // (self.batch or 1), batch=self.batch, device=device,
                      regions=self.regions)  # fmt: skip


def of_regions(regions: Regions, text: str) -> str:
    """What a policy is called that opens regions, or leaves them as they are marked."""
    return f"open_regions({text})" if regions == "open" else text


def budget(
    amount: float | str, of: str = "peak", batch: int | None = None, solver: str = "auto",
    verify: bool = True,
) -> Budget:  # fmt: skip
    """Fit a derivative into so many bytes, and run the least work again.

    On a GPU or TPU whose link to its host is known (`planner/costs/link.py`), values may wait in
    the host's memory, `pinned_host`, rather than be run again: those that are idle for longer than
    their way there and back, as many as the link carries in the time of the forward pass. Their
    bytes are not counted. So may the states that a scan keeps in each trip; each is sent in its
    trip. What is inside branches and `remat` regions, the few states from which a loop is run
    again, and programs that are not solved exactly stay on the device.

    A budget of the peak may save more in `remat` regions that have no policy of their own, and take
    loops apart in them; what a region's policy says holds under each budget.

    Args:
      amount: bytes on each device, such as `16e9`, or a string with a unit: `"6 GiB"`, `"500 MB"`.
      of: what is bounded. `"peak"`: arguments, outputs and all that is live between, of the
        derivative that is given this policy, by itself; a program around it counts only in
        `xform.plan`. A `remat` region has no peak of its own, and takes `"saved"` only.
        `"saved"`: the values that are computed and wait for the backward pass
        (`xform.residuals(...).total_bytes`), not the arguments, the outputs, or what the backward
        pass has in work.
      batch: how many examples share the bytes. Under `vmap` a function is planned for one example:
        give the size of the batch. Without it, the bytes are those of one example there, and a
        warning says so. What all examples share counts for each of them in a peak.
      solver: `"exact"` to solve programs of any size by integer programming (within the limits of
        HiGHS: minutes from 10,000 equations on); `"auto"` does so up to 3,000 equations.
      verify: whether the compiler decides under `jit` which plans fit a peak. Otherwise, and under
        `vmap`, inside a `shard_map` and outside `jit`, the peak is simulated, with a margin of 1%
        on a CPU and 5% elsewhere if there is such a plan. `xform.plan` has its own `verify`.

    Returns:
      A policy. Planning with it raises `errors.BudgetInfeasible`, with the floor, if no plan fits.

    Raises:
      WrongArgument: the amount is negative or no number of bytes, or another argument is unusable.

    Cost: planning solves an integer program of the size of the program (a second for 24 unrolled
    transformer layers), or, beyond 3,000 equations, one for each of its distinct blocks and some
    forty minimum cuts; for a peak, some fifty plans are made, and simulated until one fits. With
    `verify`, the derivative is compiled under eight plans at most, each once in a process.

    >>> import xform
    >>> xform.policies.budget("1.5 MiB")
    budget('1.5 MiB')
    >>> xform.policies.budget("1.5 MiB", of="saved")
    budget('1.5 MiB', of='saved')
    """
    asked = f"budget({amount!r})"
    n = bytes_of(amount, asked)
    if of == "residuals":
        raise WrongArgument(asked, "of='residuals' is now called of='saved'", "", "give of='saved'")
    for name, value, known in (("of", of, _OF), ("solver", solver, _SOLVERS)):
        if value not in known:
            raise WrongArgument(
                asked, f"{name}={value!r} is not known", "", f"give one of {', '.join(known)}"
            )
    _check_batch(asked, batch)
    return Budget(n // (batch or 1), of, solver, batch, verify=verify)


def fit(reserve: float | str = 0, batch: int | None = None) -> Fit:
    """Fit a derivative into the memory of the device that is planned for.

    It is a `budget` of the peak, arguments and outputs included. That memory is what the backend
    reports of a device that is here, what is known of the kind of one that is not, and in
    `xform.compare` and commands what `capacity` says. Where it is not known, as of a CPU, nothing
    is bounded, and the default is taken: `min_cut`. `policy="auto"` stands for `fit()`.

    Args:
      reserve: bytes of it, or a string such as `"2 GiB"`, that are left to what is around the
        differentiated function, such as the state of an optimizer: inside a `jit` nothing is known
        of that. `xform.compare` and `python -m xform memory` see to it without.
      batch: how many examples share it, under `vmap`; as for `budget`.

    Returns:
      A policy. Planning with it raises `errors.BudgetInfeasible`, with the floor, if nothing fits.

    Raises:
      WrongArgument: `reserve` is no number of bytes, or `batch` no number of examples.

    Cost: that of a `budget` of the peak; where the default fits, of one simulation.

    >>> import xform
    >>> xform.policies.fit(reserve="2 GiB")
    fit(reserve='2.0 GiB')
    """
    asked = f"fit(reserve={reserve!r})"
    n = bytes_of(reserve, asked)
    _check_batch(asked, batch)
    return Fit(n, batch)


def bytes_of(amount: float | str, asked: str) -> int:
    """Bytes from a number or a string, or an error that names the request."""
    try:
        return byte_count(amount)
    except (TypeError, ValueError):
        raise WrongArgument(
            asked,
            "it is not a number of bytes",
            "",
            "give a whole number of bytes, or a string such as '6 GiB' or '500 MB'",
        ) from None


def _check_batch(asked: str, batch: Any) -> None:
    whole = isinstance(batch, int | np.integer) and not isinstance(batch, bool)
    if batch is not None and (not whole or batch < 1):
        raise WrongArgument(
            asked, f"batch={batch!r} is no number of examples", "", "give a positive integer"
        )
