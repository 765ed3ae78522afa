"""Run one program under one composition by xform and by JAX, and compare numbers and types."""

from __future__ import annotations

import copy
import dataclasses
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.evaluate import Eager, Machine, sized
from tests.fuzz.generate import Sample, inputs
from tests.fuzz.modes import Fun, Level, compose, order
from tests.fuzz.source import function
from xform._jax import jaxpr_and_consts, set_current_trace
from xform.errors import NotDifferentiable, XformError

# The error that rounding may cause in a well-conditioned program in float64, relative to the
# largest element. Beyond it, the allowed multiple of the effect of disturbing the last bits of each
# operation of the reference. In float32 all of these are larger, in proportion to its rounding.
TOLERANCE = 1e-12
NOISE = 2e-15
TIMES = 20.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    `verdict`: agrees, ill-conditioned (agrees within the reference's own noise), mismatch, crash,
    refused (by JAX), or invalid (the program itself does not run). `where` is the way in which it
    was run, `error` the distance between the results, `text` what went wrong; `names` are the
    primitives of the program, each as often as it occurs.
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
        """A key that failures with the same cause probably share."""
        return self.verdict, self.where, self.text.split(":")[0] if self.verdict == "crash" else ""


@dataclasses.dataclass
class Found:
    """The results of a program: values, and their types as text with weak types marked."""

    values: list[Any]
    types: list[str]


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a program; `reference` is the way that JAX's own transforms use.

    `run(f, xs, noise)` runs a function of arrays; `wide` means 64 bits. `batched` runs the program
    on a batch of points.
    """

    run: Callable[..., Found]
    reference: str
    wide: bool = True
    batched: bool = False


def check(sample: Sample, ways: Sequence[str] = ("staged",)) -> Outcome:
    """Compare a sample's results, run in some of the `WAYS`."""
    return check_source(sample.source, inputs(sample.seed, sample.types), sample.levels, ways)


def check_source(source: str, xs: Sequence[Any], levels: Sequence[Level],
                 ways: Sequence[str] = ("staged",)) -> Outcome:  # fmt: skip
    """Compare the results of a program at a point under some levels. Warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            names = tuple(primitives(jax.make_jaxpr(function(source))(*xs)))
        except Exception as e:
            if isinstance(e, NotImplementedError) or _of_batching(e):
                return Outcome("refused", "JAX", text=_short(e))
            return Outcome("invalid", "plain", text=_short(e))
        worst = Outcome("agrees", names=names)
        for where in ways:
            with jax.enable_x64(WAYS[where].wide):
                # JAX remembers the type of a NumPy array, in 64 bits or not.
                outcome = _compared(source, copy.deepcopy(xs), levels, where)
            outcome = dataclasses.replace(outcome, where=where, names=names)
            if outcome.verdict not in ("agrees", "ill-conditioned"):
                return outcome
            if outcome.error > worst.error:
                worst = outcome
        return worst


def _compared(source: str, xs: Sequence[Any], levels: Sequence[Level], where: str) -> Outcome:
    """Return the outcome of one way."""
    way = WAYS[where]
    if way.batched:
        xs = _batch(xs)
    theirs, reference = _composed(source, levels, False, way.batched), WAYS[way.reference].run
    try:
        expected = reference(theirs, xs)
    except Exception as e:
        return Outcome("refused", text=_short(e))
    try:
        found = way.run(_composed(source, levels, True, way.batched), xs)
    except Exception as e:
        both = isinstance(e, NotDifferentiable) and _pushed_through_custom_vjp(theirs, xs, way)
        both = both or (way.run is _symbolic and _fails(lambda: _symbolic(theirs, xs)))
        return Outcome("refused" if both or _of_batching(e) else "crash", text=_short(e))
    if found.types != expected.types:
        text = f"types {', '.join(found.types)}\nare not {', '.join(expected.types)}"
        return Outcome("mismatch", error=np.inf, text=text)
    error = distance(found.values, expected.values)
    if error <= TOLERANCE:
        return Outcome("agrees", error=error)
    spread = distance(reference(theirs, xs, NOISE).values, expected.values)
    text = f"distance {error:.3g}, noise {spread:.1e}"
    if error <= TIMES * spread:
        return Outcome("ill-conditioned", error=error, text=text)
    if way.run is _compiled and distance(_compiled(theirs, xs).values, expected.values) > TOLERANCE:
        return Outcome("refused", text="XLA computes another value of JAX's own derivative too")
    text = f"{text}\n{differences(found.values, expected.values)}"
    return Outcome("mismatch", error=error, text=text)


def _pushed_through_custom_vjp(theirs: Fun, xs: Sequence[Any], way: Way) -> bool:
    """Return whether JAX pushes tangents through a custom_vjp too.

    JAX raises when that is run, if not when it is traced. The reference does not run dead code.
    """
    if "custom_lin" in primitives(jax.make_jaxpr(theirs)(*xs)):
        return True
    try:
        if way.run is _eager:
            theirs(*xs)
    except (TypeError, NotImplementedError) as e:
        return "custom_vjp" in str(e) or "custom_lin" in str(e)
    return False


def results(sample: Sample) -> dict[str, list[Any]]:
    """Return both results of a sample, or the exceptions."""
    out: dict[str, list[Any]] = {}
    xs = inputs(sample.seed, sample.types)
    for name, own in (("xform", True), ("jax", False)):
        try:
            out[name] = _staged(_composed(sample.source, sample.levels, own), xs).values
        except Exception as e:
            out[name] = [_short(e)]
    return out


def _fails(run: Callable[[], Any]) -> bool:
    """Return whether a function raises."""
    try:
        run()
    except Exception:
        return True
    return False


def _composed(source: str, levels: Sequence[Level], own: bool, batched: bool = False) -> Fun:
    """Return a program under all levels, in a form that they can differentiate."""
    by_jax = [level for level in levels if not own or level.by]
    forward = all(level.kind in ("jvp", "vmap", "jit") for level in by_jax)
    rule_by_jax = "jax.jvp(" in source  # a user's rule, which JAX differentiates
    f = function(source, for_jax=rule_by_jax or bool(by_jax), back=not forward)
    return compose(_over_batch(f) if batched else f, levels, own)


# The number of points in a batch.
_LANES = 3


def _is_batched(i: int) -> bool:
    """Return whether input `i` of a program differs between the points of a batch."""
    return i % 3 != 1


def _batch(xs: Sequence[Any]) -> list[Any]:
    """Return inputs for a batch of points: most have a new leading axis."""
    scales = [1.0, 0.7, -0.4][:_LANES]
    stack = lambda x: np.stack([k * x if x.dtype.kind == "f" else x for k in scales])
    return [stack(np.asarray(x)) if _is_batched(i) else x for i, x in enumerate(xs)]


def _over_batch(f: Fun) -> Fun:
    """Return a program as a function of a batch of points."""

    def batch(*xs: Any) -> tuple[Any, ...]:
        return jax.vmap(f, [0 if _is_batched(i) else None for i in range(len(xs))])(*xs)

    return batch


def _type(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}{' weak' if aval.weak_type else ''}"


def _staged(f: Any, xs: Any, noise: float = 0.0) -> Found:
    """Run with arguments that are unknown during the trace, as in `jit`."""
    jaxpr = jax.make_jaxpr(f)(*xs)
    return Found(Machine(noise).run(jaxpr, xs), list(map(_type, jaxpr.out_avals)))


def _symbolic(f: Any, xs: Any, noise: float = 0.0) -> Found:
    """Run with the number of points unknown during the trace, as in `jax.export`."""
    (b,) = jax.export.symbolic_shape("b")
    types = [
        jax.ShapeDtypeStruct((b, *np.shape(x)[1:]), x.dtype) if _is_batched(i) else x
        for i, x in enumerate(xs)
    ]
    jaxpr = jax.make_jaxpr(f)(*types)
    avals = [a.update(shape=sized(a.shape, {"b": _LANES})) for a in jaxpr.out_avals]
    return Found(Machine(noise, {"b": _LANES}).run(jaxpr, xs), list(map(_type, avals)))


def _closed(f: Any, xs: Any, noise: float = 0.0) -> Found:
    """Run with known arguments, of types that a user would pass, inside a trace."""
    return _staged(lambda: f(*xs), (), noise)


def _eager(f: Any, xs: Any) -> Found:
    """Run outside `jit`; every second array is JAX's."""
    xs = [jnp.asarray(x) if i % 2 and np.ndim(x) else x for i, x in enumerate(xs)]
    with set_current_trace(Eager()):
        return _of(f(*xs))


def _compiled(f: Any, xs: Any) -> Found:
    """Run optimized, whatever the flags: at level 0 XLA:CPU returns NaN for some JAX functions."""
    return _of(jax.jit(f, compiler_options={"xla_backend_optimization_level": 3})(*xs))


def _of(values: Sequence[Any]) -> Found:
    """Return the results. JAX passes values of NumPy and Python on unchanged, in 64 bits."""
    types = list(map(jax.typeof, values))
    pairs = zip(values, types, strict=True)
    values = [x if isinstance(x, jax.Array) else np.asarray(x, t.dtype) for x, t in pairs]
    return Found(values, list(map(_type, types)))


WAYS = {
    "staged": Way(_staged, "staged"),
    "closed": Way(_closed, "closed"),
    "single": Way(_closed, "single", wide=False),
    "eager": Way(_eager, "closed"),
    "single-eager": Way(_eager, "single", wide=False),
    "compiled": Way(_compiled, "staged"),
    "symbolic": Way(_symbolic, "staged", batched=True),
}


def distance(found: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest difference, relative to an output's largest element, absolute below 1.

    For float32 it is divided by the ratio of its rounding error to that of float64.
    """
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
    unit = float(np.finfo(a.dtype).eps / np.finfo(np.float64).eps)
    return float(np.max(np.abs(np.where(finite, a - b, 0.0)), initial=0.0)) / scale / unit


def differences(found: Sequence[Any], expected: Sequence[Any]) -> str:
    """Return the outputs that differ, as text."""
    if len(found) != len(expected):
        return f"{len(found)} outputs, not {len(expected)}"
    lines = []
    for i, (a, b) in enumerate(zip(map(np.asarray, found), map(np.asarray, expected), strict=True)):
        if _distance(a, b) > TOLERANCE:
            lines.append(f"output {i}: {a.dtype}{a.shape}\n{a}\nis not {b.dtype}{b.shape}\n{b}")
    return "\n".join(lines)


def primitives(jaxpr: Any) -> Iterator[str]:
    """Return the names of all equations of a program, including nested ones."""
    for eqn in jaxpr_and_consts(jaxpr)[0].eqns:
        yield eqn.primitive.name
        for value in jax.tree.leaves(list(eqn.params.values())):
            if hasattr(jaxpr_and_consts(value)[0], "eqns"):
                yield from primitives(value)


def _of_batching(e: Exception) -> bool:
    """Return whether JAX itself cannot batch the program: a rule is missing, or fails.

    With JAX's transforms alone this may not show, because they leave a `custom_vmap` out.
    """
    last = traceback.extract_tb(e.__traceback__)[-1].filename
    lacks = isinstance(e, NotImplementedError) and not isinstance(e, XformError)
    inside = isinstance(e, AssertionError) and last.endswith("custom_batching.py")
    return "/jax/_src/" in last and (lacks or inside)


def _short(e: Exception) -> str:
    """Return an exception, and where it was raised, as text."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if "/tests/fuzz/" not in f.filename]
    at = "".join(f"\n  {f.filename}:{f.lineno} {f.name}" for f in frames[-4:])
    return f"{type(e).__name__}: {e}{at}"


def describe(levels: Sequence[Level]) -> str:
    """Return a composition as text, innermost first."""
    return f"order {order(levels)}: {' . '.join(map(str, levels))}"
