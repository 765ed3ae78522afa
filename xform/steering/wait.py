"""Decide which saved values wait for which cotangents.

The backward part of a Joint (`interpret.joint`) recomputes some values from saved ones. Without a
barrier (`steering.barrier`) XLA may merge such a recompute with the same operations of the forward
part, or run it long before the backward part needs it. So values that the recompute reads wait at a
barrier for a cotangent.

Work means an operation that XLA does not fuse, such as a matrix product. Its results are in memory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Var, broadcast_in_dim_p
from xform.interpret.cost import aval_bytes, size
from xform.interpret.joint import Schedule, reads_of
from xform.passes.structured import called_body
from xform.program.hijax import is_differentiable_hitype
from xform.registry.table import traits
from xform.steering.barrier import EARLY, Where, can_wait

# On CPU, the smallest recomputes without work have no barrier. Together their results may take this
# fraction of the bytes of all saved values and of all results of recomputes without work.
_MERGED_FRACTION = 1 / 50
# On CPU, a value does not wait if it takes this many times the bytes that are recomputed from it.
_LARGER = 4


@dataclasses.dataclass(frozen=True)
class Wait:
    """Saved values that wait for cotangents at one barrier.

    Attributes:
      saved: the values that wait; inputs and other values of the forward part may be among them.
      seeds: the values that they wait for: cotangents, and values computed from these.
      where: the backends on which they wait.
    """

    saved: tuple[Var, ...]
    seeds: tuple[Var, ...]
    where: Where = "everywhere"


# The waits before each equation of `Schedule.order`, by the index of the equation.
Waits = Mapping[int, Sequence[Wait]]


def find_waits(schedule: Schedule, whole: bool, together: bool) -> Waits:
    """Return the waits for the recomputes of a Schedule.

    With `whole`, the Joint belongs to a whole function or a loop's body; else to a remat region.
    With `together`, the forward part is in the same XLA program.

    A remat region has one wait, at its start. In a function or a loop's body, each run of
    consecutive recomputed equations is one recompute. It waits for a cotangent that the equation
    after the run reads. That cotangent must be in memory, because a barrier makes XLA write it
    there. If there are several, the recompute waits for the one that is computed last. The other
    rules follow from what the compilers do:

    - The beginning of the backward part, before its first work, is special. Cotangents may be
      available there before the forward part has ended, and XLA fuses most recomputed operations
      with their readers. So a recompute at the beginning waits only if it contains work. But if one
      of these recomputes has an operation that is expensive for each element, such as `exp`, all of
      them wait on CPU and TPU. Otherwise XLA would not repeat that operation but keep its result:
      for logits it would keep both the logits and what the loss computes from them. An array waits
      there once, and what is recomputed from it does not wait again: between two barriers XLA would
      write it to memory, which costs nothing for a single number.
    - The GPU compiler merges two small products that read the same value, if neither needs the
      other. So on GPUs all operands of recomputed work at the beginning wait.
    - XLA:CPU would reverse the kernels of all convolutions early. Other compilers make a reversal
      part of the convolution, and a barrier would copy the kernel. So a kernel waits on CPU alone.
    - On CPU a barrier costs time, so small recomputes do not wait (`_MERGED_FRACTION`). Nor does a
      value that is much larger than what is recomputed from it (`_LARGER`): a barrier copies it.
    - The TPU compiler repeats fusible operations for each reader in both parts anyway, and would
      write a value that waits to memory. So on TPUs a recompute waits only in two cases: if it
      contains work, or if work reads one of its results that has more elements than each value the
      recompute reads. XLA would keep that larger result.
    - If a policy decided about each value alone, every recompute waits: XLA must not keep a value
      that the policy does not save, even if XLA estimates that keeping it is faster.
    """
    key = "waits", whole, together
    if key not in schedule.cache:
        schedule.cache[key] = _waits_of_runs(schedule, together) if whole else _one_wait(schedule)
    return schedule.cache[key]


def _one_wait(schedule: Schedule) -> Waits:
    """Return one wait at the start: all recomputed values wait for the first cotangents."""
    forward = {id(e) for e in schedule.joint.forward}
    run = [e for e in schedule.order if id(e) in forward]
    saved, kernels = greedy_cover(run, schedule), _kernels(run, schedule)
    seeds = schedule.joint.seeds
    waits = Wait(saved, seeds), Wait(kernels, seeds, "cpu")
    return {0: [wait for wait in waits if wait.saved]}


def _waits_of_runs(schedule: Schedule, together: bool) -> Waits:
    """Return a wait for each run of consecutive recomputed equations, by its first index."""
    read_by_work = {
        v for eqn in schedule.order if is_work(eqn) for v in reads_of(eqn, schedule.inner)
    }
    anchors = _anchors(schedule, read_by_work)
    forward = {id(e) for e in schedule.joint.forward}
    by_start: dict[int, Wait] = {}
    of_kernels: dict[int, Wait] = {}
    bytes_without_work: dict[int, int] = {}
    early: dict[int, Wait] = {}
    operands: dict[int, Wait] = {}
    run: list[JaxprEqn] = []
    waits_early: set[Var] = set()
    start, early_is_expensive = 0, False
    for i, eqn in enumerate(schedule.order):
        if id(eqn) in forward:
            start = start if run else i
            run.append(eqn)
            continue
        cts = [v for v in reads_of(eqn, schedule.inner) if v in anchors]
        saved = greedy_cover(run, schedule) if cts else ()
        last, last_index = max((anchors[v] for v in cts), key=lambda anchor: anchor[1],
                               default=(None, 0))  # fmt: skip
        work = any(map(is_work, run))
        if last is not None and (work or last_index >= 0):
            fused = together and not (
                work or schedule.decided_per_value or _grows(run, schedule, read_by_work)
            )
            if saved:
                by_start[start] = Wait(saved, (last,), "cpu and gpu" if fused else "everywhere")
            if kernels := _kernels(run, schedule):
                of_kernels[start] = Wait(kernels, (last,), "cpu")
            if not work and (saved or kernels):
                bytes_without_work[start] = sum(map(_computed_bytes, run))
            first_work = saved and work and last_index < 0 and together
            if first_work and (others := _operands(run, schedule, saved)):
                operands[start] = Wait(others, (last,), "gpu")
        elif saved:
            early_is_expensive = early_is_expensive or any(map(_expensive, run))
            if saved := tuple(v for v in saved if v not in waits_early):
                early[start] = Wait(saved, tuple(cts), EARLY)
            waits_early.update(v for v in (*saved, *_results(run)) if size(v) > 1)
        run = []
    by_start |= early if early_is_expensive else {}
    saved_bytes = sum(aval_bytes(v.aval) for v in schedule.saved)
    remaining = _MERGED_FRACTION * (sum(bytes_without_work.values()) + saved_bytes)
    for i in sorted(bytes_without_work, key=bytes_without_work.__getitem__):
        remaining -= bytes_without_work[i]
        copied = sum(aval_bytes(v.aval) for v in by_start[i].saved) if i in by_start else 0
        if remaining < 0 and copied <= _LARGER * bytes_without_work[i]:
            continue
        of_kernels.pop(i, None)
        if i in by_start:
            where = "gpu" if by_start[i].where == "cpu and gpu" else "accelerators"
            by_start[i] = dataclasses.replace(by_start[i], where=where)
    waits = collections.defaultdict[int, list[Wait]](list)
    for i, wait in (*by_start.items(), *of_kernels.items(), *operands.items()):
        waits[i].append(wait)
    return waits


def _anchors(schedule: Schedule, read_by_work: Set[Var]) -> dict[Var, tuple[Var, int]]:
    """Return, for each value that depends on a cotangent, its anchor: a value to wait for instead.

    The anchor is in memory. It is the value itself if that is in memory, else the last value in
    memory that it is computed from. Values that work reads or computes are in memory. Before the
    first work, the cotangents count as in memory too, and so do values computed from them that are
    sums or take no more bytes than their anchor.

    With each anchor, also return an index in `schedule.order`. Of the value and everything it is
    computed from, take the values that work reads or computes: the index is of the equation that
    computes the last of these. It is -1 if there are none, before the first work.
    """
    anchors = {v: (v, -1) for v in schedule.joint.seeds}
    for i, eqn in enumerate(schedule.order):
        cts = [anchors[v] for v in reads_of(eqn, schedule.inner) if v in anchors]
        if not cts:
            continue
        last, last_index = max(cts, key=lambda anchor: anchor[1])
        work, sums = is_work(eqn), traits(eqn.primitive).fusion == "reduction"
        for v in eqn.outvars:
            if work or v in read_by_work:
                anchors[v] = v, i
            else:
                small = sums or aval_bytes(v.aval) <= aval_bytes(last.aval)
                anchors[v] = (v if last_index < 0 and small else last), last_index
    return anchors


def _operands(run: Sequence[JaxprEqn], schedule: Schedule, saved: Sequence[Var]) -> tuple[Var, ...]:
    """Return the operands of work in a run that the run does not compute and that do not wait."""
    computed = {*saved, *_results(run)}
    read = dict.fromkeys(v for e in run if is_work(e) for v in reads_of(e, schedule.inner))
    return tuple(v for v in read if v not in computed and can_wait(v.aval))


def _results(run: Sequence[JaxprEqn]) -> list[Var]:
    return [v for eqn in run for v in eqn.outvars]


def _computed_bytes(eqn: JaxprEqn) -> int:
    """Return the bytes of all values that an equation computes, also inside a call."""
    if traits(eqn.primitive).call:
        return sum(map(_computed_bytes, called_body(eqn).equations))
    return sum(aval_bytes(v.aval) for v in eqn.outvars)


def is_work(eqn: JaxprEqn) -> bool:
    """Whether an equation is work, or a call that contains work: XLA does not fuse all of it."""
    facts = traits(eqn.primitive)
    return any(map(is_work, called_body(eqn).equations)) if facts.call else not facts.fusible


def _grows(run: Sequence[JaxprEqn], schedule: Schedule, read_by_work: Set[Var]) -> bool:
    """Whether work reads a value of a run that has more elements than each value the run reads."""
    computed = _results(run)
    read = {v for e in run for v in reads_of(e, schedule.inner)}.difference(computed)
    most = max((size(v) for v in computed if v in read_by_work), default=0)
    return most > max((size(v) for v in read), default=0)


def _expensive(eqn: JaxprEqn) -> bool:
    """Whether an equation is expensive for each element, also in a nested program."""
    facts = traits(eqn.primitive)
    return any(map(_expensive, called_body(eqn).equations)) if facts.call else facts.expensive


def greedy_cover(run: Sequence[JaxprEqn], schedule: Schedule) -> tuple[Var, ...]:
    """Choose, greedily, few values to wait at a barrier, such that each recompute of a run waits.

    The values are chosen among those that the run reads and does not compute. Each recomputed
    equation must depend on a chosen one. So must each value that an equation broadcasts, even a
    row's statistic, because some fusions of XLA:CPU write the broadcast out. Views and cheap
    functions of constants need not wait: the compiler may merge them with the forward part. Among
    values that serve equally well, the smallest is chosen, because a value that waits may be
    copied.
    """
    # Sets of values that the run reads are bit masks: each such value has one bit.
    bit_of: dict[Var, int] = {}
    sources: dict[Var, int] = {}  # for each value, the values that it depends on
    targets: list[int] = []  # for each equation or broadcast to delay, the values that it reads
    for eqn in run:
        eqn_sources = 0
        for v in reads_of(eqn, schedule.inner):
            if v not in sources:
                sources[v] = bit_of[v] = 1 << len(bit_of)
            eqn_sources |= sources[v]
        if id(eqn) in schedule.recomputed and not _folded(eqn, schedule):
            targets.append(eqn_sources)
        targets += [
            sources[v] for v in reads_of(eqn, schedule.inner) if _repeated(v, eqn) and sources[v]
        ]
        sources.update((v, eqn_sources) for v in eqn.outvars)
    covered = {v: 0 for v in bit_of if can_wait(v.aval)}  # the targets that depend on each value
    for i, target_sources in enumerate(targets):
        for v in covered:
            if target_sources & bit_of[v]:
                covered[v] |= 1 << i
    remaining = (1 << len(targets)) - 1
    chosen: list[Var] = []
    while covered:
        best = max(covered, key=lambda v: ((covered[v] & remaining).bit_count(), -size(v)))
        if not covered[best] & remaining:
            break
        chosen.append(best)
        remaining &= ~covered[best]
    return tuple(chosen)


def _folded(eqn: JaxprEqn, schedule: Schedule) -> bool:
    """Whether an equation transposes a matrix, or reverses a kernel, that is a program's input.

    XLA folds such an equation into the product or the convolution that reads it. A barrier would
    copy the input.
    """
    matrix = eqn.primitive is lax.transpose_p and len(eqn.params["permutation"]) == 2
    views = matrix or eqn.primitive is lax.rev_p
    return views and eqn.invars[0] not in schedule.joint.producer


def _kernels(run: Sequence[JaxprEqn], schedule: Schedule) -> tuple[Var, ...]:
    """Return the inputs of the program that a run reverses: kernels of convolutions."""
    reversals = [eqn for eqn in run if eqn.primitive is lax.rev_p and _folded(eqn, schedule)]
    read = dict.fromkeys(v for eqn in reversals for v in reads_of(eqn, schedule.inner))
    return tuple(read)


def _repeated(v: Var, eqn: JaxprEqn) -> bool:
    """Whether a broadcast, or an elementwise equation, repeats the elements of an input.

    An elementwise operation of JAX repeats an axis of one element as NumPy does.
    """
    x, y = _aval(v), _aval(eqn.outvars[0])
    if is_differentiable_hitype(x) or is_differentiable_hitype(y):
        return False
    if size(v) >= size(eqn.outvars[0]):
        return False
    pairs = zip(x.shape, y.shape, strict=False)
    one_to_one = x.ndim == y.ndim and all(a in (1, b) for a, b in pairs)
    return eqn.primitive is broadcast_in_dim_p or one_to_one


def _aval(v: Any) -> Any:
    return v.aval
