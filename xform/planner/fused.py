"""Which values a compiler writes to memory, and which only live within a loop over elements.

XLA's own rules for loops over elements (`instruction_fusion.cc`, `cpu_instruction_fusion.cc`): from
the last operation to the first, each takes in what makes its operands, if that is an operation on
elements, a movement or a reduction. A cheap one is repeated in all its readers, and then written
for those that are no loops only; a dear one goes into its only reader; one that reads more than it
makes is repeated nowhere, unless all paths to its readers fuse.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from jax import lax

from xform._jax import broadcast_in_dim_p
from xform.interpret.tie import tie_p
from xform.planner.library import calls
from xform.planner.products import narrow
from xform.planner.profiles import Profile
from xform.planner.steps import Cell, Flat, Step, barrier_p, repeat_p

# More operands than this and a concatenation is a loop of its own.
_MOST_JOINED = 8
# So many reductions may be in a loop over elements.
_MOST_REDUCTIONS = 6
# How far back it is looked which steps a step depends on.
_WINDOW = 4096
_REPEATS = (broadcast_in_dim_p, repeat_p)


def _fuses(step: Step) -> bool:
    """Whether a step may be part of a loop over elements."""
    return bool(step.of.fusion) or step.does is repeat_p


def _pointwise(step: Step) -> bool:
    """Whether each element of a step's result needs one element of each operand."""
    others = (tie_p, lax.convert_element_type_p, lax.copy_p)
    return step.of.fusion == "elementwise" or step.does in others


@dataclasses.dataclass(eq=False)
class Group:
    """Steps that run as one: what the last of them makes is written.

    Attributes:
      root: the last of its steps.
      reads: the written values that it reads, in order.
      members: its steps.
      reused: those of `reads` of which an element is read for several elements of the result.
      call: it is a call of a library, or one that is no loop over elements.
    """

    root: Step
    reads: dict[Cell, None]
    members: dict[Step, None]
    reused: set[Cell] = dataclasses.field(default_factory=set)
    call: bool = False

    def replaceable(self) -> set[Cell]:
        """The values read whose place the result may take: they are used element by element."""
        if len(self.root.makes) != 1:
            return set()
        spoiled: set[Cell] = set()
        for step in self.members:
            if step.does is lax.dynamic_update_slice_p and step is self.root:
                spoiled.update(step.reads[1:])
            elif not _pointwise(step) or (step is not self.root and step.makes[0] in spoiled):
                spoiled.update(step.reads)
            elif step.does is tie_p:  # of what it waits for it reads one element
                spoiled.update(step.reads[1:])
        made = self.root.makes[0].bytes
        return {c for c in self.reads if c not in spoiled and c.bytes == made}


