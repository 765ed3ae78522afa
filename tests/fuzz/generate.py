"""Make a random program, its inputs, and a composition of transforms from a seed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.fuzz import algebra, arrays, elementwise, indexing, literals, nested, odd, rules
from tests.fuzz.modes import Level, levels
from tests.fuzz.source import Block, Value, render
from tests.fuzz.writer import DEEPEST, SHAPES, Shared, Writer

LONGEST = 30
_PLAIN = (*elementwise.FAMILY, *arrays.FAMILY, *indexing.FAMILY, *algebra.FAMILY, *literals.FAMILY,
          *odd.FAMILY)  # fmt: skip
# The forms of an input of shape (), by its kind; any other input is a NumPy array.
FORMS = {"f": ("", "float", "float64"), "i": ("", "int32"), "b": ("", "bool", "bool_")}
_MAKE = {"float": float, "bool": bool, "float64": np.float64, "int32": np.int32, "bool_": np.bool_}
_NESTED = (*nested.FAMILY, *rules.FAMILY)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A program and its transforms; `seed` makes the values of its inputs."""

    seed: int
    block: Block
    levels: tuple[Level, ...]

    @property
    def source(self) -> str:
        """The program as Python source."""
        return "\n".join(render(self.block))

    @property
    def types(self) -> list[tuple[str, tuple[int, ...]]]:
        """Kind, with its form, and shape of each input."""
        return [(" ".join((v.kind, v.form)).strip(), v.shape) for v in self.block.params]


def inputs(seed: int, types: list[tuple[str, tuple[int, ...]]]) -> list[Any]:
    """Return generic values of some types."""
    random = np.random.default_rng([seed, 1])
    out: list[Any] = []
    for kind, shape in types:
        letter, *form = kind.split()
        x = _example(letter, shape, random)
        out.append(_MAKE[form[0]](x) if form else x)
    return out


def _example(kind: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Return a generic input."""
    if kind == "f":
        return np.asarray(random.uniform(-1.4, 1.4, shape))
    if kind == "i":
        return np.asarray(random.integers(0, 5, shape), np.int32)
    return np.asarray(random.integers(0, 2, shape), bool)


def sample(seed: int) -> Sample:
    """Return the program of a seed."""
    random = np.random.default_rng([seed, 0])
    length = 3 + int((LONGEST - 2) * random.random() ** 2.5)
    order = int(random.choice([1, 2, 3], p=[0.4, 0.4, 0.2] if length < 18 else [0.5, 0.4, 0.1]))
    shared = Shared(random, length, order)
    w = Writer(shared)
    kinds = ["f"] * int(random.integers(1, 4)) + ["i"] * int(random.integers(0, 2))
    kinds += ["b"] * int(random.random() < 0.1)
    shapes = [w.choose(SHAPES) for _ in kinds]
    params = [
        Value(f"x{i}", s, k, 1.4 if k == "f" else 4.0, "" if s else w.choose(FORMS[k]))
        for i, (s, k) in enumerate(zip(shapes, kinds, strict=True))
    ]
    w.scope.extend(params)
    fill(w, length)
    made = [v for v in w.scope if v not in params]
    results = [v for v in made[-3:] if w.chance(0.75)]
    results += [w.choose(w.scope) for _ in range(random.integers(0, 3))]
    if not any(v.kind == "f" for v in results):
        results.append(w.pick())
    block = Block("program", tuple(params), tuple(w.lines), tuple(results))
    return Sample(seed, block, levels(random, kinds, shared.custom_vjp, order))


def fill(w: Writer, n: int) -> None:
    """Write `n` lines, or fewer if the program has enough; nested lines count."""
    shared = w.shared
    while n > 0 and shared.budget > 0:
        before = shared.budget
        shared.budget -= 1
        if shared.budget > 1 and w.depth < DEEPEST and w.chance(0.2):
            family = _NESTED if not shared.in_rule else _NESTED_IN_RULE
            w.choose(*_split(family))(w, fill)
        else:
            w.choose(*_split(_PLAIN))(w)
        n -= before - shared.budget


def _split(family):
    return [op for op, _ in family], [weight for _, weight in family]


# A function with a custom_jvp rule contains no function that has only reverse mode.
_NESTED_IN_RULE = tuple(pair for pair in _NESTED if pair[0] is not rules.custom_vjp)
