"""Decide which saved values wait for which cotangents, so that recomputes run late and unmerged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Var, broadcast_in_dim_p
from xform.interpret.barrier import EARLY, Where, can_wait
from xform.interpret.cost import aval_bytes
from xform.interpret.joint import Schedule, reads_of
from xform.passes.structured import called_body
from xform.program.hijax import is_differentiable_hitype
from xform.registry.table import traits

# On CPU, recomputes that are not work may merge with the forward part, up to this fraction of the
# recomputed and saved bytes.
_MERGED_FRACTION = 1 / 50


@dataclasses.dataclass(frozen=True)
class Wait:
    """Saved values that wait for cotangents, on some backends."""

    saved: tuple[Var, ...]
    seeds: tuple[Var, ...]
    where: Where = "everywhere"


Waits = Mapping[int, Sequence[Wait]]


def find_waits(schedule: Schedule, whole: bool, together: bool) -> Waits:
    """Return what waits, by its place in `schedule.order`.

    With `together`, the forward part is in the same computation.

    In a region there is one place, its start. In a `whole` function, or the body of a loop, each
    run of recomputed equations waits for cotangents that the equation after it reads. It waits for
    the last such cotangent that is in memory, because a barrier on another value would write it to
    memory instead of fusing it.

    Before the first work of the backward part, a cotangent may be available before the forward part
    has ended, and recomputed values are read at once. There, recomputed work waits. On CPU and TPU,
    operations that are expensive for each element wait too. XLA would not repeat these: for logits
    it keeps the values that the loss computes from them, beside the logits. All other operations
    are fused with their readers. The GPU compiler merges two small products that read the same
    value, if neither needs the other. So on GPUs all operands of such work wait. On CPU, where a
    barrier costs time, small recomputes may merge with the forward part.

    The TPU compiler repeats what it can fuse for each reader, in both parts, and would write a
    value that waits in addition. So on TPUs only work waits, and operands of work that have more
    elements than the values they are computed from, because these would be kept at the larger size.
    If a policy decided about each value, everything waits: the compiler must not keep a value that
    the policy does not save, even if it estimates that to be faster.
    """
    key = "waits", whole, together
    if key not in schedule.cache:
        schedule.cache[key] = _each(schedule, together) if whole else _once(schedule)
    return schedule.cache[key]


def _once(schedule: Schedule) -> Waits:
    """Return one wait at the start: all recomputed values wait for the first cotangents."""
    forward = {id(e) for e in schedule.joint.forward}
    saved = greedy_cover([e for e in schedule.order if id(e) in forward], schedule)
    return {0: [Wait(saved, schedule.joint.seeds)]} if saved else {}


def _each(schedule: Schedule, together: bool) -> Waits:
    """Return a wait for each run of consecutive recomputed equations, by its first index."""
    written = {v for eqn in schedule.order if is_work(eqn) for v in reads_of(eqn, schedule.inner)}
    anchors = _anchors(schedule, written)
    forward = {id(e) for e in schedule.joint.forward}
    by_start: dict[int, Wait] = {}
    sizes: dict[int, int] = {}
    early: dict[int, Wait] = {}
    shared: dict[int, list[Wait]] = {}
    run: list[JaxprEqn] = []
    start, expensive = 0, False
    for i, eqn in enumerate(schedule.order):
        if id(eqn) in forward:
            start = start if run else i
            run.append(eqn)
            continue
        cts = [v for v in reads_of(eqn, schedule.inner) if v in anchors]
        saved = greedy_cover(run, schedule) if cts else ()
        last, at = max((anchors[v] for v in cts), key=lambda anchor: anchor[1], default=(None, 0))
        work = any(map(is_work, run))
        if saved and last is not None and (work or at >= 0):
            fused = together and not (
                work or schedule.decided_per_value or _grows(run, schedule, written)
            )
            by_start[start] = Wait(saved, (last,), "cpu and gpu" if fused else "everywhere")
            if work and at < 0 and together and (others := _operands(run, schedule, saved)):
                shared[start] = [Wait(others, (last,), "gpu")]
            if not work:
                sizes[start] = sum(aval_bytes(v.aval) for e in run for v in e.outvars)
        elif saved:
            early[start] = Wait(saved, tuple(cts), EARLY)
            expensive = expensive or any(map(_expensive, run))
        run = []
    by_start |= early if expensive else {}
    remaining = _MERGED_FRACTION * sum(
        (*sizes.values(), *(aval_bytes(v.aval) for v in schedule.saved))
    )
    for i in sorted(sizes, key=sizes.__getitem__):
        remaining -= sizes[i]
        if remaining < 0:
            break
        where = "gpu" if by_start[i].where == "cpu and gpu" else "accelerators"
        by_start[i] = dataclasses.replace(by_start[i], where=where)
    return {i: [wait, *shared.get(i, ())] for i, wait in by_start.items()}


def _anchors(schedule: Schedule, written: Set[Var]) -> dict[Var, tuple[Var, int]]:
    """For each value that depends on a cotangent, return its last source that is in memory.

    Also return the place in `schedule.order` of the equation that computes that source. Values that
    work reads (`written`) or computes are in memory. Before the first work, so are the cotangents,
    and values computed from them that are sums or take no more bytes.
    """
    anchors = {v: (v, -1) for v in schedule.joint.seeds}
    for i, eqn in enumerate(schedule.order):
        cts = [anchors[v] for v in reads_of(eqn, schedule.inner) if v in anchors]
        if not cts:
            continue
        last, at = max(cts, key=lambda anchor: anchor[1])
        work, sums = is_work(eqn), traits(eqn.primitive).fusion == "reduction"
        for v in eqn.outvars:
            if work or v in written:
                anchors[v] = v, i
            else:
                small = sums or aval_bytes(v.aval) <= aval_bytes(last.aval)
                anchors[v] = (v if at < 0 and small else last), at
    return anchors


def _operands(run: Sequence[JaxprEqn], schedule: Schedule, saved: Sequence[Var]) -> tuple[Var, ...]:
    """Return what work in a run reads that the run does not compute and that does not wait yet."""
    computed = {*saved, *(v for e in run for v in e.outvars)}
    read = dict.fromkeys(v for e in run if is_work(e) for v in reads_of(e, schedule.inner))
    return tuple(v for v in read if v not in computed and can_wait(v.aval))


def is_work(eqn: JaxprEqn) -> bool:
    """Whether an equation is more than a fusible operation: its results are in memory."""
    of = traits(eqn.primitive)
    return any(map(is_work, called_body(eqn).equations)) if of.call else not of.fusible


def _grows(run: Sequence[JaxprEqn], schedule: Schedule, written: Set[Var]) -> bool:
    """Whether a run writes a value that has more elements than each value that the run reads."""
    computed = [v for e in run for v in e.outvars]
    read = {v for e in run for v in reads_of(e, schedule.inner)}.difference(computed)
    most = max((_size(v) for v in computed if v in written), default=0)
    return most > max((_size(v) for v in read), default=0)


def _expensive(eqn: JaxprEqn) -> bool:
    """Whether an equation is expensive for each element, also in a nested program."""
    of = traits(eqn.primitive)
    return any(map(_expensive, called_body(eqn).equations)) if of.call else of.expensive


def greedy_cover(run: Sequence[JaxprEqn], schedule: Schedule) -> tuple[Var, ...]:
    """Return the fewest values, chosen greedily, so that each recompute depends on one of them.

    Equations that cost nothing may stay merged. But values whose elements are repeated may not,
    even a row's statistic: some fusions of XLA:CPU write the broadcast out. The chosen values are
    among those that the equations read and do not compute themselves. If several serve as well, the
    smallest is chosen, because a value that waits may be copied.
    """
    depends: dict[Var, int] = {}
    leaves: dict[Var, int] = {}
    reached: list[int] = []
    for eqn in run:
        over = 0
        for v in reads_of(eqn, schedule.inner):
            if v not in depends:
                depends[v] = leaves[v] = 1 << len(leaves)
            over |= depends[v]
        if id(eqn) in schedule.recomputed and not _folded(eqn, schedule):
            reached.append(over)
        reached += [
            depends[v] for v in reads_of(eqn, schedule.inner) if _repeated(v, eqn) and depends[v]
        ]
        depends.update((v, over) for v in eqn.outvars)
    gain = {v: 0 for v in leaves if can_wait(v.aval)}
    for i, over in enumerate(reached):
        for v in gain:
            if over & leaves[v]:
                gain[v] |= 1 << i
    remaining = (1 << len(reached)) - 1
    chosen: list[Var] = []
    while gain:
        best = max(gain, key=lambda v: ((gain[v] & remaining).bit_count(), -_size(v)))
        if not gain[best] & remaining:
            break
        chosen.append(best)
        remaining &= ~gain[best]
    return tuple(chosen)


def _folded(eqn: JaxprEqn, schedule: Schedule) -> bool:
    """Whether an equation is a view of a program input that XLA makes part of its reader.

    These are a transposed matrix, which a product reads, and a reversed kernel, which a convolution
    reads. A barrier would copy the input.
    """
    matrix = eqn.primitive is lax.transpose_p and len(eqn.params["permutation"]) == 2
    views = matrix or eqn.primitive is lax.rev_p
    return views and eqn.invars[0] not in schedule.joint.producer


def _repeated(v: Var, eqn: JaxprEqn) -> bool:
    """Whether an elementwise equation, or a broadcast, repeats the elements of an input."""
    x, y = _aval(v), _aval(eqn.outvars[0])
    if is_differentiable_hitype(x) or is_differentiable_hitype(y):
        return False
    if eqn.primitive is broadcast_in_dim_p:
        return x.size < y.size
    pairs = zip(x.shape, y.shape, strict=False)
    return x.ndim == y.ndim and x.size < y.size and all(a in (1, b) for a, b in pairs)


def _aval(v: Any) -> Any:
    return v.aval


def _size(v: Any) -> int:
    """Return the number of elements; 0 for a value that is not an array."""
    return getattr(v.aval, "size", 0)
