"""Write one block of a random program: values in scope, choices, and bounds of values.

Every float is bounded by construction, about by `MOST`, so third derivatives keep their
digits. Points are generic, so none lies on a kink or a tie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tests.fuzz.source import Block, Line, Value

MOST = 2.5
DEEPEST = 3
SHAPES = ((), (2,), (3,), (2, 3), (3, 2), (3, 3))
# A constant as NumPy's and Python's; Python's only if its type is that of the program.
_SCALARS = {
    "f": ("({})", "np.float64({})", "np.array({})", "jnp.asarray({})"),
    "i": ("np.int32({})", "np.array({}, np.int32)"),
    "b": ("np.bool_({})", "np.array({})"),
}
_SQUASH = ("lax.sin({0})", "lax.tanh({0})", "{0} * lax.rsqrt(1.0 + lax.square({0}))")


@dataclasses.dataclass
class Shared:
    """State that the blocks of one program share."""

    random: np.random.Generator
    budget: int
    order: int
    names: int = 0
    custom_vjp: bool = False
    in_rule: int = 0

    @contextlib.contextmanager
    def rule(self) -> Iterator[None]:
        """Mark everything written meanwhile as part of a custom rule, or of its function."""
        self.in_rule += 1
        yield
        self.in_rule -= 1


class Writer:
    """The lines of a block, and the values that the next line may read."""

    def __init__(self, shared: Shared, scope: Sequence[Value] = (), depth: int = 0):
        self.shared, self.scope, self.depth = shared, list(scope), depth
        self.random = shared.random
        self.lines: list[Line] = []

    def name(self, letter: str) -> str:
        """Return a name that no other value of the program has."""
        self.shared.names += 1
        return f"{letter}{self.shared.names}"

    def chance(self, p: float) -> bool:
        """Return True with probability `p`."""
        return bool(self.random.random() < p)

    def choose(self, items: Sequence, weights: Sequence[float] | None = None):
        """Return one of some items."""
        if weights is None:
            return items[int(self.random.integers(len(items)))]
        return items[int(self.random.choice(len(items), p=np.asarray(weights) / sum(weights)))]

    def number(self, low: float = 0.3, high: float = 1.4) -> float:
        """Return a generic constant."""
        return round(float(self.random.uniform(low, high)), 3) + 0.0007

    # Lines.

    def call(
        self,
        text: str,
        args: Sequence[Value],
        results: Sequence[Value],
        blocks: Sequence[Block] = (),
    ) -> list[Value]:
        """Write a line with several results of the types of `results`, which are then in scope."""
        out = [dataclasses.replace(v, name=self.name(v.kind)) for v in results]
        self.lines.append(Line(tuple(out), text, tuple(args), tuple(blocks)))
        bound = [self.bounded(v, MOST) if v.kind == "f" else v for v in out]
        self.scope.extend(bound)
        return bound

    def emit(
        self,
        text: str,
        args: Sequence[Value],
        shape: tuple[int, ...],
        kind: str = "f",
        most: float = 1.0,
    ) -> Value:
        """Write a line with one result."""
        return self.call(text, args, [Value("", shape, kind, most)])[0]

    def bounded(self, x: Value, limit: float) -> Value:
        """Return `x`, or a function of it that stays below a limit."""
        if x.most <= limit:
            return x
        if limit < 1 or self.chance(0.4):
            text, most = f"{limit / x.most:.4g} * {{0}}", limit
        else:
            text, most = self.choose(_SQUASH), 1.0
        out = Value(self.name("f"), x.shape, "f", most)
        self.lines.append(Line((out,), text, (x,)))
        return out

    # Values to read.

    def pick(
        self,
        kind: str = "f",
        shape: tuple[int, ...] | None = None,
        where: Callable[[Value], bool] = lambda v: True,
    ) -> Value:
        """Return a value in scope, preferably recent; else a literal or a converted value."""
        found = [
            v
            for v in self.scope
            if v.kind == kind and v.size and (shape is None or v.shape == shape) and where(v)
        ]
        if found and not self.chance(0.04):
            back = min(int(self.random.exponential(3.0)), len(found) - 1)
            return found[-1 - back]
        if shape is None:
            shape = next((s for s in SHAPES[::-1] if where(Value("", s, kind))), (2, 3))
        if kind == "f" and self.chance(0.6):
            near = [v for v in self.scope if v.kind == "f" and v.size]
            if near:
                return self.fit(self.choose(near), shape)
        return self.literal(kind, shape)

    def scalar(self, kind: str = "f") -> Value:
        """Return a value of shape ()."""
        return self.pick(kind, ())

    def literal(self, kind: str, shape: tuple[int, ...]) -> Value:
        """Return a constant of generic numbers, in any form if its shape is ()."""
        n = math.prod(shape)
        if kind == "f":
            numbers = [round(float(a), 3) for a in self.random.uniform(-1.4, 1.4, n)]
        elif kind == "i":
            numbers = [int(a) for a in self.random.integers(0, 4, n)]
        else:
            numbers = [bool(a) for a in self.random.integers(0, 2, n)]
        dtype = {"f": "F", "i": "np.int32", "b": "np.bool_"}[kind]
        most = 1.4 if kind == "f" else 4.0
        if shape == ():
            plain = (f"jnp.array({numbers[0]}, {dtype})",)
            forms = plain + tuple(form.format(numbers[0]) for form in _SCALARS[kind])
            return Value(self.choose(forms), shape, kind, most)
        text = f"jnp.array({numbers}, {dtype})"
        if len(shape) != 1:
            text += f".reshape{shape}"
        return Value(text, shape, kind, most)

    def ramp(self, shape: tuple[int, ...]) -> Value:
        """Return a literal with distinct elements, to be added where a tie would be a kink."""
        n = math.prod(shape)
        steps = self.random.permutation(n) * 0.37 + self.random.uniform(-0.1, 0.1, n)
        numbers = [round(float(a - 0.18 * n), 4) for a in steps]
        text = f"np.array({numbers}).reshape{shape}" if shape else f"np.float64({numbers[0]})"
        return Value(text, shape, "f", max(map(abs, numbers), default=0.0))

    def fit(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Return `x` in another shape: broadcast, cut, summed or reshaped."""
        if x.shape == shape:
            return x
        most = x.most
        if math.prod(shape) == x.size:
            text = f"lax.reshape({{0}}, {shape})"
        elif x.shape == shape[len(shape) - len(x.shape) :]:
            dims = tuple(range(len(shape) - len(x.shape), len(shape)))
            text = f"lax.broadcast_in_dim({{0}}, {shape}, {dims})"
        elif x.shape[len(x.shape) - len(shape) :] == shape:
            axes = tuple(range(len(x.shape) - len(shape)))
            text = f"jnp.sum({{0}}, {axes})"
            most = x.most * x.size / max(math.prod(shape), 1)
        else:
            text = f"jnp.resize({{0}}, {shape})"
        return self.emit(text, [x], shape, "f", most)

    # Nested blocks.

    def inner(self, params: Sequence[Value], closed: bool = False) -> Writer:
        """Return the writer of a nested block; unless `closed` it sees the outer values."""
        scope = list(params) if closed else [*self.scope, *params]
        return Writer(self.shared, scope, self.depth + 1)

    def param(self, like: Value) -> Value:
        """Return a parameter of the type of some value."""
        return dataclasses.replace(like, name=self.name("p"))
