"""Find the operation that made a value in a compiled program, and the operations that read it.

XLA adds copies, passes values through tuples and loop states, and writes the stacked outputs of a
loop with dynamic updates in place. `DataFlow` looks through all of these in both directions. For
example, the origin of a stacked output is the operation in the loop's body that made one slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from xform.memory.hlo import Index, Instruction, Module

# Opcodes whose result is the first operand, copied or viewed.
_COPIES = frozenset(("copy", "bitcast", "copy-done", "optimization-barrier"))
_MOVES = _COPIES | {"reshape", "convert"}
# Opcodes without a name that XLA adds to fetch a value in parts.
_PARTS = frozenset(("slice", "concatenate", "custom-call", "reshape", "transpose"))
_FILLS = frozenset(("broadcast", "constant", "iota", "parameter"))


# A value: the id of an instruction, and the index of an element of its tuple.
Place = tuple[int, Index]


class DataFlow:
    """Origins and readers of the values of a module.

    Cost: a few steps for each query.
    """

    def __init__(self, module: Module):
        self._module = module

    def origin(self, instruction: int, index: Index = ()) -> Instruction:
        """The operation that made a value (or one element of a tuple)."""
        start = self._module.instructions[instruction]
        return self._back(start, index, set()) or start

    def where(self, instruction: Instruction) -> str:
        """The source line of an operation; if it has none, the line of the nearest operation.

        Operands, direct and indirect, are searched before readers.
        """
        return self._nearest(instruction, up=True) or self._nearest(instruction, up=False)

    def readers(self, places: Iterable[Place]) -> list[Instruction]:
        """The operations that read any of these values, or copies of them."""
        by_id: dict[int, Instruction] = {}
        queue = list(places)
        seen = set(queue)
        for place in queue:
            for user, onto in self._forth(*place):
                if onto is None:
                    by_id[user.id] = user
                elif onto not in seen:
                    seen.add(onto)
                    queue.append(onto)
        return list(by_id.values())

    def only_initializes(self, instruction: Instruction) -> bool:
        """Whether an operation only initializes memory, such as zeros that a loop starts from."""
        return instruction.opcode in _FILLS or instruction.target == "AllocateBuffer"

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """For each instruction, by id, the instructions that read its result."""
        users: dict[int, list[Instruction]] = {}
        for i in self._module.instructions.values():
            for operand in dict.fromkeys(i.operands):
                users.setdefault(operand, []).append(i)
        return users

    def _back(self, i: Instruction, index: Index, seen: set[Place]) -> Instruction | None:
        """The origin of a value; None if the search comes back to the value itself."""
        if (i.id, index) in seen:
            return None
        seen.add((i.id, index))

        def operand(k: int, index: Index = ()) -> Instruction | None:
            return self._back(self._module.instructions[i.operands[k]], index, seen)

        def result(computation: int, index: Index = index) -> Instruction | None:
            return self._back(self._module.root(computation), index, seen)

        match i.opcode:
            case "get-tuple-element":
                return operand(0, (i.number, *index))
            case "tuple" if index:
                return operand(index[0], index[1:])
            case "copy-start":
                return operand(0)
            case "async-done":
                return operand(0, (1, *index))
            case "async-start" if index[:1] == (1,) and i.called:
                return result(i.called[0], index[1:])
            case opcode if opcode in _MOVES or (opcode in _PARTS and i.operands and not i.op_name):
                source = operand(0, index)
                own = self._module.where(i)
                return i if source is None or (own and not self._module.where(source)) else source
            case "while":
                inside = result(i.called[0])
                if inside is not None and self._module.where(inside):
                    return inside
                return operand(0, index) or inside
            case "call" | "conditional" if i.called:
                return result(i.called[0])
            case "fusion":
                inner = result(i.called[0])
                return i if inner is None or not self._module.where(inner) else inner
            case "dynamic-update-slice":
                slices = operand(1)
                return i if slices is None or self.only_initializes(slices) else slices
            case "parameter":
                return self._from_caller(i, index, seen)
            case _:
                return i

    def _from_caller(self, i: Instruction, index: Index, seen: set[Place]) -> Instruction | None:
        """The origin of a computation's parameter: the operand that the caller passes."""
        caller = self._module.callers.get(i.computation)
        if caller is None:
            return i
        number = i.number
        if caller.opcode == "while":
            after = self._back(self._module.root(caller.called[0]), index, seen)
            if after is not None:
                return after
        elif caller.opcode == "conditional":
            number = 1 + caller.called.index(i.computation)
        if number >= len(caller.operands):
            return i
        return self._back(self._module.instructions[caller.operands[number]], index, seen)

    def _forth(self, instruction: int, index: Index) -> Iterator[tuple[Instruction, Place | None]]:
        """The users of a value, each with the value that it passes it on as; None for a reader."""
        for user in self.users.get(instruction, ()):
            yield from ((user, place) for place in self._onto(user, instruction, index))
        yield from self._out(instruction, index)

    def _onto(self, user: Instruction, instruction: int, index: Index) -> Iterator[Place | None]:
        """The values that `user` passes an operand on as; None if it reads the operand."""
        operands = [k for k, x in enumerate(user.operands) if x == instruction]
        match user.opcode:
            case "get-tuple-element" | "copy-done" | "async-done":
                taken = {"get-tuple-element": user.number, "copy-done": 0, "async-done": 1}
                if index[:1] == (taken[user.opcode],):
                    yield user.id, index[1:]
            case "tuple":
                yield from ((user.id, (k, *index)) for k in operands)
            case "copy-start":
                yield user.id, (0,)
            case opcode if opcode in _COPIES:
                yield user.id, index
            case "while" | "call" | "conditional" | "async-start":
                yield from ((inside, index) for inside in self._inside(user, operands))
                if user.opcode == "while":
                    yield user.id, index
            case _ if not index:
                yield (user.id, ()) if user.opcode in _PARTS and not user.op_name else None
            case _:
                pass

    def _inside(self, user: Instruction, operands: Sequence[int]) -> Iterator[int]:
        """The parameters of the called computations that receive these operands, as ids."""
        for computation in user.called:
            numbers = operands
            if user.opcode == "conditional":  # operand 0 chooses the branch, each has one operand
                own = 1 + user.called.index(computation)
                numbers = [0 for k in operands if k == own]
            for number in numbers:
                if (computation, number) in self._parameters:
                    yield self._parameters[computation, number]

    def _out(self, instruction: int, index: Index) -> Iterator[tuple[Instruction, Place]]:
        """If a value is the root of a computation, the values that the caller sees it as."""
        own = self._module.instructions[instruction]
        caller = self._module.callers.get(own.computation)
        if caller is None or self._module.computations[own.computation].root != instruction:
            return
        if caller.opcode == "while":
            yield from ((caller, (self._parameters[c, 0], index)) for c in caller.called)
        yield caller, (caller.id, (1, *index) if caller.opcode == "async-start" else index)

    @cached_property
    def _parameters(self) -> dict[tuple[int, int], int]:
        """Ids of parameters, by computation and parameter number."""
        return {(i.computation, i.number): i.id for i in self._module.instructions.values()
                if i.opcode == "parameter"}  # fmt: skip

    def _nearest(self, start: Instruction, up: bool, most: int = 64) -> str:
        """The first source line in a breadth-first search along operands, or along users."""
        queue, seen = [start], {start.id}
        for i in queue:
            if where := self._module.where(i):
                return where
            if len(queue) < most:
                near = (
                    [self._module.instructions[k] for k in i.operands]
                    if up
                    else self.users.get(i.id, [])
                )
                queue += [k for k in near if k.id not in seen]
                seen.update(k.id for k in near)
        return ""