class Fusion:
    """What is written of a flat program.

    Attributes:
      groups: what runs as one, views included, in the order in which the program makes it.
      base: of each value that is only a view of another, that one.
      place: of each step, when XLA comes to it: from the outputs, operands first.
    """

    def __init__(self, flat: Flat, profile: Profile):
        self._outputs, self._widens = frozenset(flat.outputs), profile.widens
        self.place = {s: i for i, s in enumerate(_post_order(flat))}
        steps = sorted(flat.steps, key=self.place.__getitem__)
        self._groups: dict[Step, Group] = {}
        self._users: dict[Cell, dict[Step, None]] = {}
        found = calls(flat, steps, profile) if profile.library else {}
        inside = {s for members in found.values() for s in members[1:]}
        for step in steps:
            if step not in inside:
                self._add(step, found.get(step))
        self._fixed = self._unrepeatable(steps)
        for step in reversed(steps):
            if step in self._groups:
                self._grow(self._groups[step])
        order = {s: i for i, s in enumerate(flat.steps)}
        self.groups = sorted(self._groups.values(), key=lambda g: order[g.root])
        self.base = self._views()

    def breadth_first(self, inputs: Sequence[Cell]) -> list[Group]:
        """Groups as a queue runs them: each is put at its end when its last operand is there.

        Inputs, views and each of several results of a step pass through the queue too.
        """
        readers: dict[Cell, list[Group]] = {}
        missing: dict[Group, int] = {}
        for group in self.groups:
            missing[group] = len(group.reads)
            for c in group.reads:
                readers.setdefault(c, []).append(group)
        todo: list[Group | Cell] = [*dict.fromkeys(inputs)]
        todo += [g for g in self.groups if not missing[g]]
        done: list[Group] = []
        for item in todo:
            if isinstance(item, Group):
                done.append(item)
                if len(item.root.makes) > 1:
                    todo += item.root.makes
                    continue
                item = item.root.makes[0]
            for group in readers.get(item, ()):
                missing[group] -= 1
                if not missing[group]:
                    todo.append(group)
        return done

    def _views(self) -> dict[Cell, Cell]:
        """Of each value that is another in another shape, the one that is written."""
        base: dict[Cell, Cell] = {}
        for group in self.groups:
            if group.root.does in (lax.reshape_p, barrier_p) and len(group.members) == 1:
                cell = next(iter(group.reads))
                base[group.root.makes[0]] = base.get(cell, cell)
        return base

    def _add(self, step: Step, members: list[Step] | None) -> None:
        if members is None:
            members, call = [step], not _fuses(step) or len(step.makes) != 1
        else:
            call = True
        makes = {s.makes[0] for s in members[1:]}
        reads = dict.fromkeys(c for s in members for c in s.reads if c not in makes)
        members.sort(key=self.place.__getitem__, reverse=True)
        group = Group(step, reads, dict.fromkeys(members), call=call)
        if step.does in _REPEATS or step.does is lax.gather_p:
            group.reused = set(reads)
        self._groups[step] = group
        for c in reads:
            self._users.setdefault(c, {})[step] = None

    def _maker(self, cell: Cell) -> Group | None:
        """The group that makes a value of the program."""
        return self._groups.get(cell.maker) if cell.maker else None

    def _unrepeatable(self, steps: list[Step]) -> set[Step]:
        """What is fused into none of its readers, as it reads more than it makes."""
        self._fixed = set[Step]()
        reach = self._reached(steps)
        for step in reversed(steps):
            group = self._groups.get(step)
            if group is None or group.call or not self._merges(step):
                continue
            known: dict[Step, bool] = {step: True}
            users = self._users.get(step.makes[0], {})
            if step.makes[0] in self._outputs or not all(
                self._on_all_paths(step, u, reach, known) for u in users
            ):
                self._fixed.add(step)
        return self._fixed

    def _merges(self, step: Step) -> bool:
        """Whether a step reads several values of its result's size, and more than it makes."""
        if step.does is tie_p:
            return False
        made = step.makes[0]
        rank = lambda c: sum(n != 1 for n in c.shape)
        if sum(rank(c) >= rank(made) and not self._repeat(c) for c in step.reads) <= 1:
            return False
        # A transposed value is copied for each operand.
        turned = [c for c in step.reads if c.maker and c.maker.does is lax.transpose_p]
        others = dict.fromkeys(c for c in step.reads if c not in turned)
        return sum(math.prod(c.shape) for c in (*turned, *others)) > math.prod(made.shape)

    def _repeat(self, cell: Cell) -> bool:
        """Whether a value is a repeated one, which every reader makes for itself."""
        group = self._maker(cell)
        if group is None or group.call:
            return False
        return group.root.does in _REPEATS or group.root.does is lax.iota_p

    def _reached(self, steps: list[Step]) -> dict[Step, int]:
        """For each step, how many places before it that is which it depends on, as bits.

        As far as `_WINDOW` places; itself is the lowest bit.
        """
        reach: dict[Step, int] = {}
        mask = (1 << _WINDOW) - 1
        for step in steps:
            if step in self._groups:
                bits = 1
                for c in self._groups[step].reads:
                    if c.maker:
                        bits |= reach[c.maker] << (self.place[step] - self.place[c.maker])
                reach[step] = bits & mask
        return reach

    def _depends(self, step: Step, first: Step, reach: dict[Step, int]) -> bool:
        """Whether a step depends on another; of what is far behind it, it is taken to."""
        far = self.place[step] - self.place[first]
        return far >= _WINDOW or (far >= 0 and bool(reach[step] >> far & 1))

    def _on_all_paths(self, made: Step, reader: Step, reach: dict[Step, int],
                      known: dict[Step, bool]) -> bool:  # fmt: skip
        """Whether a step could go into a reader along all paths. Without recursion.

        `known` are the answers for readers that were looked at, the step itself among them.
        """
        todo = [reader]
        while todo:
            group = self._groups[todo[-1]]
            if group.root in known:
                todo.pop()
                continue
            on = [c.maker for c in group.reads if c.maker and self._depends(c.maker, made, reach)]
            late = [s for s in on if s not in known]
            if (
                group.call
                or any(known.get(s) is False for s in on)
                or not all(self._goes(group, s.makes[0]) for s in on)
            ):
                known[group.root] = False
            elif late:
                todo += late
            else:
                known[group.root] = True
        return known[reader]

    def _goes(self, reader: Group, cell: Cell) -> bool:
        """Whether what makes a value goes into a reader of it."""
        group = self._maker(cell)
        if group is None or reader.call or group.call or len(group.members) > 1:
            return False
        step = group.root
        if step in self._fixed:
            return False
        for s in (step, reader.root):
            if s.does is lax.concatenate_p and len(s.reads) > _MOST_JOINED:
                return False
        if _dear(step) or (self._widens and _pointwise(step) and narrow(step.eqn.outvars[0].aval)):
            others = len(self._users[cell]) > 1 or cell in self._outputs
            if others or cell in reader.reused:
                return False
        if _reduces(step) and len(reader.members) > 1:
            return sum(map(_reduces, reader.members)) < _MOST_REDUCTIONS
        return True

    def _grow(self, group: Group) -> None:
        """Take in what makes the operands of a group, the last first, as long as anything goes."""
        if group.call:
            return
        while True:
            pairs = [(c, g) for c in group.reads if (g := self._maker(c))]
            pairs.sort(key=lambda pair: -self.place[pair[1].root])
            found = next((pair for pair in pairs if self._goes(group, pair[0])), None)
            if found is None:
                return
            self._take(group, *found)

    def _take(self, group: Group, cell: Cell, made: Group) -> None:
        del group.reads[cell]
        group.reused |= made.reads.keys() if cell in group.reused else made.reused
        group.reused.discard(cell)
        group.members[made.root] = None
        del self._users[cell][group.root]
        for c in made.reads:
            group.reads[c] = None
            self._users[c][group.root] = None
        if not self._users[cell] and cell not in self._outputs:
            self._drop(made)

    def _drop(self, group: Group) -> None:
        del self._groups[group.root]
        for c in group.reads:
            del self._users[c][group.root]


def _post_order(flat: Flat) -> Iterable[Step]:
    """Steps as XLA walks them: from the outputs, the operands of each first, in their order."""
    ends = [c.maker for c in flat.outputs if c.maker]
    ends += [s for s in flat.steps if not any(c.readers for c in s.makes)]
    done: dict[Step, None] = {}
    todo = list(reversed(ends))
    while todo:
        step = todo[-1]
        late = [c.maker for c in step.reads if c.maker and c.maker not in done]
        if step in done or not late:
            todo.pop()
            done[step] = None
        todo += reversed(late)
    return done


def _reduces(step: Step) -> bool:
    return step.of.fusion == "reduction"


def _dear(step: Step) -> bool:
    """Whether a step takes so long for each element that it is not repeated."""
    return step.of.dear or _reduces(step) or step.does is lax.gather_p
