"""Record the functions that a program differentiates: their lines, saved bytes and failures.

`DerivativeRecorder.replacements` are the transforms of `everywhere`, with two additions. They
record each use. And a program that runs without xform still runs: if planning fails, everything is
saved, and if a transform of xform fails, JAX's transform is called.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xform import everywhere
from xform._jax import staging
from xform.interpret.joint import Schedule
from xform.introspection.callables import function_name
from xform.planner.candidate import Candidate
from xform.planner.compiler import Compiler
from xform.planner.costs.outcome import recompute_flops, residual_bytes
from xform.planner.device import resolve_fit
from xform.planner.plan_program import plan_program
from xform.planner.planning import use_planner
from xform.planner.problem import Problem
from xform.planner.report.residuals import residuals_of
from xform.policies import Policy, policy_name, save_everything
from xform.program.source import frame
from xform.storage.files import atomic_write
from xform.terminal.text import columns, human_bytes, human_flops, shorten_place

# The transforms that return a function, which does the work when it is called.
_LATER = ("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian", "checkpoint",
          "remat")  # fmt: skip
# These are not derivatives: the table has them only if they were left to JAX.
_REGIONS = ("checkpoint", "remat")
# The parts of a result that are compared, from the first; of other transforms the whole result.
_PARTS = {"value_and_grad": ("value", "gradient"), "jvp": ("value", "tangent"), "vjp": ("value",),
          "linearize": ("value",)}  # fmt: skip
# The most wrappers of a function that are followed: a function may claim to wrap itself.
_DEEPEST = 16
_HEAD = ("function", "line", "transform", "traced", "eager", "JAX saves", "xform saves",
         "recomputed", "policy")  # fmt: skip


@dataclasses.dataclass
class FunctionRecord:
    """One function under one transform.

    Attributes:
      traced: how often it was traced.
      eager: how often it ran operation by operation.
      jax_bytes: bytes saved for the backward pass if everything is saved.
      bytes: bytes that xform saves for the backward pass.
      recompute_flops: recomputed FLOPs.
      left_to_jax: how often it was left to JAX.
      saved_table: the table of saved values, if `detailed`.
      planned_types: the input types that it was planned for.
      notes: problems, and how often each occurred.
      differences: for each compared part, the largest difference from JAX, relative to JAX's
        largest number.
    """

    name: str
    where: str
    transform: str
    detailed: bool = False
    traced: int = 0
    eager: int = 0
    jax_bytes: int | None = None
    bytes: int | None = None
    recompute_flops: int | None = None
    left_to_jax: int = 0
    policy: str = ""
    saved_table: str = ""
    planned_types: set[str] = dataclasses.field(default_factory=set[str])
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    differences: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    def plan(self, problem: Problem, policy: Policy, compiler: Compiler | None) -> Candidate:
        """Plan, or save everything if that fails, and record the figures of the largest program."""
        try:
            chosen = plan_program(problem, policy, compiler)
        except Exception as error:  # the program must go on
            policy = save_everything
            chosen = plan_program(problem, policy)
            self.notes[f"everything is saved, because planning failed: {_line(error)}"] += 1
        types = str(problem.marked.in_avals)
        if types not in self.planned_types:  # a function that runs eagerly is planned at each call
            self.planned_types.add(types)
            everything = plan_program(problem, save_everything)
            self._measure(chosen.schedule, residual_bytes(everything.schedule), policy)
        return chosen

    def _measure(self, schedule: Schedule, every: int, policy: Policy) -> None:
        if self.jax_bytes is not None and every < self.jax_bytes:
            return
        self.jax_bytes, self.bytes = every, residual_bytes(schedule)
        self.recompute_flops, self.policy = (
            int(recompute_flops(schedule)),
            policy_name(resolve_fit(policy)),
        )
        if self.detailed:
            title = f"kept for the backward pass of {self.name}, {self.policy}"
            names = [f"input {i}" for i, _ in enumerate(schedule.joint.inputs)]
            self.saved_table = str(residuals_of(schedule, names, title))

    def record_difference(self, by: Any, what: str) -> None:
        """Record a difference from JAX."""
        self.differences[what] = max(self.differences.get(what, 0.0), float(by))

    @property
    def place(self) -> str:
        """The function and its line."""
        return f"{self.name} ({shorten_place(self.where) or 'unknown line'})"

    def cells(self) -> tuple[str, ...]:
        """The cells of this row in the table."""
        size = lambda n: "" if n is None else human_bytes(n)
        recompute = "" if self.recompute_flops is None else human_flops(self.recompute_flops)
        whose = "JAX's" if self.left_to_jax == self.traced + self.eager else "not planned: eager"
        policy = self.policy or whose
        return (
            self.name,
            shorten_place(self.where),
            self.transform,
            str(self.traced),
            str(self.eager),
            size(self.jax_bytes),
            size(self.bytes),
            recompute,
            policy,
        )


@dataclasses.dataclass(frozen=True)
class _TransformUse:
    """A use of a transform by the program.

    Attributes:
      name: the transform that the program uses.
      by: the transform that is called for it.
      f: the function.
      ours, theirs: do the work, by xform or by JAX.
    """

    name: str
    by: str
    f: Any
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


class DerivativeRecorder:
    """Records every function that a program differentiates.

    Args:
      policy: the policy for all of them, as for `xform.install`.
      compared: whether JAX's transforms are called too, and the results compared.
      detailed: whether the saved values of each function are listed, for `save_html`.
    """

    def __init__(self, policy: Any = None, compared: bool = False, detailed: bool = False):
        self.rows: dict[tuple[str, str, str], FunctionRecord] = {}
        self._policy, self._compared, self._detailed = policy, compared, detailed

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """The recording transforms that replace JAX's, by name."""
        ours = everywhere.replacements(self._policy)
        replacements = {name: self._replacement(name, name, ours[name]) for name in ours}
        if self._compared:  # to compare the value too, which `grad` does not return
            both = "value_and_grad"
            replacements["grad"] = _without_value(self._replacement("grad", both, ours[both]))
        return replacements

    def _replacement(self, name: str, by: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        theirs = everywhere.THEIRS[by]

        @functools.wraps(theirs)
        def replacement(*args: Any, **options: Any) -> Any:
            f = args[0] if args else next(iter(options.values()), None)
            if by == "fwd_and_bwd":
                return self._passes(f, ours, theirs, args, options)
            if by not in _LATER:
                return self._call(_TransformUse(name, by, f, ours, theirs), args, options)
            jaxs = theirs(*args, **options)  # raises JAX's errors at once
            mine = lambda *xs, **named: ours(*args, **options)(*xs, **named)
            use = _TransformUse(name, by, f, mine, jaxs)

            @functools.wraps(jaxs, updated=())
            def derived(*xs: Any, **named: Any) -> Any:
                return self._call(use, xs, named)

            return derived

        replacement.__module__ = "jax"
        return replacement

    def _passes(self, f: Any, ours: Any, theirs: Any, args: Any, options: Any) -> Any:
        """The two passes of `fwd_and_bwd`; if JAX does the forward pass, it does the other too."""
        mine, jaxs = ours(*args, **options), theirs(*args, **options)
        left = [False]

        def theirs_forward(*xs: Any, **named: Any) -> Any:
            left[0] = True
            return jaxs[0](*xs, **named)

        use = _TransformUse("fwd_and_bwd", "fwd_and_bwd", f, mine[0], theirs_forward)

        def forward(*xs: Any, **named: Any) -> Any:
            return self._call(use, xs, named, compared=False)

        def backward(*xs: Any) -> Any:
            return (jaxs if left[0] else mine)[1](*xs)

        return forward, backward

    def _call(self, use: _TransformUse, xs: Any, named: Any, compared: bool = True) -> Any:
        """Do the work by xform; if that fails, by JAX, whose errors pass through."""
        row, result, why = self._row(use), None, ""
        try:
            with use_planner(row.plan):
                result = use.ours(*xs, **named)
        except Exception as error:
            why = f"left to JAX: {_line(error)}"
        if why:
            result = use.theirs(*xs, **named)
            row.left_to_jax += 1
            row.notes[why] += 1
        elif compared and self._compared and use.by not in (*_REGIONS, "linear_transpose"):
            _compare(row, use.by, result, use.theirs(*xs, **named))
        if staging():
            row.traced += 1
        else:
            row.eager += 1
        return result

    def _row(self, use: _TransformUse) -> FunctionRecord:
        name, where = _place(use.f)
        key = name, where, use.name
        if key not in self.rows:
            self.rows[key] = FunctionRecord(name, where, use.name, self._detailed)
        return self.rows[key]

    def _shown(self) -> list[FunctionRecord]:
        return [r for r in self.rows.values() if r.transform not in _REGIONS or r.notes]

    def __str__(self) -> str:
        rows = self._shown()
        if not rows:
            return "xform: the program did not differentiate any function"
        lines = [columns([_HEAD, *(r.cells() for r in rows)], right=(3, 4, 5, 6, 7))]
        lines += [f"{r.place}, {r.transform}, {n}x {note}"
                  for r in rows for note, n in r.notes.items()]  # fmt: skip
        apart = [f"{r.place}: " + ", ".join(f"{k} {x:.2g}" for k, x in r.differences.items())
                 for r in rows if r.differences]  # fmt: skip
        if self._compared:
            lines += ["largest relative difference from JAX:", *(apart or ["nothing compared"])]
        return "\n".join(lines)

    def save_html(self, path: Path) -> None:
        """Write an HTML page with the table and the saved values of each function."""
        kept = [f"<h2>{html.escape(r.place)}</h2>\n<pre>{html.escape(r.saved_table)}</pre>"
                for r in self._shown() if r.saved_table]  # fmt: skip
        head = '<!doctype html>\n<meta charset="utf-8">\n<title>Values saved by the program</title>'
        page = "\n".join([head, f"<pre>{html.escape(str(self))}</pre>", *kept, ""])
        with atomic_write(path) as partial:
            partial.write_text(page, encoding="utf-8")


def _without_value(both: Callable[..., Any]) -> Callable[..., Any]:
    """`grad`, made from `value_and_grad`."""

    @functools.wraps(everywhere.THEIRS["grad"])
    def grad(*args: Any, **options: Any) -> Any:
        with_value = both(*args, **options)

        @functools.wraps(with_value)
        def gradient(*xs: Any, **named: Any) -> Any:
            value, g = with_value(*xs, **named)
            return (g, value[1]) if isinstance(value, tuple) else g

        return gradient

    return grad


def _place(f: Any) -> tuple[str, str]:
    """A function's name and line; for a library's function, the user's line that calls it."""
    for _ in range(_DEEPEST):
        f = f.func if isinstance(f, functools.partial) else getattr(f, "__wrapped__", f)
    name = function_name(f)
    code = getattr(f, "__code__", None)
    if code is None or f"{os.sep}site-packages{os.sep}" in code.co_filename:
        return name, frame()
    return name, f"{code.co_filename}:{code.co_firstlineno}"


def _line(error: Exception) -> str:
    """An error in one line: its type, and the problem that it names."""
    text = getattr(error, "problem", None) or str(error)
    return " ".join([f"{type(error).__name__}:", *text.strip().splitlines()[:1]])


def _compare(row: FunctionRecord, name: str, ours: Any, theirs: Any) -> None:
    """Record by how much results differ, as soon as they are computed."""
    parts = _PARTS.get(name)
    pairs = zip(parts, ours, theirs, strict=False) if parts else [("derivative", ours, theirs)]
    try:
        for what, a, b in pairs:
            record = functools.partial(row.record_difference, what=what)
            jax.debug.callback(record, largest_difference(jax.tree.leaves(a), jax.tree.leaves(b)))
    except Exception as error:  # the program goes on
        row.notes[f"could not be compared: {_line(error)}"] += 1


def largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> Any:
    """The largest difference of two lists of arrays, relative to the largest number in its array.

    A difference up to the rounding error of the largest number of all arrays counts as 0. For
    example, the gradient of a bias that softmax cancels is zero except for rounding, and two such
    gradients have no digit in common.
    """
    differences: list[Any] = []
    for a, b in zip(ours, theirs, strict=True):
        if not jnp.issubdtype(getattr(b, "dtype", jax.dtypes.float0), jnp.inexact) or not b.size:
            continue
        a, b = map(jax.lax.stop_gradient, (jnp.asarray(a), jnp.asarray(b)))
        same = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        size = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0))
        differences.append(
            (jnp.max(jnp.where(same, 0, jnp.abs(a - b))), size, jnp.finfo(b.dtype).eps)
        )
    largest = functools.reduce(jnp.maximum, [size for _, size, _ in differences], 0.0)
    most: Any = 0.0
    for by, size, eps in differences:
        by = jnp.where(by <= eps * largest, 0, by) / jnp.where(size == 0, 1, size)
        most = jnp.maximum(most, by.astype(jnp.float32))
    return most
