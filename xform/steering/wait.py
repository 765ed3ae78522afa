"""Decide which saved values wait for which cotangents.

The backward part of a Joint (`interpret.joint`) recomputes some values from saved ones. Without a
barrier (`steering.barrier`) XLA may merge such a recompute with the same operations of the forward
part, or run it long before the backward part needs it. So values that the recompute reads wait at a
barrier for a cotangent.

All compilers need this, with JAX 0.10.2 to 0.12.0.1. The cost is that of the barriers. The switch
is `recomputes_wait`: without it, layers with `remat` took 4.4 times the temporary bytes on a CPU
and 3.6 times on an H100 (`experiments/steering`).

Work means an operation that XLA does not fuse, such as a matrix product. Its results are in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from jax import lax

from xform._jax import JaxprEqn, Var
from xform.interpret.cost import aval_bytes, size
from xform.interpret.joint import Schedule, reads_of
from xform.passes.structured import called_body
from xform.program.hijax import is_differentiable_hitype
from xform.registry.table import traits
from xform.steering.barrier import EARLY, Where, can_wait
from xform.steering.settings import steering

# On CPU, the smallest recomputes without work have no barrier. Together their results may take this
# fraction of the bytes of all saved values and of all results of recomputes without work.
_MERGED_FRACTION = 1 / 50
# On CPU, a value does not wait if it takes this many times the bytes that are recomputed from it.
_LARGER = 4
# Where a wait still is if it is not on CPUs.
_WITHOUT_CPU: dict[Where, Where] = {"everywhere": "accelerators", "cpu and gpu": "gpu"}


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
    if not steering().recomputes_wait:
        return {}
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


@dataclasses.dataclass(frozen=True, eq=False)
class _RecomputedRun:
    """Consecutive recomputed equations. The equation after them reads a cotangent.

    Attributes:
      start: the index of the first equation in `Schedule.order`.
      equations: the recomputed equations.
      saved: values that make all of these equations wait if they do (`greedy_cover`).
      cotangents: the cotangents that the equation after them reads.
      anchor: the last of the anchors of these cotangents (`_anchors`).
      first: whether that anchor is available before the first work of the backward part.
      work: whether the run contains work.
    """

    start: int
    equations: tuple[JaxprEqn, ...]
    saved: tuple[Var, ...]
    cotangents: tuple[Var, ...]
    anchor: Var
    first: bool
    work: bool

    @property
    def early(self) -> bool:
        """Whether the run is at the beginning of the backward part and contains no work."""
        return self.first and not self.work

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of all values that the run computes."""
        return sum(map(_computed_bytes, self.equations))


def _waits_of_runs(schedule: Schedule, together: bool) -> Waits:
    """Return the waits of each run of consecutive recomputed equations, by its first index."""
    read_by_work = {
        v for eqn in schedule.order if is_work(eqn) for v in reads_of(eqn, schedule.inner)
    }
    runs = _runs(schedule, _anchors(schedule, read_by_work))
    waits = {run: _late_waits(run, schedule, together, read_by_work) for run in runs}
    waits |= _early_waits([run for run in runs if run.early])
    late = [run for run in runs if waits[run] and not run.early]
    for run in _small_runs(late, schedule):
        waits[run] = [
            dataclasses.replace(wait, where=_WITHOUT_CPU[wait.where])
            for wait in waits[run]
            if wait.where in _WITHOUT_CPU
        ]
    return {run.start: waits[run] for run in runs if waits[run]}


def _runs(schedule: Schedule, anchors: Mapping[Var, tuple[Var, int]]) -> list[_RecomputedRun]:
    """Return the runs of recomputed equations before an equation that reads a cotangent."""
    forward = {id(e) for e in schedule.joint.forward}
    groups = itertools.groupby(enumerate(schedule.order), lambda item: id(item[1]) in forward)
    blocks = [(recomputed, list(items)) for recomputed, items in groups]
    runs: list[_RecomputedRun] = []
    for (recomputed, block), (_, after) in itertools.pairwise(blocks):
        reads = reads_of(after[0][1], schedule.inner)
        cotangents = tuple(v for v in reads if v in anchors)
        if not (recomputed and cotangents):
            continue
        start, equations = block[0][0], tuple(eqn for _, eqn in block)
        anchor, index = max((anchors[v] for v in cotangents), key=lambda anchor: anchor[1])
        saved, work = greedy_cover(equations, schedule), any(map(is_work, equations))
        runs.append(_RecomputedRun(start, equations, saved, cotangents, anchor, index < 0, work))
    return runs


