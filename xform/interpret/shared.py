"""Find values of the backward part that XLA:CPU should compute once for all their readers.

XLA:CPU fuses a chain of cheap operations into each of its readers, however long the chain is. In a
network with residual connections, the cotangent of a layer's input is such a chain through all
later layers. So the compiled program grows with the square of the number of layers. But a product
reads that cotangent, so it is in memory in any case. If it is written there first
(`materialize.py`), all other readers read it from memory, and each chain ends within one layer.

Two products that read the same matrix read it from memory. Two products that read a value with more
or fewer axes may each read it in another shape, and then the chain is computed for each.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax import lax

from xform._jax import Var, jax_primitives
from xform.interpret.barrier import Where
from xform.interpret.joint import Schedule, reads_of
from xform.interpret.must_materialize import plain
from xform.interpret.wait import is_work
from xform.registry.table import traits

# Operations through which the chain of a cotangent continues.
_SUMS = lax.add_p, lax.sub_p, jax_primitives.add_jaxvals_p
# XLA handles chains of at most this many operations.
_LONG = 8
# XLA handles values with fewer elements than this.
_FEW = 1024


def shared_values(schedule: Schedule) -> dict[Var, Where]:
    """Return values that end a long cheap chain and are read by a product and another operation."""
    if "shared" not in schedule.cache:
        where: dict[Var, Where] = {v: "cpu" for v in _shared(schedule)}
        schedule.cache["shared"] = where
    return schedule.cache["shared"]


def _shared(schedule: Schedule) -> Iterator[Var]:
    """Yield the values that `shared_values` describes, in the order of the backward part."""
    reads = [(eqn, frozenset(reads_of(eqn, schedule.inner))) for eqn in schedule.order]
    products = Counter(v for eqn, read in reads if is_work(eqn) for v in read)
    sums = {v for eqn, read in reads if eqn.primitive in _SUMS for v in read}
    chains: dict[Var, frozenset[int]] = {}
    for eqn, read in reads:
        if traits(eqn.primitive).fusion not in ("elementwise", "movement"):
            continue
        chain = frozenset((id(eqn),)).union(*(chains[v] for v in read if v in chains))
        chain = frozenset(itertools.islice(chain, _LONG + 1))  # a longer chain has the same effect
        for v in eqn.outvars:
            aval: Any = v.aval
            shared_read = products[v] and (v in sums or (products[v] > 1 and aval.ndim != 2))
            if shared_read and len(chain) > _LONG and plain(v) and aval.size >= _FEW:
                yield v
            else:
                chains[v] = chain
