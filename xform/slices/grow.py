"""Find the largest region of a program that runs in slices along one axis of a value.

The search starts at a value and goes in two directions. Backward: the equation that makes a sliced
value joins the region if it can run in slices. Otherwise the value is an input of the region, cut
into slices. Forward, from the start only: an equation that reads a sliced value joins the region if
it can, and its other operands are sliced as it needs them. Otherwise the value leaves the region:
its slices are joined again.

A region runs in one loop. So a value that the loop completes only at its end, such as a sum over
the axis, cannot be read in the same loop. Each equation has a *level*: the number of loops that
must have ended before it can run. The region is what has the level of the start. If the start
itself has a level above 0, some values that the region reads in full were part of it. The search
is then repeated with these values computed before the loop. So it is if an equation of the next
level needs only small values in full that do not depend on the start.

Cost: a few look-ups for each equation and operand, whatever the size of the values.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable

from xform._jax import JaxprEqn, Literal, Var, has_effects
from xform.interpret.cost import aval_bytes
from xform.program.ir import Program
from xform.slices import slicing
from xform.slices.bodies import Axes, Bodies, BodySlices, FindBodySlices
from xform.slices.nested import has_body, nested_slicing, runs_unknown_body
from xform.slices.shards import shard_length
from xform.slices.slicing import Slicing
from xform.slices.sums import sums_of_body

# How often the search is repeated with more values computed before the loop.
_ROUNDS = 4
# Values are computed before the loop for a later equation if they take this many times fewer bytes
# than the start.
_CHEAP = 8


class Growth:
    """The equations of a program that run in slices, collected step by step.

    Attributes:
      axes: the axis of each value in the region.
      members: how each equation of the region runs, by its position in the program.
      whole: whether the program is a body, which must run in slices as a whole. Then all readers
        of a sliced value must join.
      with_sums: whether sums over the axis may occur in a body.
    """

    def __init__(self, prog: Program, n: int, whole: bool = False, kept_out: Iterable[int] = (),
                 rules: frozenset[str] = frozenset(), with_sums: bool = True):  # fmt: skip
        self.prog, self.n, self.whole, self._rules = prog, n, whole, rules
        self.with_sums = with_sums
        self.axes: dict[Var, int] = {}
        self.members: dict[int, Slicing] = {}
        self._kept_out = frozenset(kept_out)
        self._demands: list[tuple[Var, int]] = []
        self._forward: list[Var] = []
        self._forwarded: set[Var] = set()
        self._start: tuple[Var, int] | None = None
        self._is_valid = True

    def start(self, v: Var, axis: int, forward: Iterable[Var]) -> None:
        """Grow the region around a value sliced along `axis`, then forward from other values."""
        self._start = v, axis
        self._demand(v, axis)
        self._push(v)
        self._run()
        self._forward += [y for y in forward if y in self.axes]
        self._run()

    def demand(self, v: Var, axis: int) -> bool:
        """Grow a body such that a variable is sliced; return whether it can be."""
        self._demands.append((v, axis))
        self._run()
        return self._is_valid

    def _run(self) -> None:
        """Go backward first, then forward, until nothing is left to do."""
        while self._is_valid and (self._demands or self._forward):
            if self._demands:
                self._is_valid = self._demand(*self._demands.pop()) or not self.whole
                continue
            v = self._forward.pop()
            for i in readers(self.prog).get(v, ()):
                self._is_valid = self._read(v, i) or not self.whole

    def _push(self, v: Var) -> None:
        """Go forward from a value, once."""
        if v not in self._forwarded:
            self._forwarded.add(v)
            self._forward.append(v)

    def _axis(self, v: Var) -> int | None:
        """Return the axis of a value in the region, or of the start."""
        if self._start is not None and v is self._start[0]:
            return self._start[1]
        return self.axes.get(v)

    def _demand(self, v: Var, axis: int) -> bool:
        """Slice a value along an axis: let the equation that makes it join, if it can."""
        if v in self.axes:
            return self.axes[v] == axis
        made = producers(self.prog).get(v)
        if made is None:  # an input
            if self.whole and shard_length(v, axis) % self.n == 0:
                self.axes[v] = axis
                self._push(v)
                return True
            return False
        i, position = made
        found = None if i in self.members else self._slicing(i, {}, {position: axis})
        return found is not None and self._join(i, found)

    def _read(self, v: Var, i: int) -> bool:
        """Let an equation that reads a sliced value join, if it can."""
        eqn, axis = self.prog.equations[i], self._axis(v)
        assert axis is not None
        if i not in self.members:
            at = [k for k, operand in enumerate(eqn.invars) if operand is v]
            options = (self._slicing(i, {k: axis}, {}) for k in at)
            if not any(found is not None and self._join(i, found) for found in options):
                return False
        for y in eqn.outvars:
            if y in self.axes:
                self._push(y)
        return True

    def _slicing(self, i: int, operands: Axes, results: Axes) -> Slicing | None:
        """Return how an equation runs if these operands and results are sliced."""
        eqn = self.prog.equations[i]
        if i in self._kept_out or not slicing.may_be_sliced(eqn, has_body(eqn)):
            return None
        found = slicing_of(eqn, operands, results, self.n, self._rules)
        return None if found is None or (found.summed and not self.with_sums) else found

    def _join(self, i: int, found: Slicing) -> bool:
        """Add an equation to the region, unless a value of it has another axis already."""
        eqn = self.prog.equations[i]
        values = [
            (v, axis)
            for v, axis in zip(
                (*eqn.invars, *eqn.outvars), (*found.operands, *found.results), strict=True
            )
            if axis is not None and isinstance(v, Var)
        ]
        if any(self.axes.get(v, axis) != axis for v, axis in values):
            return False
        if len({v for v, _ in values}) < len({*values}):
            return False  # one value, sliced along two axes
        self.members[i] = found
        for y, axis in zip(eqn.outvars, found.results, strict=True):
            if axis is not None:
                self.axes[y] = axis
                if self.whole:
                    self._push(y)
        for v, axis in zip(eqn.invars, found.operands, strict=True):
            if axis is not None and isinstance(v, Var):
                self._demands.append((v, axis))
        return True

    def is_whole(self) -> bool:
        """Return whether a body runs in slices as a whole.

        Every equation that reads a sliced value must be a member, and read it in slices.
        """
        if not self._is_valid:
            return False
        for i, eqn in enumerate(self.prog.equations):
            found = self.members.get(i)
            for k, v in enumerate(eqn.invars):
                axis = None if found is None else found.operands[k]
                if isinstance(v, Var) and self.axes.get(v) != axis:
                    return False
        return True


def bodies_of(eqn: JaxprEqn, operands: Axes, results: Axes, n: int,
              rules: frozenset[str] = frozenset()) -> Bodies | None:  # fmt: skip
    """Return how an equation with bodies runs in `n` slices if some values are sliced."""
    find = FindBodySlices(
        lambda body, ins, outs, inside, sums: body_slices(body, ins, outs, n, inside, sums), rules
    )
    return nested_slicing(eqn, operands, results, find)


def slicing_of(eqn: JaxprEqn, operands: Axes, results: Axes, n: int,
               rules: frozenset[str] = frozenset()) -> Slicing | None:  # fmt: skip
    """Return how an equation runs in `n` slices if some operands and results are sliced.

    An equation without a body takes one operand or one result.
    """
    if runs_unknown_body(eqn):
        return None
    if has_body(eqn):
        bodies = bodies_of(eqn, operands, results, n, rules)
        found = bodies and bodies.slicing
    elif operands:
        ((k, axis),) = operands.items()
        found = slicing.of_operand(eqn, k, axis)
    else:
        ((r, axis),) = results.items()
        found = slicing.of_result(eqn, r, axis)
    return found if found is not None and slicing.divides(n, eqn, found) else None


def body_slices(prog: Program, inputs: Axes, outputs: Axes, n: int,
                rules: frozenset[str] = frozenset(), with_sums: bool = False
                ) -> BodySlices | None:  # fmt: skip
    """Return how a body runs in `n` slices if some inputs and outputs are; None if it cannot.

    With `with_sums`, its outputs may be sums over the slices.
    """
    wanted = tuple(sorted(inputs.items())), tuple(sorted(outputs.items()))
    key = "slices", n, *wanted, with_sums
    if key not in prog.cache:
        prog.cache[key] = _body_slices(prog, inputs, outputs, n, rules, with_sums)
    return prog.cache[key]


def _body_slices(prog: Program, inputs: Axes, outputs: Axes, n: int, rules: frozenset[str],
                 with_sums: bool) -> BodySlices | None:  # fmt: skip
    """Grow a body from its sliced inputs and outputs."""
    growth = Growth(prog, n, whole=True, rules=rules, with_sums=with_sums)
    wanted = [(prog.inputs[k], axis) for k, axis in inputs.items()]
    wanted += [(prog.outputs[k], axis) for k, axis in outputs.items()]
    for v, axis in wanted:
        if isinstance(v, Literal) or not growth.demand(v, axis):
            return None
    if not growth.is_whole():
        return None
    sums = sums_of_body(prog, growth.members)
    if sums is None:
        return None
    axes = lambda atoms: tuple(growth.axes.get(v) if isinstance(v, Var) else None for v in atoms)
    are_sums = tuple(isinstance(v, Var) and v in sums for v in prog.outputs)
    return BodySlices(growth.axes, growth.members, axes(prog.inputs), axes(prog.outputs), are_sums)


def grow(prog: Program, v: Var, axis: int, n: int, forward: Collection[Var] = ()
         ) -> tuple[dict[Var, int], dict[int, Slicing]]:  # fmt: skip
    """Return a region's values and equations. It also grows forward from the values `forward`."""
    kept_out: set[int] = set()
    growth, levels, level = _grown(prog, v, axis, n, kept_out, forward)
    for _ in range(_ROUNDS):
        needed = _needed_in_full(growth, levels, level) - kept_out if level else None
        if not needed:
            break
        kept_out |= needed
        growth, levels, level = _grown(prog, v, axis, n, kept_out, forward)
    for _ in range(_ROUNDS):
        if not (scales := _independent_of_start(growth, levels, level, v)):
            break
        kept_out |= scales
        growth, levels, level = _grown(prog, v, axis, n, kept_out, forward)
    members = _connected(growth, {i for i, at in levels.items() if at == level}, v)
    axes = {y: growth.axes[y] for i in members for y in prog.equations[i].outvars
            if y in growth.axes}  # fmt: skip
    return axes, {i: growth.members[i] for i in sorted(members)}


