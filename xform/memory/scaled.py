"""Find the array that a value in a compiled program is a scaled or clipped copy of.

Optimizers scale a gradient before they use it: `optax.clip_by_global_norm` multiplies each gradient
by one number, and `optax.clip` clips its elements. The result is a gradient too. A value that
depends on another array as well, such as a moment of Adam, is no scaled copy.
"""

from __future__ import annotations

from xform.memory.dataflow import ValueId
from xform.memory.hlo import Index, Instruction, Module

# Opcodes whose result is the first operand in another form.
_SAME = frozenset(("bitcast", "convert", "copy", "negate", "reshape", "transpose"))
# Opcodes of operations on single elements that may scale or clip an operand. For each, the operands
# that may be a scaled copy. All other operands must be numbers.
_SCALES = {
    "clamp": (1,), "divide": (0,), "maximum": (0, 1), "minimum": (0, 1), "multiply": (0, 1),
    "select": (1, 2),
}  # fmt: skip
# In these, several operands may be scaled copies of the same array.
_CHOOSES = frozenset(("maximum", "minimum", "select"))
# Computations that run once, with the operands as parameters.
_CALLS = ("fusion", "call")


class ScaledCopies:
    """Finds the arrays that values of a module are scaled or clipped copies of.

    Cost: linear in instructions, over all queries.
    """

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[ValueId, ValueId] = {}

    def source(self, instruction: int, index: Index = ()) -> ValueId:
        """Return the array that a value is a scaled or clipped copy of: itself, if it is of none.

        Args:
          instruction: the id of the instruction of the value.
          index: the index of the value in the instruction's tuple.
        """
        value = instruction, index
        if value not in self._known:
            self._known[value] = value  # a loop's state may depend on itself
            self._known[value] = self._find(self._module.instructions[instruction], index)
        return self._known[value]

    def _find(self, i: Instruction, index: Index) -> ValueId:
        """Return the source of a value that is not known."""
        if i.opcode == "get-tuple-element":
            return self.source(i.operands[0], (i.number, *index))
        if i.opcode == "tuple" and index:
            return self.source(i.operands[index[0]], index[1:])
        if i.opcode in _CALLS and i.called:
            return self.source(self._module.computations[i.called[0]].root, index)
        if i.opcode == "parameter":
            operand = self._operand(i)
            return (i.id, index) if operand is None else self.source(operand, index)
        if i.opcode in _SAME:
            return self.source(i.operands[0])
        if i.opcode in _SCALES:
            return self._scaled(i) or (i.id, index)
        return i.id, index

    def _scaled(self, i: Instruction) -> ValueId | None:
        """Return the array that an operation on elements scales or clips; None if there is none."""
        arrays = [k for k, operand in enumerate(i.operands) if not self._is_number(operand)]
        if not {*arrays} <= {*_SCALES[i.opcode]} or (len(arrays) > 1 and i.opcode not in _CHOOSES):
            return None
        sources = {self.source(i.operands[k]) for k in arrays}
        return sources.pop() if len(sources) == 1 else None

    def _is_number(self, instruction: int) -> bool:
        """Return whether a value is one number, or an array in which all elements are one number.

        A broadcast of a longer array is no number.
        """
        pending = [instruction]
        while pending:
            i = self._module.instructions[pending.pop()]
            operand = self._operand(i) if i.opcode == "parameter" else None
            if all(n == 1 for n in i.shape.dims) and not i.shape.elements:
                continue
            if operand is not None:
                pending.append(operand)
            elif i.opcode == "broadcast" or i.opcode in _SAME or i.opcode in _SCALES:
                pending += i.operands
            else:
                return False
        return True

    def _operand(self, parameter: Instruction) -> int | None:
        """Return the operand that a parameter of a fusion or call stands for; None for others."""
        caller = self._module.callers.get(parameter.computation)
        if caller is None or caller.opcode not in _CALLS:
            return None
        return caller.operands[parameter.number]
