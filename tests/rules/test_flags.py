"""Three programs of each family, and structured ones, under each flag of the matrix."""

import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests import flags
from tests.rules.programs import X
from tests.rules.test_rules import FAMILIES, heavy
from xform.testing import Case

# Programs with a custom_vjp: JAX refuses their forward mode when it compiles it.
REVERSE_ONLY = ("custom_vjp", "nondiff_argnums", "nested regions", "scan of rules")

# Programs that plain JAX cannot compile under its leak check: they hold tracers of their trace.
LEAKING = ("linear_call",)


def families() -> Iterator[Case]:
    """Yield the first case of three primitives of each family that JAX differentiates too."""
    for family in FAMILIES:
        cases = importlib.import_module(f"tests.rules.cases.{family}").CASES
        of_primitive = {c.primitive: c for c in reversed(cases) if c.jax and not heavy(c)}
        kept = [c for c in cases if c is of_primitive.get(c.primitive)]
        yield from kept[:3]


def structured() -> Iterator[Case]:
    """Yield regions, custom rules, loops and branches.

    They are made again for each flag, because some flags are read when a function is decorated.
    """
    curve = lambda x: x / (1 + x * x)
    mixed = lambda x, y: jnp.sin(x * y) @ y

    @jax.custom_jvp
    def pushed(x, y):
        return curve(x) * y

    @pushed.defjvp
    def _(xs, dxs):
        (x, y), (dx, dy) = xs, dxs
        return pushed(x, y), x * dx + 2 * y * dy

    @jax.custom_vjp
    def pulled(x, y):
        return curve(x) * y

    pulled.defvjp(lambda x, y: (pulled(x, y), (x, y)), lambda r, ct: (r[0] * ct, 2 * r[1] * ct))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def partly(n, x, y):
        return curve(x) ** n, y

    partly.defvjp(lambda n, x, y: (partly(n, x, y), x), lambda n, x, ct: (n * x * ct[0], None))

    def step(c, x):
        return curve(c * x + x), jax.jit(curve)(c)

    remembered = jax.checkpoint(step, policy=jax.checkpoint_policies.dots_saveable)
    loop = lambda f: lambda x, y: lax.scan(f, x, y)
    matrix = np.stack([X, X * X, 1 - X])

    def branch(x, y):
        return lax.cond(x[0] > 0, jax.checkpoint(mixed), lambda x, y: pushed(x, y).sum(), x, y)

    def layers(x, y):
        return pulled(jax.checkpoint(pushed)(x, y), jax.checkpoint(pulled)(y, x))

    programs = {
        "jit": jax.jit(mixed),
        "checkpoint": jax.checkpoint(mixed),
        "custom_jvp": pushed,
        "custom_vjp": pulled,
        "nondiff_argnums": functools.partial(partly, 3),
        "nested regions": layers,
        "branch": branch,
        "fori_loop": lambda x, y: lax.fori_loop(0, 3, lambda i, c: curve(c * y), x),
        "while": lambda x, y: lax.while_loop(lambda c: c[0] < 5, lambda c: 1.5 * c + curve(y), x),
    }
    for name, f in programs.items():
        yield Case("", f, (X, X + 0.4), name)
    yield Case("", loop(step), (X, matrix), "scan")
    yield Case("", loop(remembered), (X, matrix), "scan of regions")
    yield Case("", loop(lambda c, x: (pulled(c, x), pushed(x, c))), (X, matrix), "scan of rules")


Results = dict[tuple[str, str], Any]  # by program and transform


def name_of(case: Case) -> str:
    """Return the name of a program, which does not depend on how JAX wraps its function."""
    return case.id if case.primitive else case.label


def derivatives(ad: ModuleType, cases: list[Case], failed: dict[Any, str]) -> Results:
    """Return the gradient of each program and its derivative in one direction, by `ad`.

    Programs that raise are put into `failed` instead.
    """
    results: Results = {}
    for case in cases:
        args = [jnp.asarray(x) for x in case.args]
        active = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.inexact)]
        loss, xs = functools.partial(squares, case.fun, args, active), [args[i] for i in active]
        ways: dict[str, Callable[[], Any]] = {
            "grad": lambda: ad.grad(loss, tuple(range(len(xs))))(*xs),  # noqa: B023
            "jvp": lambda: ad.jvp(loss, xs, [jnp.cos(x) for x in xs])[1],  # noqa: B023
        }
        if case.label in REVERSE_ONLY:
            del ways["jvp"]
        for name, way in ways.items():
            try:
                results[name_of(case), name] = way()
            except Exception as e:
                # Not the exception itself: it holds tracers.
                failed[name_of(case), name] = f"{type(e).__name__}: {e}"
    return results


def squares(f: Callable[..., Any], args: list[Any], active: list[int], *xs: Any) -> Any:
    """Return the sum of the squares of the outputs of `f`, as a function of some arguments."""
    moving = dict(zip(active, xs, strict=True))
    ys = jax.tree.leaves(f(*(moving.get(i, x) for i, x in enumerate(args))))
    return sum(jnp.sum(y.real * y.real) for y in ys if jnp.issubdtype(y.dtype, jnp.inexact))


@pytest.fixture(scope="module")
def reference() -> Results:
    """Return JAX's own derivatives in float64 without any flag, if JAX has them.

    JAX's gradient of a solve keeps tracers. Whether the leak check finds them depends on when
    Python collects garbage, so the check is off here.
    """
    with jax.enable_x64(True), jax.check_tracer_leaks(False):
        return jax.jit(lambda: derivatives(jax, [*families(), *structured()], {}))()


@pytest.mark.parametrize("cell", flags.CELLS)
def test_flag(cell: str, reference: Results) -> None:
    """Every derivative is right under the flag, compiled and, for structured programs, eagerly."""
    problems: list[str] = []
    with flags.under(cell):
        left_out = LEAKING if jax.config.jax_check_tracer_leaks else ()
        cases = [c for c in (*families(), *structured()) if c.primitive not in left_out]
        failed: dict[Any, str] = {}
        compiled = jax.jit(lambda: derivatives(xform, cases, failed))()
        eager = derivatives(xform, [c for c in cases if not c.primitive], failed)
        # xform may refuse what plain JAX refuses under the same flag.
        refused: dict[Any, str] = {}
        derivatives(jax, [c for c in cases if name_of(c) in {name for name, _ in failed}], refused)
    expected = {key for key in reference if key[0] not in left_out}
    assert expected <= compiled.keys() | failed.keys()
    for key in failed.keys() & expected - refused.keys():
        problems.append(f"{key}: {failed[key]}")
    for results in (compiled, eager):
        for key in results.keys() & expected:
            pairs = zip(*map(jax.tree.leaves, (results[key], reference[key])), strict=True)
            if not all(np.allclose(a, b, 1e-3, 1e-3) for a, b in pairs):
                problems.append(f"{key}: {results[key]} is not {reference[key]}")
    assert not problems, "\n".join(problems)