def _grown(prog: Program, v: Var, axis: int, n: int, kept_out: Iterable[int],
           forward: Collection[Var]) -> tuple[Growth, dict[int, int], int]:  # fmt: skip
    """Return what grows around a value, the level of each equation in it, and of the start."""
    growth = Growth(prog, n, kept_out=kept_out)
    growth.start(v, axis, forward)
    levels, outside = _levels(growth)
    made = producers(prog).get(v)
    level = levels.get(made[0]) if made else None
    return growth, levels, outside.get(v, 0) if level is None else level


def _levels(growth: Growth) -> tuple[dict[int, int], dict[Var, int]]:
    """Return the level of each equation of a region, and of each value outside the loops."""
    levels: dict[int, int] = {}
    outside: dict[Var, int] = {}
    effects = 0
    producer = producers(growth.prog)
    for i, eqn in enumerate(growth.prog.equations):
        found = growth.members.get(i)
        operands = found.operands if found else (None,) * len(eqn.invars)
        level = effects if has_effects(eqn) else 0
        for v, axis in zip(eqn.invars, operands, strict=True):
            if isinstance(v, Literal):
                continue
            in_region = axis is not None and growth.axes.get(v) == axis
            level = max(level, levels[producer[v][0]] if in_region else outside.get(v, 0))
        if found:
            levels[i] = level
        if has_effects(eqn):
            effects = level
        after = level + 1 if found else level
        if after:
            outside.update(dict.fromkeys(eqn.outvars, after))
    return levels, outside


