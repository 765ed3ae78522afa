"""Record the functions that a program differentiates: their lines, saved bytes and failures.

`python -m xform run` uses this. `DerivativeRecorder.replacements` returns functions that take the
place of `jax.grad` and JAX's other transforms. Each calls xform's transform of the same name and
records the use in a `FunctionRecord`, a row of the table. A failure of xform does not stop the
program: if planning fails, everything is saved, and if a transform fails, JAX's is called. Only a
budget that a step cannot keep stops it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import html
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xform import everywhere
from xform._jax import staging
from xform.errors import OtherProgram
from xform.interpret.joint import Schedule
from xform.introspection.callables import function_name
from xform.page.writer import write_page
from xform.planner.candidate import Candidate
from xform.planner.costs.outcome import recompute_flops, residual_bytes
from xform.planner.device import resolve_fit
from xform.planner.measure import Measure
from xform.planner.plan_program import plan_program
from xform.planner.planning import Planner, current_planner, use_planner
from xform.planner.problem import Problem
from xform.planner.report.residuals import residuals_of
from xform.policies import Policy, policy_name, save_everything
from xform.program.frameworks import is_framework
from xform.program.source import frame
from xform.steps.step_plan import StepPlan
from xform.terminal.text import columns, human_bytes, human_flops, shorten_place
from xform.transforms.recorded import StepRecorder

# The transforms that return a function, which does the work when it is called. The other
# transforms, such as `vjp`, do the work themselves.
_RETURN_FUNCTIONS = ("grad", "value_and_grad", "jacfwd", "jacrev", "jacobian", "hessian",
                     "checkpoint", "remat")  # fmt: skip
# These are not derivatives: the table shows them only if a problem was noted.
_REGIONS = ("checkpoint", "remat")
# For each transform, names for the first parts of its result, which are compared with JAX's. For
# all other transforms the whole result is compared.
_PARTS = {"value_and_grad": ("value", "gradient"), "jvp": ("value", "tangent"), "vjp": ("value",),
          "linearize": ("value",)}  # fmt: skip
# How many wrappers are followed at most: a function may name itself as its wrapped function.
_MAX_WRAPPERS = 16
_HEAD = ("function", "line", "transform", "traced", "eager", "JAX saves", "xform saves",
         "recomputed (unfused)", "policy")  # fmt: skip


@dataclasses.dataclass
class FunctionRecord:
    """What was recorded for one function under one transform.

    Attributes:
      name: the name of the function.
      where: its file and line.
      transform: the name of the transform.
      detailed: whether `saved_table` is wanted.
      traced: how often it was traced.
      eager: how often it ran operation by operation.
      jax_bytes: bytes saved for the backward pass if everything is saved, as JAX does; None before
        it was planned.
      bytes: bytes that xform saves for the backward pass.
      recompute_flops: FLOPs that the backward pass recomputes.
      left_to_jax: how often JAX's transform was called, because xform's failed.
      policy: the name of the policy; "" before it was planned.
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

    def plan(
        self, planner: Planner, problem: Problem, policy: Policy, measure: Measure | None
    ) -> Candidate:
        """Plan a derivative of this function by `planner`, and record its bytes.

        If planning fails, everything is saved. The record has the figures of the largest program
        that was planned.
        """
        try:
            chosen = planner(problem, policy, measure)
        except Exception as error:  # the program must go on
            if isinstance(error, OtherProgram):  # `xform.jit` then traces the step again
                raise
            policy = save_everything
            chosen = plan_program(problem, policy)
            self.notes[f"everything is saved, because planning failed: {_line(error)}"] += 1
        types = str(problem.marked.in_avals)
        if types not in self.planned_types:  # a function that runs eagerly is planned at each call
            self.planned_types.add(types)
            everything = plan_program(problem, save_everything)
            self._record_bytes(chosen.schedule, residual_bytes(everything.schedule), policy)
        return chosen

    def _record_bytes(self, schedule: Schedule, all_bytes: int, policy: Policy) -> None:
        """Record a planned program, unless a larger one is recorded.

        `all_bytes` are its residuals if everything is saved.
        """
        if self.jax_bytes is not None and all_bytes < self.jax_bytes:
            return
        self.jax_bytes = all_bytes
        if isinstance(
            policy, StepRecorder
        ):  # one of several plans that the search for a step tries
            self.policy = "planned step"
            return
        self.bytes = residual_bytes(schedule)
        self.recompute_flops = int(recompute_flops(schedule))
        self.policy = policy_name(resolve_fit(policy))
        if self.detailed:
            title = f"kept for the backward pass of {self.name}, {self.policy}"
            names = [f"input {i}" for i, _ in enumerate(schedule.joint.inputs)]
            self.saved_table = str(residuals_of(schedule, names, title))

    def record_difference(self, difference: Any, part: str) -> None:
        """Record a difference from JAX in a part of the result, such as "gradient"."""
        self.differences[part] = max(self.differences.get(part, 0.0), float(difference))

    @property
    def place(self) -> str:
        """The function and its line, as text."""
        return f"{self.name} ({shorten_place(self.where) or 'unknown line'})"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of this row, in the order of the table's head."""
        size = lambda n: "" if n is None else human_bytes(n)
        recompute = "" if self.recompute_flops is None else human_flops(self.recompute_flops)
        is_jaxs = self.left_to_jax == self.traced + self.eager
        policy = self.policy or ("JAX's" if is_jaxs else "not planned: eager")
        names = self.name, shorten_place(self.where), self.transform
        counts = str(self.traced), str(self.eager)
        return (*names, *counts, size(self.jax_bytes), size(self.bytes), recompute, policy)


