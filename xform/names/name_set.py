"""`NameSet`: which named values the remat regions of a program save, and which they offload.

A named value is a result of `jax.ad_checkpoint.checkpoint_name`. A remat region is the body of a
function under `jax.checkpoint`, such as a layer. `explore` makes the sets that a search chooses
from.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xform.errors import BudgetInfeasible
from xform.planner.costs.link import HOST
from xform.planner.infeasible import nothing_fits
from xform.policies import Budget

Fits = Callable[["WeighedNames"], bool]

# All sets of at most this many names are explored. With more names, the search is greedy.
_MAX_NAMES = 4


@dataclasses.dataclass(frozen=True)
class NamedValue:
    """The values of one name in the remat regions of a program.

    Attributes:
      name: the name that `checkpoint_name` gave.
      bytes: the bytes of these values on each device, in all layers together.
      where: the user's line that names the first of them.
    """

    name: str
    bytes: int
    where: str


@dataclasses.dataclass(frozen=True)
class NameSet:
    """The named values that every remat region saves or offloads. All others are recomputed.

    Attributes:
      saved: names of the values that stay on the device.
      offloaded: names of the values that wait in the host's memory.
    """

    saved: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()

    def policy(self) -> Callable[..., Any]:
        """Return the policy of `jax.checkpoint_policies` that saves and offloads these names."""
        if not self.offloaded:
            return jax.checkpoint_policies.save_only_these_names(*sorted(self.saved))
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=sorted(self.saved),
            names_which_can_be_offloaded=sorted(self.offloaded),
            offload_src=HOST.src,
            offload_dst=HOST.dst,
        )


@dataclasses.dataclass(frozen=True)
class WeighedNames:
    """A NameSet and its costs.

    Attributes:
      names: the saved and the offloaded names.
      recompute_flops: FLOPs that the backward pass recomputes and that XLA does not fuse.
      offloaded_bytes: bytes of the offloaded values.
      peak: the simulated peak of the program, arguments and outputs included.

    The other attributes are those of a `Choice` of plans, so that `planner/search_front.py` chooses
    names as it chooses plans.
    """

    names: NameSet
    recompute_flops: int
    offloaded_bytes: int
    peak: int

    @property
    def work(self) -> tuple[int, int]:
        """Recomputed FLOPs, then bytes sent to the host."""
        return self.recompute_flops, self.offloaded_bytes

    @property
    def key(self) -> NameSet:
        """What identifies the set."""
        return self.names

    @property
    def offloads(self) -> bool:
        """Whether a value waits in the host's memory."""
        return bool(self.names.offloaded)

    @property
    def lower_bound(self) -> int:
        """The simulated peak, which is known."""
        return self.peak

    # Remat regions are kept as they are written.
    has_asked_regions = True
    may_save_in_regions = False

    @property
    def order(self) -> tuple[Any, ...]:
        """The key that sorts sets: work, then bytes, then the number of names."""
        count = len(self.names.saved) + len(self.names.offloaded)
        return self.work, self.peak, count


def explore(
    values: Sequence[NamedValue],
    weigh: Callable[[NameSet], WeighedNames],
    may_offload: Callable[[NameSet], bool],
) -> list[WeighedNames]:
    """Weigh sets of names, and return them in the order of their work.

    Every subset of up to four names that matter is weighed. With more names, one name is added
    after the other: each time the one that spares the most FLOPs for its bytes. For each set that
    no other set beats, its largest values are also offloaded.

    Args:
      values: the named values in remat regions.
      weigh: returns the costs of a set.
      may_offload: whether the link to the host carries the offloaded values of a set.
    """
    names = [v.name for v in values]
    weighed: dict[NameSet, WeighedNames] = {}

    def cost(saved: Iterable[str]) -> WeighedNames:
        chosen = NameSet(frozenset(saved))
        if chosen not in weighed:
            weighed[chosen] = weigh(chosen)
        return weighed[chosen]

    nothing, everything = cost(()), cost(names)
    matter = [
        n
        for n in names
        if cost({n}).work < nothing.work or cost({*names} - {n}).work > everything.work
    ]
    if len(matter) <= _MAX_NAMES:
        sizes = range(2, len(matter) + 1)
        for subset in itertools.chain(*(itertools.combinations(matter, n) for n in sizes)):
            cost(subset)
    else:
        _add_greedily(matter, cost)
    by_size = [v.name for v in sorted(values, key=lambda v: -v.bytes)]
    offloading = [
        NameSet(frozenset(largest_first[n:]), frozenset(largest_first[:n]))
        for each in pareto(weighed.values())
        for largest_first in [[n for n in by_size if n in each.names.saved]]
        for n in range(1, len(largest_first) + 1)
    ]
    explored = (*weighed.values(), *map(weigh, filter(may_offload, offloading)))
    return sorted(explored, key=lambda each: each.order)


class NamesFront:
    """Sets of names in the order of their work; a front for `search_compiled`.

    Args:
      weighed: the sets.
      remedy: what to do if none of them fits a budget.
    """

    def __init__(self, weighed: Iterable[WeighedNames], remedy: str):
        self._weighed, self._remedy = sorted(weighed, key=lambda each: each.order), remedy
        self._pareto = pareto(self._weighed)

    def least_recompute(self, fits: Fits) -> WeighedNames | None:
        """Return the set of least work that fits; None if none fits."""
        return next(filter(fits, self._pareto), None)

    def cheaper(self, last: WeighedNames, fits: Fits) -> list[WeighedNames]:
        """Return the sets that fit and recompute less than `last`."""
        return [each for each in self._weighed if each.work < last.work and fits(each)]

    def smallest(self) -> list[WeighedNames]:
        """Return the sets that take the fewest bytes, the smallest first."""
        return self._pareto[::-1]

    def references(self) -> list[WeighedNames]:
        """Return the set without names, which a user could have written."""
        return [each for each in self._weighed if each.names == NameSet()]

    def without_offload(self) -> NamesFront:
        """Return the front of the sets that offload nothing."""
        kept = (each for each in self._weighed if not each.offloads)
        return NamesFront(kept, self._remedy)

    def refusal(self, budget: Budget, lowest: WeighedNames, size: int, by: str) -> BudgetInfeasible:
        """Return the error for a budget; see `ChoiceFront.refusal`."""
        return nothing_fits(budget, size, by, self._remedy)


def _add_greedily(names: Sequence[str], cost: Callable[[Iterable[str]], WeighedNames]) -> None:
    """Weigh growing sets: add the name that spares the most FLOPs for its bytes, again and again.

    `cost` weighs a set and stores the result.
    """
    chosen: frozenset[str] = frozenset()
    while rest := [n for n in names if n not in chosen]:
        before = cost(chosen)

        def flops_per_byte(name: str, before: WeighedNames = before) -> tuple[float, int]:
            after = cost(before.names.saved | {name})
            spared = before.recompute_flops - after.recompute_flops
            size = max(after.peak - before.peak, 1)
            # Of names that spare about as much for each byte, the smallest comes first.
            return float(f"{spared / size:.1e}"), -size

        chosen |= {max(rest, key=flops_per_byte)}


def pareto(weighed: Iterable[WeighedNames]) -> list[WeighedNames]:
    """Return the sets that take fewer simulated bytes than every set of at most their work.

    They are sorted by rising work, so their bytes fall.
    """
    front: list[WeighedNames] = []
    for each in sorted(weighed, key=lambda each: each.order):
        if not front or each.peak < front[-1].peak:
            front.append(each)
    return front
