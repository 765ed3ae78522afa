"""Which saved values wait for which cotangents, so that a recompute is neither merged nor early."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Var, broadcast_in_dim_p
from xform.cost import aval_bytes
from xform.hijax import is_vector
from xform.interpret.barrier import EARLY, Where, holdable
from xform.interpret.joint import Schedule, reads_of
from xform.passes.structured import body
from xform.table import traits

# The part of all that is made again, or kept, that may be merged with its first run on CPU.
_LIGHT = 1 / 50


@dataclasses.dataclass(frozen=True)
class Wait:
    """Values that wait for cotangents, on some backends."""

    saved: tuple[Var, ...]
    seeds: tuple[Var, ...]
    where: Where = "everywhere"


Waits = Mapping[int, Sequence[Wait]]


def waits(schedule: Schedule, whole: bool, together: bool) -> Waits:
    """What waits, by its place in `schedule.order`.

    `together` says that the forward part is in the same computation.

    In a region there is one place, its start. In a `whole` function, or the body of a loop, each
    run of recomputed equations waits for the cotangents of the equation that it is run again for:
    for the last of them that is in memory, lest a barrier put there what would be fused.

    Before the first work of the backward part a cotangent may be there before the forward part has
    ended, and what is made again is read at once. There only work waits, and on CPU and TPU what
    takes long for each element, which XLA would not repeat: of logits it keeps what a loss makes of
    them, beside them. All else is fused with what reads it. The compiler for GPUs makes one product
    of two small ones that read the same and of which none needs the other: there all that such work
    reads waits. Little of what is run again may be merged with its first run on CPU, where a
    barrier costs time.

    The compiler for TPUs repeats what it can fuse in each of its readers, in both parts, and would
    write what waits beside that. So nothing but work waits there, and what work reads that has more
    elements than what it is made of, which would be kept large; unless a policy was asked: a value
    that it does not save is not to be kept, whatever the compiler would take for the better.
    """
    key = "waits", whole, together
    if key not in schedule.cache:
        schedule.cache[key] = _each(schedule, together) if whole else _once(schedule)
    return schedule.cache[key]


def _once(schedule: Schedule) -> Waits:
    forward = {id(e) for e in schedule.joint.forward}
    saved = cover([e for e in schedule.order if id(e) in forward], schedule)
    return {0: [Wait(saved, schedule.joint.seeds)]} if saved else {}


def _each(schedule: Schedule, together: bool) -> Waits:
    written = {v for eqn in schedule.order if is_work(eqn) for v in reads_of(eqn, schedule.inner)}
    anchors = _anchors(schedule, written)
    forward = {id(e) for e in schedule.joint.forward}
    by_start: dict[int, Wait] = {}
    sizes: dict[int, int] = {}
    early: dict[int, Wait] = {}
    shared: dict[int, list[Wait]] = {}
    run: list[JaxprEqn] = []
    start, dear = 0, False
    for i, eqn in enumerate(schedule.order):
        if id(eqn) in forward:
            start = start if run else i
            run.append(eqn)
            continue
        cts = [v for v in reads_of(eqn, schedule.inner) if v in anchors]
        saved = cover(run, schedule) if cts else ()
        last, at = max((anchors[v] for v in cts), key=lambda anchor: anchor[1], default=(None, 0))
        work = any(map(is_work, run))
        if saved and last is not None and (work or at >= 0):
            fused = together and not (work or schedule.asked or _grows(run, schedule, written))
            by_start[start] = Wait(saved, (last,), "cpu and gpu" if fused else "everywhere")
            if work and at < 0 and together and (others := _operands(run, schedule, saved)):
                shared[start] = [Wait(others, (last,), "gpu")]
            if not work:
                sizes[start] = sum(aval_bytes(v.aval) for e in run for v in e.outvars)
        elif saved:
            early[start] = Wait(saved, tuple(cts), EARLY)
            dear = dear or any(map(_dear, run))
        run = []
    by_start |= early if dear else {}
    left = _LIGHT * sum((*sizes.values(), *(aval_bytes(v.aval) for v in schedule.kept)))
    for i in sorted(sizes, key=sizes.__getitem__):
        left -= sizes[i]
        if left < 0:
            break
        where = "gpu" if by_start[i].where == "cpu and gpu" else "accelerators"
        by_start[i] = dataclasses.replace(by_start[i], where=where)
    return {i: [wait, *shared.get(i, ())] for i, wait in by_start.items()}


def _anchors(schedule: Schedule, written: Set[Var]) -> dict[Var, tuple[Var, int]]:
    """For each value that depends on a cotangent, the last value in memory that it is made from.

    And the place in `schedule.order` of what makes that. In memory is what work reads (`written`)
    or makes; before the first work, the cotangents, and what of them takes no more or is a sum.
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
    """What work in a run reads that the run does not make, and that is not held back yet."""
    made = {*saved, *(v for e in run for v in e.outvars)}
    read = dict.fromkeys(v for e in run if is_work(e) for v in reads_of(e, schedule.inner))
    return tuple(v for v in read if v not in made and holdable(v.aval))


