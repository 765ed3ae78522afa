"""The operations of a compiled function in order, and which of them call a library."""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import jax

_LINE = re.compile(r"(?:ROOT )?%\S+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\((.*)")
_NOTHING = {"parameter", "constant", "bitcast", "get-tuple-element", "copy", "iota"}
_TYPES = {"pred": 1, "bf16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "f16": 2}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One operation of the compiled program: the bytes that it writes, and its contents."""

    bytes: int
    does: tuple[str, ...]
    library: bool


def kernels(f: Callable[..., Any], *args: Any) -> list[Kernel]:
    """Return the operations that write one result to memory, in order, without loops."""
    text = jax.jit(f).lower(*args).compile().as_text()
    bodies: dict[str, list[re.Match[str]]] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            name = "ENTRY" if line.startswith("ENTRY") else line.split(" ")[0]
        if (found := _LINE.match(line.strip())) is not None:
            bodies.setdefault(name, []).append(found)
    return [_kernel(line, bodies) for line in bodies["ENTRY"] if line[3] not in _NOTHING]


def _kernel(line: re.Match[str], bodies: dict[str, list[re.Match[str]]]) -> Kernel:
    called = re.search(r"calls=(%[^,\s]+)", line[4])
    inside = bodies[called[1]] if called else [line]
    does = sorted(i[3] for i in inside if i[3] not in _NOTHING)
    sizes = map(int, line[2].split(",") if line[2] else ())
    return Kernel(math.prod(sizes) * _TYPES[line[1]], tuple(does), "kind=kCustom" in line[4])
