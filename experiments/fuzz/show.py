"""Show a random program as Python and as a jaxpr, with both results; or recheck the cases."""

from __future__ import annotations

import dataclasses

import jax
from rich.console import Console

from experiments.fuzz.worker import prepare, smaller, ways
from tests.fuzz.cases import load, save
from tests.fuzz.check import check, describe, results
from tests.fuzz.generate import Sample, inputs, sample
from tests.fuzz.source import function

_CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


def show(seed: int, condition: str = "") -> int:
    """Print a program and its results; if it fails, also a smaller one. Return 1 if it fails."""
    prepare()
    s, how = sample(seed), ways(seed, condition)
    _program(f"program {seed}", s)
    outcome = check(s, how)
    if outcome.failed:
        s, outcome = smaller(s, outcome, how)
        _program("smaller, and failing alike", s)
    for name, values in results(s).items():
        _CONSOLE.print(f"{name}:", *values, sep="\n")
    _CONSOLE.rule(f"{outcome.verdict} {outcome.where}")
    _CONSOLE.print(outcome.text)
    return int(outcome.failed)


def close() -> int:
    """Run the stored cases again, and close the cases that pass. Return 1 if any is open."""
    cases = load()
    for i, c in enumerate(cases):
        outcome = c.check()
        reason = (c.open or outcome.text.splitlines()[0]) if outcome.failed else ""
        cases[i] = dataclasses.replace(c, open=reason)
        _CONSOLE.print(f"{c.name}: {outcome.verdict} {reason}")
    save(cases)
    return int(any(c.open for c in cases))


def _program(title: str, s: Sample) -> None:
    _CONSOLE.rule(title)
    _CONSOLE.print(s.source)
    _CONSOLE.print(describe(s.levels))
    xs = inputs(s.seed, s.types)
    for v, x in zip(s.block.params, xs, strict=True):
        _CONSOLE.print(f"{v.name} = {x!r}")
    _CONSOLE.print(str(jax.make_jaxpr(function(s.source))(*xs)))