@dataclasses.dataclass(frozen=True)
class _TransformUse:
    """A use of a transform by the program.

    Attributes:
      name: the transform that the program uses.
      called: the transform that is called for it; for `grad` it may be `value_and_grad`.
      f: the function.
      ours, theirs: functions that do the work, by xform or by JAX.
    """

    name: str
    called: str
    f: Any
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


class DerivativeRecorder:
    """Records every function that a program differentiates.

    Args:
      policy: the policy for all of them, as for `xform.install`.
      compared: whether JAX's transforms are called too, and the results compared.
      detailed: whether the saved values of each function are recorded too, for `save_html`.

    Its text is the table of all functions, with notes on failures.
    """

    def __init__(self, policy: Any = None, compared: bool = False, detailed: bool = False):
        self.rows: dict[tuple[str, str, str], FunctionRecord] = {}
        self.steps: list[StepPlan] = []
        self._policy, self._compared, self._detailed = policy, compared, detailed

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Return the recording transforms that replace JAX's, by name."""
        ours = everywhere.replacements(self._policy, self.steps.append)
        jit = {"jit": ours.pop("jit")}
        replacements = jit | {name: self._replacement(name, name, ours[name]) for name in ours}
        if self._compared:  # `grad` returns no value, and the value is compared too
            both = "value_and_grad"
            replacements["grad"] = _without_value(self._replacement("grad", both, ours[both]))
        return replacements

    def _replacement(self, name: str, called: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that takes the place of JAX's transform `name`.

        It calls `ours`, which is xform's transform `called`. If `ours` fails, it calls JAX's
        transform `called`.
        """
        theirs = everywhere.THEIRS[called]

        @functools.wraps(theirs)
        def replacement(*args: Any, **options: Any) -> Any:
            f = args[0] if args else next(iter(options.values()), None)
            if called == "fwd_and_bwd":
                return self._forward_and_backward(f, ours, theirs, args, options)
            if called not in _RETURN_FUNCTIONS:
                return self._call(_TransformUse(name, called, f, ours, theirs), args, options)
            their_function = theirs(*args, **options)  # raises JAX's errors at once
            our_function = lambda *xs, **kwargs: ours(*args, **options)(*xs, **kwargs)
            use = _TransformUse(name, called, f, our_function, their_function)

            @functools.wraps(their_function, updated=())
            def derivative(*xs: Any, **kwargs: Any) -> Any:
                return self._call(use, xs, kwargs)

            return derivative

        replacement.__module__ = "jax"
        return replacement

    def _forward_and_backward(
        self, f: Any, ours: Any, theirs: Any, args: Any, options: Any
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the two functions of `fwd_and_bwd`.

        If JAX has to run the forward pass, it runs the backward pass too.
        """
        our_passes, their_passes = ours(*args, **options), theirs(*args, **options)
        is_left_to_jax = [False]

        def theirs_forward(*xs: Any, **kwargs: Any) -> Any:
            is_left_to_jax[0] = True
            return their_passes[0](*xs, **kwargs)

        use = _TransformUse("fwd_and_bwd", "fwd_and_bwd", f, our_passes[0], theirs_forward)

        def forward(*xs: Any, **kwargs: Any) -> Any:
            return self._call(use, xs, kwargs, compared=False)

        def backward(*xs: Any) -> Any:
            return (their_passes if is_left_to_jax[0] else our_passes)[1](*xs)

        return forward, backward

    def _call(self, use: _TransformUse, xs: Any, kwargs: Any, compared: bool = True) -> Any:
        """Call xform's transform, or JAX's if that fails, and record the use.

        Errors of JAX's transform are the program's own, and pass through.
        """
        row, result, note = self._row(use), None, ""
        restore_state = _containers_of(use.f)
        try:
            with use_planner(functools.partial(row.plan, current_planner())):
                result = use.ours(*xs, **kwargs)
        except Exception as error:
            note = f"left to JAX: {_line(error)}"
        if note:
            restore_state()
            result = use.theirs(*xs, **kwargs)
            row.left_to_jax += 1
            row.notes[note] += 1
        elif compared and self._compared and use.called not in (*_REGIONS, "linear_transpose"):
            restore_own = _containers_of(use.f)
            restore_state()
            try:
                _compare(row, use.called, result, use.theirs(*xs, **kwargs))
            except Exception as error:  # the program goes on
                row.notes[f"could not be compared: {_line(error)}"] += 1
            restore_own()
        if staging():
            row.traced += 1
        else:
            row.eager += 1
        return result

    def _row(self, use: _TransformUse) -> FunctionRecord:
        """Return the record of a function under a transform, which is made at the first use."""
        name, where = _place(use.f)
        key = name, where, use.name
        if key not in self.rows:
            self.rows[key] = FunctionRecord(name, where, use.name, self._detailed)
        return self.rows[key]

    def _shown(self) -> list[FunctionRecord]:
        """Return the records that the table shows."""
        return [r for r in self.rows.values() if r.transform not in _REGIONS or r.notes]

    def __str__(self) -> str:
        rows = self._shown()
        if not rows:
            return "xform: the program did not differentiate any function"
        lines = [columns([_HEAD, *(r.cells() for r in rows)], right=(3, 4, 5, 6, 7))]
        lines += [f"{r.place}, {r.transform}, {n}x {note}"
                  for r in rows for note, n in r.notes.items()]  # fmt: skip
        lines += [f"planned step: {plan.summary}" for plan in self.steps]
        differences = [f"{r.place}: " + ", ".join(f"{k} {x:.2g}" for k, x in r.differences.items())
                       for r in rows if r.differences]  # fmt: skip
        if self._compared:
            title = "largest relative difference from JAX:"
            lines += [title, *(differences or ["nothing compared"])]
        return "\n".join(lines)

    def save_html(self, path: Path) -> None:
        """Write an HTML page with the table and the saved values of each function."""
        saved = [f"<h2>{html.escape(r.place)}</h2>\n<pre>{html.escape(r.saved_table)}</pre>"
                 for r in self._shown() if r.saved_table]  # fmt: skip
        body = "\n".join([f"<pre>{html.escape(str(self))}</pre>", *saved, ""])
        write_page(path, "Values saved by the program", body=body)


def _without_value(both: Callable[..., Any]) -> Callable[..., Any]:
    """Make `grad` from `both`, a `value_and_grad`."""

    @functools.wraps(everywhere.THEIRS["grad"])
    def grad(*args: Any, **options: Any) -> Any:
        with_value = both(*args, **options)

        @functools.wraps(with_value)
        def gradient(*xs: Any, **kwargs: Any) -> Any:
            value, g = with_value(*xs, **kwargs)
            return (g, value[1]) if isinstance(value, tuple) else g

        return gradient

    return grad


def _place(f: Any) -> tuple[str, str]:
    """Return a function's name and its line.

    For a function of a framework it is the line of the program that called the transform.
    """
    for _ in range(_MAX_WRAPPERS):
        f = f.func if isinstance(f, functools.partial) else getattr(f, "__wrapped__", f)
    name = function_name(f)
    code = getattr(f, "__code__", None)
    if code is None or is_framework(code.co_filename):
        return name, frame()
    return name, f"{code.co_filename}:{code.co_firstlineno}"


def _line(error: Exception) -> str:
    """Format an error as one line: its type, and its problem or first line."""
    text = getattr(error, "problem", None) or str(error)
    return " ".join([f"{type(error).__name__}:", *text.strip().splitlines()[:1]])


def _containers_of(f: Any) -> Callable[[], None]:
    """Remember the contents of containers in attributes of `f`; return a function to restore them.

    Flax calls JAX's `grad` with an object that takes its values from a queue when it is called.
    Such an object can be called once more only with its queue as it was.
    """
    attributes = list(getattr(f, "__dict__", {}).values())
    contents = [(c, copy.copy(c)) for c in attributes if type(c) in (list, dict, set, deque)]

    def restore() -> None:
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(content)

    return restore


def _compare(row: FunctionRecord, name: str, ours: Any, theirs: Any) -> None:
    """Record by how much the results of a transform differ, as soon as they are computed."""
    parts = _PARTS.get(name)
    pairs = zip(parts, ours, theirs, strict=False) if parts else [("derivative", ours, theirs)]
    for part, a, b in pairs:
        record = functools.partial(row.record_difference, part=part)
        jax.debug.callback(record, largest_difference(jax.tree.leaves(a), jax.tree.leaves(b)))


def largest_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> Any:
    """Return the largest difference between arrays of two lists, as a float32 scalar.

    The difference of two arrays is relative to the largest number in JAX's array. A difference up
    to the rounding error of the largest number of all arrays counts as 0. Otherwise a gradient that
    is zero except for rounding, such as that of a bias that softmax cancels, would count as
    entirely different.
    """
    differences: list[Any] = []
    for a, b in zip(ours, theirs, strict=True):
        if not jnp.issubdtype(getattr(b, "dtype", jax.dtypes.float0), jnp.inexact) or not b.size:
            continue
        a, b = map(jax.lax.stop_gradient, (jnp.asarray(a), jnp.asarray(b)))
        is_equal = (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        scale = jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0))
        differences.append(
            (jnp.max(jnp.where(is_equal, 0, jnp.abs(a - b))), scale, jnp.finfo(b.dtype).eps)
        )
    largest_scale = functools.reduce(jnp.maximum, [scale for _, scale, _ in differences], 0.0)
    largest: Any = 0.0
    for difference, scale, eps in differences:
        counted = jnp.where(difference <= eps * largest_scale, 0, difference)
        relative = counted / jnp.where(scale == 0, 1, scale)
        largest = jnp.maximum(largest, relative.astype(jnp.float32))
    return largest