def is_work(eqn: JaxprEqn) -> bool:
    """Whether it is more than what a compiler fuses: its results are in memory."""
    of = traits(eqn.primitive)
    return any(map(is_work, body(eqn).equations)) if of.call else not of.fusible


def _grows(run: Sequence[JaxprEqn], schedule: Schedule, written: Set[Var]) -> bool:
    """Whether what a run makes and is written has more elements than each value that it reads."""
    made = [v for e in run for v in e.outvars]
    read = {v for e in run for v in reads_of(e, schedule.inner)}.difference(made)
    most = max((_size(v) for v in made if v in written), default=0)
    return most > max((_size(v) for v in read), default=0)


def _dear(eqn: JaxprEqn) -> bool:
    """Whether it takes long for each element, somewhere in it."""
    of = traits(eqn.primitive)
    return any(map(_dear, body(eqn).equations)) if of.call else of.dear


def cover(run: Sequence[JaxprEqn], schedule: Schedule) -> tuple[Var, ...]:
    """The fewest values, greedily, such that each recomputed equation depends on one of them.

    Equations that cost nothing may stay merged. What is repeated may not, be it a row's statistic:
    some fusions of XLA:CPU write the broadcast out. The values are among what the equations read
    and do not make themselves; the smallest is taken where it makes no difference, since what is
    held back may be copied.
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
    gain = {v: 0 for v in leaves if holdable(v.aval)}
    for i, over in enumerate(reached):
        for v in gain:
            if over & leaves[v]:
                gain[v] |= 1 << i
    left = (1 << len(reached)) - 1
    chosen: list[Var] = []
    while gain:
        best = max(gain, key=lambda v: ((gain[v] & left).bit_count(), -_size(v)))
        if not gain[best] & left:
            break
        chosen.append(best)
        left &= ~gain[best]
    return tuple(chosen)


def _folded(eqn: JaxprEqn, schedule: Schedule) -> bool:
    """Whether XLA makes an equation part of its reader: views of an input of the program.

    They are a transposed matrix, read by a product, and a reversed kernel, read by a convolution. A
    barrier would copy the input.
    """
    matrix = eqn.primitive is lax.transpose_p and len(eqn.params["permutation"]) == 2
    views = matrix or eqn.primitive is lax.rev_p
    return views and eqn.invars[0] not in schedule.joint.producer


def _repeated(v: Var, eqn: JaxprEqn) -> bool:
    """Whether an elementwise equation, or a broadcast, repeats the elements of an input."""
    x, y = _aval(v), _aval(eqn.outvars[0])
    if is_vector(x) or is_vector(y):
        return False
    if eqn.primitive is broadcast_in_dim_p:
        return x.size < y.size
    pairs = zip(x.shape, y.shape, strict=False)
    return x.ndim == y.ndim and x.size < y.size and all(a in (1, b) for a, b in pairs)


def _aval(v: Any) -> Any:
    return v.aval


def _size(v: Any) -> int:
    """The number of elements; 0 of a value that is no array."""
    return getattr(v.aval, "size", 0)
