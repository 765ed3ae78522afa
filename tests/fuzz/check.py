"""One program under one composition, by xform and by JAX: are the results the same numbers?"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.evaluate import Eager, Machine
from tests.fuzz.generate import Sample, inputs
from tests.fuzz.modes import Fun, Level, compose, order
from tests.fuzz.source import function
from xform._jax import closed, set_current_trace
from xform.errors import NotDifferentiable, XformError

# What rounding may do to a well-conditioned program, relative to the largest element; beyond it,
# what disturbing the last bits of each operation does to the reference, so many times over.
TOLERANCE = 1e-12
NOISE = 2e-15
TIMES = 20.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one program.

    `verdict`: agrees, ill-conditioned (agrees within the reference's own noise), mismatch, crash,
    refused (by JAX), or invalid (the program itself does not run). `where` is the way in which it
    was run, `error` how far the results are apart, `text` what went wrong; `names` are the
    primitives of the program, each as often as it is written.
    """

    verdict: str
    where: str = ""
    error: float = 0.0
    text: str = ""
    names: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether xform is to blame."""
        return self.verdict in ("mismatch", "crash")

    @property
    def kind(self) -> tuple[str, str, str]:
        """What failures of one cause have in common, as far as one can see."""
        return self.verdict, self.where, self.text.split(":")[0] if self.verdict == "crash" else ""


def check(sample: Sample, ways: Sequence[str] = ("staged",)) -> Outcome:
    """Compare a sample's results, in some ways of running it: staged, eager, compiled."""
    return check_source(sample.source, inputs(sample.seed, sample.types), sample.levels, ways)


def check_source(source: str, xs: Sequence[np.ndarray], levels: Sequence[Level],
                 ways: Sequence[str] = ("staged",)) -> Outcome:  # fmt: skip
    """Compare what a program gives at a point under some levels."""
    f = function(source)
    try:
        names = tuple(primitives(jax.make_jaxpr(f)(*xs)))
    except NotImplementedError as e:  # by JAX: not every primitive has every batching rule
        return Outcome("refused", "JAX", text=_short(e))
    except Exception as e:
        return Outcome("invalid", "plain", text=_short(e))
    try:
        expected_program = jax.make_jaxpr(_composed(source, levels, own=False))(*xs)
        expected = Machine().run(expected_program, xs)
    except Exception as e:
        return Outcome("refused", "JAX", text=_short(e), names=names)
    # JAX raises at it when it is run, if not when it is traced; here what is dead is not run.
    forward_of_custom_vjp = "custom_lin" in primitives(expected_program)
    own = _composed(source, levels, own=True)
    worst = Outcome("agrees", names=names)
    for where in ways:
        try:
            found = _RUN[where](own, xs)
        except Exception as e:
            both = forward_of_custom_vjp and isinstance(e, NotDifferentiable)
            refused = both or _of_batching(e)
            return Outcome("refused" if refused else "crash", where, text=_short(e), names=names)
        error = distance(found, expected)
        if error <= TOLERANCE:
            if error > worst.error:
                worst = dataclasses.replace(worst, where=where, error=error)
            continue
        spread = distance(Machine(NOISE).run(expected_program, xs), expected)
        verdict = "ill-conditioned" if error <= TIMES * spread else "mismatch"
        text = f"distance {error:.3g}, noise {spread:.1e}"
        worst = Outcome(verdict, where, error, text, names)
        if worst.failed:
            text = f"{text}\n{differences(found, expected)}"
            return dataclasses.replace(worst, text=text)
    return worst


def results(sample: Sample) -> dict[str, list[Any]]:
    """Both results of a sample, or what was raised instead."""
    out: dict[str, list[Any]] = {}
    xs = inputs(sample.seed, sample.types)
    for name, own in (("xform", True), ("jax", False)):
        try:
            out[name] = _staged(_composed(sample.source, sample.levels, own), xs)
        except Exception as e:
            out[name] = [_short(e)]
    return out


def _composed(source: str, levels: Sequence[Level], own: bool) -> Fun:
    """A program under all levels, in a form that they can differentiate."""
    by_jax = [level for level in levels if not own or level.by]
    forward = all(level.kind in ("jvp", "vmap", "jit") for level in by_jax)
    f = function(source, for_jax=bool(by_jax), back=not forward)
    return compose(f, levels, own)


def _staged(f: Any, xs: Any) -> list[Any]:
    return Machine().run(jax.make_jaxpr(f)(*xs), xs)


def _eager(f: Any, xs: Any) -> list[Any]:
    with set_current_trace(Eager()):
        return list(f(*map(jnp.asarray, xs)))


def _compiled(f: Any, xs: Any) -> list[Any]:
    return list(jax.jit(f)(*xs))


_RUN = {"staged": _staged, "eager": _eager, "compiled": _compiled}


def distance(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest difference, relative to the largest element of an output, absolute below 1."""
    if len(found) != len(expected):
        return np.inf
    pairs = zip(map(np.asarray, found), map(np.asarray, expected), strict=True)
    return max((_distance(a, b) for a, b in pairs), default=0.0)


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    if a.dtype.kind not in "fc":
        return 0.0 if np.array_equal(a, b) else np.inf
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return np.inf
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    scale = max(1.0, float(np.max(np.abs(b), initial=0.0, where=finite)))
    return float(np.max(np.abs(np.where(finite, a - b, 0.0)), initial=0.0)) / scale


def differences(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """The outputs that are apart, as text."""
    if len(found) != len(expected):
        return f"{len(found)} outputs, not {len(expected)}"
    lines = []
    for i, (a, b) in enumerate(zip(map(np.asarray, found), map(np.asarray, expected), strict=True)):
        if _distance(a, b) > TOLERANCE:
            lines.append(f"output {i}: {a.dtype}{a.shape}\n{a}\nis not {b.dtype}{b.shape}\n{b}")
    return "\n".join(lines)


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of all equations of a program, nested ones included."""
    for eqn in closed(jaxpr)[0].eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(closed(value)[0], "eqns"):
                yield from primitives(value)


def _of_batching(e: Exception) -> bool:
    """Whether JAX itself cannot batch what it was given: it lacks a rule, or fails within one.

    With JAX's transforms alone it may not come to that, as a `custom_vmap` is left out of them.
    """
    last = traceback.extract_tb(e.__traceback__)[-1].filename
    lacks = isinstance(e, NotImplementedError) and not isinstance(e, XformError)
    inside = isinstance(e, AssertionError) and last.endswith("custom_batching.py")
    return "/jax/_src/" in last and (lacks or inside)


def _short(e: Exception) -> str:
    """An exception, and where it was raised."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/tests/fuzz/" not in f.filename]
    at = "".join(f"\n  {f.filename}:{f.lineno} {f.name}" for f in frames[-4:])
    return f"{type(e).__name__}: {e}{at}"


def describe(levels: Sequence[Level]) -> str:
    """A composition, innermost first."""
    return f"order {order(levels)}: {' . '.join(map(str, levels))}"