def _late_waits(
    run: _RecomputedRun, schedule: Schedule, together: bool, read_by_work: Set[Var]
) -> list[Wait]:
    """Return the waits of a run for the anchor of its cotangents, none if the run is early."""
    if run.early:
        return []
    fusible = not (run.work or schedule.decided_per_value or _grows(run, schedule, read_by_work))
    where: Where = "cpu and gpu" if together and fusible else "everywhere"
    merged = run.first and run.work and bool(run.saved) and together and steering().operands_wait
    waits = (
        Wait(run.saved, (run.anchor,), where),
        Wait(_kernels(run.equations, schedule), (run.anchor,), "cpu"),
        Wait(_operands(run, schedule) if merged else (), (run.anchor,), "gpu"),
    )
    return [wait for wait in waits if wait.saved]


def _small_runs(runs: Sequence[_RecomputedRun], schedule: Schedule) -> Iterator[_RecomputedRun]:
    """Yield the runs without work that do not wait on a CPU: it would cost more than it saves."""
    without_work = sorted((run for run in runs if not run.work), key=lambda run: run.bytes)
    saved_bytes = sum(aval_bytes(v.aval) for v in schedule.saved)
    remaining = _MERGED_FRACTION * (sum(run.bytes for run in without_work) + saved_bytes)
    for run in without_work:
        remaining -= run.bytes
        copied = sum(aval_bytes(v.aval) for v in run.saved)
        if remaining >= 0 or copied > _LARGER * run.bytes:
            yield run


def _early_waits(runs: Sequence[_RecomputedRun]) -> dict[_RecomputedRun, list[Wait]]:
    """Return the waits of early runs, each value once; none unless an operation of them is slow."""
    runs = [run for run in runs if run.saved]
    slow = any(_expensive(eqn) for run in runs for eqn in run.equations)
    if not (slow and steering().early_recomputes_wait):
        return {}
    waiting: set[Var] = set()
    waits: dict[_RecomputedRun, list[Wait]] = {}
    for run in runs:
        saved = tuple(v for v in run.saved if v not in waiting)
        waits[run] = [Wait(saved, run.cotangents, EARLY)] if saved else []
        waiting.update(v for v in (*saved, *_results(run.equations)) if size(v) > 1)
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


def _operands(run: _RecomputedRun, schedule: Schedule) -> tuple[Var, ...]:
    """Return the operands of work in a run that the run does not compute and that do not wait."""
    computed = {*run.saved, *_results(run.equations)}
    work = filter(is_work, run.equations)
    read = dict.fromkeys(v for eqn in work for v in reads_of(eqn, schedule.inner))
    return tuple(v for v in read if v not in computed and can_wait(v.aval))


def _results(run: Sequence[JaxprEqn]) -> list[Var]:
    return [v for eqn in run for v in eqn.outvars]


def _computed_bytes(eqn: JaxprEqn) -> int:
    """Return the bytes of all values that an equation computes, also inside a call."""
    if traits(eqn.primitive).call:
        return sum(map(_computed_bytes, called_body(eqn).equations))
    return sum(aval_bytes(v.aval) for v in eqn.outvars)


def is_work(eqn: JaxprEqn) -> bool:
    """Return whether an equation is work or a call that contains work, which XLA does not fuse."""
    facts = traits(eqn.primitive)
    return any(map(is_work, called_body(eqn).equations)) if facts.call else not facts.fusible


def _grows(run: _RecomputedRun, schedule: Schedule, read_by_work: Set[Var]) -> bool:
    """Return whether work reads a value of a run that is larger than all values the run reads."""
    computed = _results(run.equations)
    read = {v for e in run.equations for v in reads_of(e, schedule.inner)}.difference(computed)
    most = max((size(v) for v in computed if v in read_by_work), default=0)
    return most > max((size(v) for v in read), default=0)


def _expensive(eqn: JaxprEqn) -> bool:
    """Return whether an equation is expensive for each element, also in a nested program."""
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
    """Return whether an equation transposes a matrix or reverses a kernel that is an input.

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
    """Return whether a broadcast, or an elementwise equation, repeats the elements of an input.

    An elementwise operation of JAX repeats an axis of one element as NumPy does.
    """
    x, y = _aval(v), _aval(eqn.outvars[0])
    if is_differentiable_hitype(x) or is_differentiable_hitype(y):
        return False
    if size(v) >= size(eqn.outvars[0]):
        return False
    pairs = zip(x.shape, y.shape, strict=False)
    one_to_one = x.ndim == y.ndim and all(a in (1, b) for a, b in pairs)
    return traits(eqn.primitive).view or one_to_one


def _aval(v: Any) -> Any:
    return v.aval