def _needed_in_full(growth: Growth, levels: dict[int, int], level: int) -> set[int]:
    """Return the equations of lower levels whose values the equations of `level` need in full."""
    needed: set[Var] = set()
    found: set[int] = set()
    for i in range(len(growth.prog.equations) - 1, -1, -1):
        eqn, member = growth.prog.equations[i], growth.members.get(i)
        is_needed = any(y in needed for y in eqn.outvars)
        if member is None:
            if is_needed:
                needed.update(v for v in eqn.invars if isinstance(v, Var))
            continue
        if is_needed and levels[i] < level:
            found.add(i)
        if levels[i] <= level:
            pairs = zip(eqn.invars, member.operands, strict=True)
            needed.update(v for v, axis in pairs if isinstance(v, Var)
                          and (axis is None or growth.axes.get(v) != axis))  # fmt: skip
    return found


def _independent_of_start(growth: Growth, levels: dict[int, int], level: int, start: Var
                          ) -> set[int]:  # fmt: skip
    """Return equations whose values the next level needs in full, although they are cheap to have.

    An equation of the next level reads values that depend on the start, in slices, and others in
    full. If the others do not depend on the start, they can be computed before the loop, such as
    a count of tokens that divides a loss. Then the equation can run in the same loop.
    """
    prog = growth.prog
    equations, producer = prog.equations, producers(prog)
    dependent = {start}
    for eqn in equations:
        if any(isinstance(v, Var) and v in dependent for v in eqn.invars):
            dependent.update(eqn.outvars)
    found: set[int] = set()
    for i, member in growth.members.items():
        pairs = [*zip(equations[i].invars, member.operands, strict=True)]
        sliced = [v for v, axis in pairs if axis is not None and isinstance(v, Var)]
        if levels[i] != level + 1 or dependent.isdisjoint(sliced):
            continue
        before = {v for v, axis in pairs if axis is None and isinstance(v, Var)}
        todo = [*before]
        while todo:
            made = producer.get(todo.pop())
            operands = equations[made[0]].invars if made else ()
            new = {v for v in operands if isinstance(v, Var)} - before
            before |= new
            todo += new
        made_before = {producer[v][0] for v in before if v in producer}
        computed = {j for j in made_before if j in growth.members}
        size = sum(aval_bytes(y.aval) for j in computed for y in equations[j].outvars)
        if dependent.isdisjoint(before) and _CHEAP * size <= aval_bytes(start.aval):
            found |= computed
    return found


