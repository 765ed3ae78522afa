"""Reduce a failing sample as long as it fails in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tests.fuzz.generate import Sample
from tests.fuzz.source import Block, Line, Value

Swap = dict[str, Value]
_NUMBERS = {"f": "0.31", "i": "1", "b": "True"}
_DTYPES = {"f": "F", "i": "np.int32", "b": "np.bool_"}


def shrink(sample: Sample, fails: Callable[[Sample], bool]) -> Sample:
    """Return the smallest sample found."""
    while True:
        smaller = next((s for s in _smaller(sample) if fails(s)), None)
        if smaller is None:
            return sample
        sample = smaller


def _smaller(sample: Sample) -> Iterator[Sample]:
    yield from _levels(sample)
    results = sample.block.results
    for i in range(len(results)):
        rest = (*results[:i], *results[i + 1 :])
        if any(v.kind == "f" for v in rest):
            yield _with(sample, dataclasses.replace(sample.block, results=rest))
    for block in _without_a_line(sample.block):
        yield _with(sample, block)
    yield from _without_an_input(sample)


def _with(sample: Sample, block: Block) -> Sample:
    return dataclasses.replace(sample, block=block)


def _levels(sample: Sample) -> Iterator[Sample]:
    """Yield samples with fewer and simpler transforms."""
    levels = sample.levels
    for i, level in enumerate(levels):
        before, after = levels[:i], levels[i + 1 :]
        if len(levels) > 1:
            yield dataclasses.replace(sample, levels=(*before, *after))
        plain = {"both": False, "moving": False, "calls": 1, "lanes": False, "policy": "", "by": ""}
        for field, value in plain.items():
            if getattr(level, field) != value:
                simple = dataclasses.replace(level, **{field: value})
                yield dataclasses.replace(sample, levels=(*before, simple, *after))
        for j in range(len(level.active)):
            fewer = (*level.active[:j], *level.active[j + 1 :])
            if fewer:
                simple = dataclasses.replace(level, active=fewer)
                yield dataclasses.replace(sample, levels=(*before, simple, *after))


def _literal(v: Value) -> Value:
    """Return a constant of a type."""
    text = f"jnp.full({v.shape}, {_NUMBERS[v.kind]}, {_DTYPES[v.kind]})"
    return dataclasses.replace(v, name=text)


def _swapped(block: Block, swap: Swap) -> Block:
    """Return a block in which some values are replaced."""

    def one(v: Value) -> Value:
        return swap.get(v.name, v)

    lines = tuple(
        dataclasses.replace(
            line,
            args=tuple(map(one, line.args)),
            blocks=tuple(_swapped(b, swap) for b in line.blocks),
        )
        for line in block.lines
    )
    return dataclasses.replace(block, lines=lines, results=tuple(map(one, block.results)))


def _without_a_line(block: Block) -> Iterator[Block]:
    """Yield blocks without a line, last lines first; its arguments or constants replace it."""
    for i in reversed(range(len(block.lines))):
        line = block.lines[i]
        if any(a.name.startswith(("d_", "ct")) for a in line.args):
            continue  # a rule must stay linear
        rest = dataclasses.replace(block, lines=(*block.lines[:i], *block.lines[i + 1 :]))
        alike = {t.name: a for t in line.targets for a in line.args
                 if (a.shape, a.kind) == (t.shape, t.kind)}  # fmt: skip
        constant = {t.name: _literal(t) for t in line.targets}
        yield _swapped(rest, constant)
        if alike:
            yield _swapped(rest, {**constant, **alike})
        for j, inner in enumerate(line.blocks):
            for smaller in _without_a_line(inner):
                yield _put(block, i, line, j, smaller)


def _put(block: Block, i: int, line: Line, j: int, inner: Block) -> Block:
    blocks = (*line.blocks[:j], inner, *line.blocks[j + 1 :])
    changed = dataclasses.replace(line, blocks=blocks)
    return dataclasses.replace(block, lines=(*block.lines[:i], changed, *block.lines[i + 1 :]))


def _without_an_input(sample: Sample) -> Iterator[Sample]:
    """Yield samples with a constant for an input that no level needs."""
    block = sample.block
    for i, v in enumerate(block.params):
        if any(i in level.active for level in sample.levels) or len(block.params) == 1:
            continue
        params = (*block.params[:i], *block.params[i + 1 :])
        shorter = _swapped(dataclasses.replace(block, params=params), {v.name: _literal(v)})
        levels = tuple(
            dataclasses.replace(level, active=tuple(a - (a > i) for a in level.active))
            for level in sample.levels
        )
        yield dataclasses.replace(sample, block=shorter, levels=levels)
