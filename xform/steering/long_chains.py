"""Find values of the backward part that XLA:CPU should compute once for all their readers.

XLA:CPU fuses a chain of cheap operations into each of its readers, however long the chain is. In a
network with residual connections, the cotangent of a layer's input is such a chain through all
later layers. So the compiled program grows with the square of the number of layers.

But a matrix product reads that cotangent too, so XLA writes it to memory in any case. If it is
written there before any reader runs (`materialize.py`), all readers read it from memory, and no
chain is longer than one layer.

Two products that read the same matrix both read it from memory, so they do not need this. But two
products that read a value with more or fewer axes than a matrix may each read it in a shape of its
own, and then XLA computes the chain for each.

Only XLA:CPU needs this, with JAX 0.10.2 to 0.12.0.1. It saves instructions, not memory. It costs
nothing, because the value is in memory anyway. The switch is `long_chains_written`: without it,
eight layers took 1.3 times the instructions (`experiments/steering`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import size
from xform.interpret.joint import Schedule, reads_of
from xform.registry.table import traits
from xform.steering.barrier import Where
from xform.steering.must_materialize import plain
from xform.steering.settings import steering
from xform.steering.wait import is_work

# A chain with more operations than this is long.
_LONG = 8
# A value with fewer elements than this is small: repeating its chain costs little.
_SMALL = 1024


def shared_values(schedule: Schedule) -> dict[Var, Where]:
    """Return the values of the backward part to write to memory, all on "cpu".

    Each of these values is the result of a long chain of cheap operations. Either a product and a
    sum read it, or it is not a matrix and two products read it. The result is cached on the
    Schedule.
    """
    if not steering().long_chains_written:
        return {}
    if "shared" not in schedule.cache:
        where: dict[Var, Where] = {v: "cpu" for v in _shared(schedule)}
        schedule.cache["shared"] = where
    return schedule.cache["shared"]


def _shared(schedule: Schedule) -> Iterator[Var]:
    """Yield the values that `shared_values` describes, in the order of the backward part."""
    reads = [(eqn, frozenset(reads_of(eqn, schedule.inner))) for eqn in schedule.order]
    products = Counter(v for eqn, read in reads if is_work(eqn) for v in read)
    sums = {v for eqn, read in reads if _adds(eqn) for v in read}
    chains: dict[Var, frozenset[int]] = {}
    for eqn, read in reads:
        if traits(eqn.primitive).fusion not in ("elementwise", "movement"):
            continue
        chain = frozenset((id(eqn),)).union(*(chains[v] for v in read if v in chains))
        chain = frozenset(itertools.islice(chain, _LONG + 1))  # a longer chain has the same effect
        for v in eqn.outvars:
            aval: Any = v.aval
            two_shapes = products[v] > 1 and aval.ndim != 2
            shared_read = products[v] and (v in sums or two_shapes)
            if shared_read and len(chain) > _LONG and plain(v) and size(v) >= _SMALL:
                yield v  # the chains of its readers begin here
            else:
                chains[v] = chain


def _adds(eqn: JaxprEqn) -> bool:
    """Return whether an equation adds or subtracts two values, and so continues the chain."""
    neutral = traits(eqn.primitive).neutral
    return neutral is not None and neutral[0] == 0
