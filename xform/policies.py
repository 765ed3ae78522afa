"""Remat policies: which values a backward pass keeps.

A policy answers, for one equation, whether its outputs are saved. Those here are JAX's, by xform's
names; each is also a callable of JAX's protocol (`policy(primitive, *avals, **params)`), so that
`jax.checkpoint` takes them, and anything that `jax.checkpoint` takes is taken by xform.

>>> import xform
>>> xform.policies.save_only_these_names("hidden") == xform.policies.save_only_these_names("hidden")
True
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xform._jax import (
    JaxprEqn,
    Offloadable,
    Primitive,
    conv_general_dilated_p,
    dot_general_p,
    name_p,
    policy_answer,
)
from xform.errors import WrongArgument
from xform.source import frame
from xform.text import byte_count, human_bytes

Answer = bool | Offloadable
# What the names of `Tagged` start with.
TAG = "xform saves "
_SOLVERS = ("auto", "exact")
Policy = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Constantly:
    """One answer for every value."""

    name: str
    answer: bool

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        return self.answer

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class Dots:
    """Matrix products (and convolutions, unless `batch` is False) are saved or offloaded."""

    name: str
    batch: bool = True
    answer: Answer = True

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim is dot_general_p:
            _, batch_dims = params["dimension_numbers"]
            return self.answer if self.batch or not any(map(len, batch_dims)) else False
        return self.answer if self.batch and prim is conv_general_dilated_p else False

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class MinCut:
    """The fewest bytes, where running work again has a price.

    It decides for a whole program at once; asked for one primitive, in JAX's protocol, it saves
    products and convolutions.

    Attributes:
      price: of a FLOP of work that does not fuse, in bytes. Infinite: it is never run again.
      then: the price after the part `at` of each program, which is between 0 and 1.
      written: the price of saving what would else be fused and not written to memory, for each of
        its bytes; of two values as large, that of a product is then saved.
      apart: what crosses at each so many-th narrow place of a program costs nothing to save; 0: at
        none.
    """

    price: float = math.inf
    then: float = math.inf
    at: float = 1.0
    written: float = 0.0
    apart: int = 0

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Whether a primitive is one that is costly to run again."""
        return prim in (dot_general_p, conv_general_dilated_p)

    def __repr__(self) -> str:
        return (
            "min_cut" if self.price == math.inf else f"min_cut(price={self.price:.3g} bytes/FLOP)"
        )


@dataclasses.dataclass(frozen=True)
class Budget:
    """The least work run again that fits a number of bytes.

    Asked for one primitive, in JAX's protocol, it saves nothing.

    Attributes:
      bytes: how many.
      of: "residuals" for what is saved, "peak" for arguments, outputs and all that is live between.
      solver: "auto" or "exact".
      batch: how many examples shared the bytes that were given; None if that was not said.
    """

    bytes: int
    of: str = "residuals"
    solver: str = "auto"
    batch: int | None = None

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """False."""
        return False

    def __repr__(self) -> str:
        of = f", of={self.of!r}" if self.of != "residuals" else ""
        return f"budget({human_bytes(self.bytes)!r}{of})"


@dataclasses.dataclass(frozen=True)
class Tagged:
    """A policy that decides for a whole region, and the names that it gave to what it saves.

    xform's transforms plan by the first; JAX's save the names.
    """

    planned: MinCut | Budget
    names: frozenset[str]

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """Whether a value bears one of the names."""
        return prim is name_p and params["name"] in self.names

    def __repr__(self) -> str:
        return repr(self.planned)


