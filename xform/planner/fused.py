"""Which values a compiler writes to memory, and which only live within a loop over elements.

XLA fuses elementwise operations, broadcasts and moves of data with what reads them. A value is
written if it is an output, if something that is no loop over elements reads it (a product, another
loop, a call), or if it is dear and has several readers. On XLA:CPU reductions are library calls:
they take a product of two values within, and write out what is repeated from their results.
"""

from __future__ import annotations

from jax import lax

from xform._jax import Primitive
from xform.interpret.tie import tie_p
from xform.planner.flat import Cell, Flat, Step, repeat_p
from xform.planner.work import fusible
from xform.table import traits

# How many operations on the result of a reduction are looked at.
_CHAIN = 5


def fuses(step: Step) -> bool:
    """Whether a step may be part of a loop over elements."""
    moves = step.does in (repeat_p, lax.transpose_p)
    return moves or (not _reduces(step) and fusible(step.eqn))


def _reduces(step: Step) -> bool:
    return traits(step.does).fusion == "reduction"


class Fusion:
    """What is written of a flat program.

    Attributes:
      steps: the steps whose results are written, in program order.
      reads: for each of them, the written values that it reads in the end.
    """

    def __init__(self, flat: Flat):
        self._absorbed = {
            c.maker
            for step in flat.steps
            if _reduces(step) and step.reads
            for c in step.reads[:1]
            if c.maker is not None and traits(c.maker.does).absorbed
        }
        outputs = set(flat.outputs)
        self._written: dict[Step, bool] = {}
        for step in reversed(flat.steps):
            self._written[step] = self._must(step, outputs)
        for step in flat.steps:
            if _reduces(step) and step.reads:
                self._grow(step.makes[0], step.reads[0], outputs, 0)
        # What is written for one reader is made again within another that fuses, if it is cheap.
        self._repeated = {
            s for s in flat.steps
            if self._written[s] and fuses(s) and not traits(s.does).dear and s.does is not repeat_p
            and not _merges(s) and not _turned(s)
        }  # fmt: skip
        self._leaves: dict[Step, dict[Cell, None]] = {}
        self.steps = [s for s in flat.steps if self._written[s]]
        self.reads = [self._behind(s) for s in self.steps]

    def sliced(self, cell: Cell) -> bool:
        """Whether a scanned input's slice is copied: a reader of it is no loop over elements."""
        return any(not fuses(s) or s in self._absorbed for s in cell.readers)

    def _must(self, step: Step, outputs: set[Cell]) -> bool:
        if not fuses(step) or not outputs.isdisjoint(step.makes):
            return True
        readers = {s for c in step.makes for s in c.readers}
        if step in self._absorbed:
            readers = {s for s in readers if not _reduces(s)}
        if any(not fuses(s) or s in self._absorbed for s in readers):
            return True
        dear = traits(step.does).dear or step.does is lax.transpose_p
        dear = dear or _merges(step) or _turned(step)
        return len(readers) > 1 and dear

    def _grow(self, cell: Cell, whole: Cell, outputs: set[Cell], depth: int) -> None:
        """Find where the result of a reduction is repeated: that is part of the library call."""
        if cell in outputs or cell.bytes >= whole.bytes or depth == _CHAIN:
            return
        for step in cell.readers:
            made = step.makes[0]
            if not fuses(step) or step.does is tie_p:
                continue
            if made.bytes < whole.bytes:
                alone = all(c is cell or c.maker is None for c in step.reads)
                if len(cell.readers) == 1 and alone:
                    self._grow(made, whole, outputs, depth + 1)
            elif step.does is repeat_p:
                self._written[step] = True
            elif step.does is lax.sub_p and step.reads[0] is whole and _ends_in(made, lax.exp_p):
                self._written[step] = False

    def _inside(self, step: Step, reader: Step) -> bool:
        """Whether a step is done within a reader of its result."""
        fused = fuses(reader) and reader not in self._absorbed
        return not self._written[step] or (fused and step in self._repeated)

    def _behind(self, reader: Step) -> dict[Cell, None]:
        """The written values that a step is made from, in order. Without recursion."""
        todo = [reader]
        while todo:
            step = todo[-1]
            late = [
                c.maker
                for c in step.reads
                if c.maker and c.maker not in self._leaves and self._inside(c.maker, step)
            ]
            if step in self._leaves or not late:
                todo.pop()
                self._leaves.setdefault(step, self._direct(step))
            todo += late
        return self._leaves[reader]

    def _direct(self, step: Step) -> dict[Cell, None]:
        found: dict[Cell, None] = {}
        for cell in step.reads:
            if cell.maker is not None and self._inside(cell.maker, step):
                found.update(self._leaves[cell.maker])
            elif cell.kind != "constant":
                found[cell] = None
        return found


def _merges(step: Step) -> bool:
    """Whether a step reads several values of its own size: run twice, it would read more."""
    if step.does is tie_p:  # of a cotangent it reads one element
        return False
    made = step.makes[0].bytes
    return len({c for c in step.reads if c.bytes >= made and c.kind != "constant"}) > 1


def _turned(step: Step) -> bool:
    """Whether a step is the square of a transposed value: each reader would transpose it twice."""
    makers = [c.maker for c in step.reads if c.maker and c.maker.does is lax.transpose_p]
    return len(makers) == 2 and makers[0] is makers[1]


def _ends_in(cell: Cell, does: Primitive) -> bool:
    return len(cell.readers) == 1 and cell.readers[0].does is does
