"""Find the operation that made a value in a compiled program, and the operations that read it.

XLA adds copies, passes values through tuples and loop states, and writes the stacked outputs of a
loop with dynamic updates in place. `DataFlow` looks through all of these in both directions. For
example, the origin of a stacked output is the operation in the loop's body that made one slice.

The program is an HLO module (`hlo.py`). A value is an instruction and an index in its tuple.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from xform.memory.hlo import Index, Instruction, Module

# Opcodes whose result is the first operand, copied or viewed.
_COPIES = frozenset(("copy", "bitcast", "copy-done", "optimization-barrier"))
# Opcodes that are looked through to find the origin of a value.
_LOOKED_THROUGH = _COPIES | {"reshape", "convert"}
# Opcodes of operations that XLA adds, without an `op_name`, to fetch a value in parts.
_FETCHES = frozenset(("slice", "concatenate", "custom-call", "reshape", "transpose"))
# Opcodes that only initialize memory.
_INITIALIZES = frozenset(("broadcast", "constant", "iota", "parameter"))

# A value: the id of an instruction, and the index of an element of its tuple.
ValueId = tuple[int, Index]


class DataFlow:
    """Finds the origins and the readers of the values of a module.

    Cost: a few steps for each query.
    """

    def __init__(self, module: Module):
        self._module = module

    def origin(self, instruction: int, index: Index = ()) -> Instruction:
        """Return the operation that made a value (or one element of a tuple)."""
        start = self._module.instructions[instruction]
        return self._find_origin(start, index, set()) or start

    def where(self, instruction: Instruction) -> str:
        """Return the source line of an operation; if it has none, that of the nearest operation.

        Operands, direct and indirect, are searched before readers. "" if none has a line.
        """
        return self._nearest(instruction, to_operands=True) or self._nearest(
            instruction, to_operands=False
        )

    def readers(self, values: Iterable[ValueId]) -> list[Instruction]:
        """Return the operations that read any of these values, or copies of them."""
        readers: dict[int, Instruction] = {}
        queue = list(values)
        seen = set(queue)
        for value in queue:
            for user, same_value in self.users_of(*value):
                if same_value is None:
                    readers[user.id] = user
                elif same_value not in seen:
                    seen.add(same_value)
                    queue.append(same_value)
        return list(readers.values())

    def only_initializes(self, instruction: Instruction) -> bool:
        """Return whether an operation only initializes memory, as zeros that a loop starts from."""
        return instruction.opcode in _INITIALIZES or instruction.target == "AllocateBuffer"

    @cached_property
    def users(self) -> dict[int, list[Instruction]]:
        """For each instruction, by id, the instructions that read its result."""
        users: dict[int, list[Instruction]] = {}
        for i in self._module.instructions.values():
            for operand in dict.fromkeys(i.operands):
                users.setdefault(operand, []).append(i)
        return users

    def _find_origin(self, i: Instruction, index: Index, seen: set[ValueId]) -> Instruction | None:
        """Return the origin of a value; None if the search comes back to a value in `seen`."""
        if (i.id, index) in seen:
            return None
        seen.add((i.id, index))

        def operand(k: int, index: Index = ()) -> Instruction | None:
            return self._find_origin(self._module.instructions[i.operands[k]], index, seen)

        def result(computation: int, index: Index = index) -> Instruction | None:
            return self._find_origin(self._module.root(computation), index, seen)

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
            case opcode if opcode in _LOOKED_THROUGH or (
                opcode in _FETCHES and i.operands and not i.op_name
            ):
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
                return self._find_origin_of_parameter(i, index, seen)
            case _:
                return i

    def _find_origin_of_parameter(
        self, i: Instruction, index: Index, seen: set[ValueId]
    ) -> Instruction | None:
        """Return the origin of a computation's parameter: the origin of the caller's operand."""
        caller = self._module.callers.get(i.computation)
        if caller is None:
            return i
        number = i.number
        if caller.opcode == "while":
            in_body = self._find_origin(self._module.root(caller.called[0]), index, seen)
            if in_body is not None:
                return in_body
        elif caller.opcode == "conditional":
            number = 1 + caller.called.index(i.computation)
        if number >= len(caller.operands):
            return i
        return self._find_origin(self._module.instructions[caller.operands[number]], index, seen)

    def users_of(
        self, instruction: int, index: Index
    ) -> Iterator[tuple[Instruction, ValueId | None]]:
        """Yield `(user, same_value)` for each instruction that has a value as an operand.

        `same_value` is a result of the user, or a parameter of a computation that it calls, that is
        only a copy or view of the value. It is None if the user computes with the value.
        """
        for user in self.users.get(instruction, ()):
            yield from ((user, value) for value in self._passed_on(user, instruction, index))
        yield from self._seen_by_caller(instruction, index)

    def _passed_on(
        self, user: Instruction, instruction: int, index: Index
    ) -> Iterator[ValueId | None]:
        """Yield the copies and views of a value that `user` makes; None if it computes with it."""
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
                yield from ((inside, index) for inside in self._inner_parameters(user, operands))
                if user.opcode == "while":
                    yield user.id, index
            case _ if not index:
                yield (user.id, ()) if user.opcode in _FETCHES and not user.op_name else None
            case _:
                pass

    def _inner_parameters(self, user: Instruction, operands: Sequence[int]) -> Iterator[int]:
        """Yield the ids of the parameters in called computations that receive these operands."""
        for computation in user.called:
            numbers = operands
            if user.opcode == "conditional":  # operand 0 selects the branch; each branch has one
                own = 1 + user.called.index(computation)
                numbers = [0 for k in operands if k == own]
            for number in numbers:
                if (computation, number) in self._parameters:
                    yield self._parameters[computation, number]

    def _seen_by_caller(
        self, instruction: int, index: Index
    ) -> Iterator[tuple[Instruction, ValueId]]:
        """If a value is the result of a computation, yield the values that it is for the caller.

        It is the caller's result. The result of a loop's body is also the parameter of the body and
        of the condition.
        """
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

    def _nearest(self, start: Instruction, to_operands: bool, most: int = 64) -> str:
        """Return the first source line in a breadth-first search along operands, or along users.

        `most` bounds the instructions that are searched.
        """
        queue, seen = [start], {start.id}
        for i in queue:
            if where := self._module.where(i):
                return where
            if len(queue) < most:
                near = (
                    [self._module.instructions[k] for k in i.operands]
                    if to_operands
                    else self.users.get(i.id, [])
                )
                queue += [k for k in near if k.id not in seen]
                seen.update(k.id for k in near)
        return ""