@dataclasses.dataclass(frozen=True)
class Names:
    """Values named by `checkpoint_name`: `saved`, `offloaded`, or all but the `excluded`."""

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    excluded: frozenset[str] | None = None
    destination: Offloadable | None = None

    def __call__(self, prim: Primitive, *_: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        if prim is not name_p:
            return False
        name = params["name"]
        if self.excluded is not None:
            return name not in self.excluded
        if name in self.offloaded and self.destination is not None:
            return self.destination
        return name in self.saved

    def __repr__(self) -> str:
        if self.excluded is not None:
            return f"save_any_names_but_these({', '.join(sorted(self.excluded))})"
        offloaded = f"; offload {', '.join(sorted(self.offloaded))}" if self.offloaded else ""
        return f"save_only_these_names({', '.join(sorted(self.saved))}{offloaded})"


@dataclasses.dataclass(frozen=True)
class Either:
    """Saved if one of two policies saves it."""

    one: Policy
    other: Policy

    def __call__(self, prim: Primitive, *avals: Any, **params: Any) -> Answer:
        """The answer, in JAX's protocol."""
        answers = [_answer(p, prim, avals, params) for p in (self.one, self.other)]
        if not all(isinstance(a, bool) for a in answers):
            raise WrongArgument(
                "save_from_both_policies",
                "one of the two policies offloads values; 'either' has no meaning for that",
                "",
                "write one callable policy that returns True, False or an Offloadable",
            )
        return any(answers)


save_everything = Constantly("save_everything", True)
min_cut = MinCut(apart=2)
save_nothing = Constantly("save_nothing", False)
save_dots = Dots("save_dots")
save_dots_with_no_batch_dims = Dots("save_dots_with_no_batch_dims", batch=False)


def budget(
    amount: int | str, of: str = "residuals", batch: int | None = None, solver: str = "auto"
) -> Budget:
    """Fit the backward pass into so many bytes, and run the least work again.

    On a GPU or TPU whose link to its host is known (`planner/link.py`), values may wait in the
    host's memory, `pinned_host`, rather than be run again: those that are idle for longer than
    their way there and back, as many as the link carries in the time of the forward pass. Their
    bytes are not counted. The states of loops, what is inside branches and `remat` regions, and
    programs that are not solved exactly stay on the device.

    Args:
      amount: bytes on each device, or a number with a unit: `"6 GiB"`, `"500 MB"`.
      of: what is bounded. `"residuals"`: the values that are computed and kept
        (`xform.residuals(...).total_bytes`), not the arguments, the outputs, or what the backward
        pass has in work. `"peak"`: arguments, outputs and the peak of all that is live between, of
        the differentiated function, as simulated; `xform.plan` verifies it with the compiler.
      batch: how many examples share the bytes. Under `vmap` a function is planned for one example:
        give the size of the batch. Without it, the bytes are those of one example there, and a
        warning says so.
      solver: `"exact"` to solve programs of any size by integer programming (within the limits of
        HiGHS: minutes from 10,000 equations on); `"auto"` does so up to 3,000 equations.

    Returns:
      A policy. Planning with it raises `errors.BudgetInfeasible`, with the floor, if no plan fits.

    Raises:
      WrongArgument: the amount is negative or no number of bytes, or another argument is unusable.

    Cost: planning solves an integer program of the size of the program (a second for 24 unrolled
    transformer layers), or, beyond 3,000 equations, one for each of its distinct blocks and some
    forty minimum cuts; for a peak, some fifty plans are made, and simulated until one fits.

    >>> import xform
    >>> xform.policies.budget("1.5 MiB")
    budget('1.5 MiB')
    """
    asked = f"budget({amount!r})"
    n = bytes_of(amount, asked)
    for name, given, known in (("of", of, ("residuals", "peak")), ("solver", solver, _SOLVERS)):
        if given not in known:
            raise WrongArgument(
                asked, f"{name}={given!r} is not known", "", f"give one of {', '.join(known)}"
            )
    whole: Any = batch
    if batch is not None and (not isinstance(whole, int | np.integer) or batch < 1):
        raise WrongArgument(
            asked, f"batch={batch!r} is no number of examples", "", "give a positive integer"
        )
    return Budget(n // (batch or 1), of, solver, batch)


def save_only_these_names(*names: str) -> Names:
    """Save the values that `jax.ad_checkpoint.checkpoint_name` gave one of `names`."""
    return Names(saved=_names("save_only_these_names", names))


def save_any_names_but_these(*names: str) -> Names:
    """Save every named value whose name is not one of `names`."""
    return Names(excluded=_names("save_any_names_but_these", names))


def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: tuple[str, ...] | list[str],
    names_which_can_be_offloaded: tuple[str, ...] | list[str],
    offload_src: str,
    offload_dst: str,
) -> Names:
    """Save some names on the device and move others to `offload_dst` until they are needed.

    Memories are JAX's kinds, such as "device" and "pinned_host". XLA:CPU has one memory only.
    """
    asked = "save_and_offload_only_these_names"
    saved, offloaded = names_which_can_be_saved, names_which_can_be_offloaded
    saved, offloaded = _names(asked, saved), _names(asked, offloaded)
    if both := saved & offloaded:
        raise WrongArgument(
            asked,
            f"{sorted(both)} stand in both lists",
            "",
            "name each value once: saved or offloaded",
        )
    _names(asked, (offload_src, offload_dst))
    return Names(
        saved=saved,
        offloaded=offloaded,
        destination=Offloadable(src=offload_src, dst=offload_dst),
    )


def offload_dots_with_no_batch_dims(offload_src: str, offload_dst: str) -> Dots:
    """Move matrix products without batch dimensions to `offload_dst`; recompute the rest."""
    _names("offload_dots_with_no_batch_dims", (offload_src, offload_dst))
    where = Offloadable(src=offload_src, dst=offload_dst)
    return Dots("offload_dots_with_no_batch_dims", batch=False, answer=where)


def save_from_both_policies(one: Policy, other: Policy) -> Either:
    """Save what either policy saves."""
    return Either(check(one), check(other))


def _names(asked: str, names: Any) -> frozenset[str]:
    """Names of values; a text alone, or a list among them, is not meant."""
    several = not isinstance(names, str) and isinstance(names, Iterable)
    wrong = [n for n in names if not isinstance(n, str)] if several else [names]
    if wrong:
        raise WrongArgument(
            asked, f"{wrong[0]!r} stands where names are meant", "", "give each name as a string"
        )
    return frozenset(names)


def bytes_of(amount: int | str, asked: str) -> int:
    """Bytes from an integer or a string, or an error for what was asked."""
    try:
        return byte_count(amount)
    except (TypeError, ValueError):
        raise WrongArgument(
            asked,
            "it is not a number of bytes",
            "",
            "give an integer, or a string such as '6 GiB' or '500 MB'",
        ) from None


def said(policy: Any) -> str:
    """What a policy is called."""
    return getattr(policy, "__name__", repr(policy))


def ask(policy: Policy, eqn: JaxprEqn) -> Answer:
    """A policy's answer for one equation.

    Raises:
      WrongArgument: it is none of JAX's, which raises a TypeError there.
    """
    return _answer(policy, eqn.primitive, [v.aval for v in eqn.invars], eqn.params, eqn)


def _answer(policy: Policy, prim: Primitive, avals: Sequence[Any], params: Mapping[str, Any],
            eqn: JaxprEqn | None = None) -> Answer:  # fmt: skip
    answer = policy(prim, *avals, **params)
    if (known := policy_answer(answer)) is not None:
        return known
    raise WrongArgument(
        f"policy={said(policy)}",
        f"it answered {answer!r}, of type {type(answer).__name__}, for {prim.name}",
        frame(eqn) if eqn else "",
        "call it: what it returns is a policy" if callable(answer) else
        "answer True (save), False (recompute) or a jax.ad_checkpoint.Offloadable",
    )  # fmt: skip


def check(policy: Any) -> Policy:
    """The policy itself (None: save everything), or an error if it is none."""
    if policy is None or policy is jax.checkpoint_policies.everything_saveable:
        return save_everything
    if isinstance(policy, Tagged):
        return policy.planned
    if not callable(policy):
        raise WrongArgument(
            f"policy={policy!r}",
            "a policy is a callable of a primitive, its input types and parameters",
            "",
            "take one of xform.policies or jax.checkpoint_policies",
        )
    given = next((given for maker, given in _MAKERS.items() if policy is maker), None)
    if given or isinstance(policy, type):
        raise WrongArgument(
            f"policy={policy.__name__}",
            "it makes policies, and is none",
            "",
            f"call it, such as policy={policy.__name__}({given or '...'})",
        )
    return policy


# What makes a policy, xform's and JAX's, with what it is given.
_MAKERS: dict[Any, str] = {
    budget: "'6 GiB'",
    save_only_these_names: "'name'",
    save_any_names_but_these: "'name'",
    save_from_both_policies: "one, other",
    offload_dots_with_no_batch_dims: "'device', 'pinned_host'",
    save_and_offload_only_these_names: "...",
    jax.checkpoint_policies.save_only_these_names: "'name'",
    jax.checkpoint_policies.save_any_names_but_these: "'name'",
    jax.checkpoint_policies.save_from_both_policies: "one, other",
    jax.checkpoint_policies.offload_dot_with_no_batch_dims: "'device', 'pinned_host'",
    jax.checkpoint_policies.save_and_offload_only_these_names: "...",
}