def _connected(growth: Growth, members: set[int], start: Var) -> set[int]:
    """Return the members that are connected to the start by sliced values."""
    neighbours: dict[Var, list[int]] = collections.defaultdict(list)
    for i in members:
        for v in _sliced_values(growth, i):
            neighbours[v].append(i)
    found, values, stack = set[int](), {start}, [start]
    while stack:
        for i in neighbours[stack.pop()]:
            if i not in found:
                found.add(i)
                new = [v for v in _sliced_values(growth, i) if v not in values]
                values.update(new)
                stack += new
    return found


def _sliced_values(growth: Growth, i: int) -> list[Var]:
    """Return the values that an equation of the region reads or makes in slices."""
    eqn, found = growth.prog.equations[i], growth.members[i]
    values = zip((*eqn.invars, *eqn.outvars), (*found.operands, *found.results), strict=True)
    return [v for v, axis in values if axis is not None and isinstance(v, Var)]


def producers(prog: Program) -> dict[Var, tuple[int, int]]:
    """Return the position of the equation that makes each value, and the position of the result."""
    if "producers" not in prog.cache:
        prog.cache["producers"] = {
            y: (i, r) for i, eqn in enumerate(prog.equations) for r, y in enumerate(eqn.outvars)
        }
    return prog.cache["producers"]


def readers(prog: Program) -> dict[Var, list[int]]:
    """Return the positions of the equations that read each value."""
    if "readers" not in prog.cache:
        found: dict[Var, list[int]] = collections.defaultdict(list)
        for i, eqn in enumerate(prog.equations):
            for v in {v for v in eqn.invars if isinstance(v, Var)}:
                found[v].append(i)
        prog.cache["readers"] = dict(found)
    return prog.cache["readers"]
