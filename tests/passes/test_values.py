"""A pass never changes a value: random programs, in float64, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.fuzz.evaluate import Machine
from tests.fuzz.generate import inputs, sample
from tests.fuzz.source import function
from xform import passes
from xform.passes import fold
from xform.program import ir

QUICK, SLOW = range(10), range(10, 200)
ALL = passes.Pipeline([p() for p in passes.PASSES.values()])
SPECIAL = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 0.1])


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch):
    """Use one machine for folding and for the rest of the program; NumPy warns about NaN."""
    key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = lambda xs: [x if key(x) else np.asarray(x) for x in xs]
    run = lambda eqn, xs: list(Machine().step(eqn)(*plain(xs)))
    monkeypatch.setattr(fold, "bind", run)
    with np.errstate(all="ignore"):
        yield


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether bits are equal, except those of NaN."""
    a, b = np.asarray(a), np.asarray(b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if a.dtype == jax.dtypes.float0:
        return True
    parts = (lambda x: [x.real, x.imag]) if np.iscomplexobj(a) else (lambda x: [x])
    for x, y in zip(parts(a), parts(b), strict=True):
        nan = x != x
        equal = (x == y) & (np.signbit(x) == np.signbit(y)) if x.dtype.kind == "f" else x == y
        if not np.all(equal | (nan & (y != y))):
            return False
    return True


def special(xs, seed: int):
    """Return the inputs with some elements replaced by zeros, infinities or NaN."""
    random = np.random.default_rng(seed)

    def change(x):
        if isinstance(x, float):  # as weakly typed as before
            return float(random.choice([*SPECIAL, x]))
        if getattr(x, "dtype", None) != np.float64:
            return x
        return np.where(random.random(x.shape) < 0.4, random.choice(SPECIAL, x.shape), x)

    return [change(x) for x in xs]


def pulled(f):
    def run(*xs):
        y, pull = xform.vjp(f, *xs)
        cts = jax.tree.map(
            lambda v: jnp.ones_like(v) if jnp.issubdtype(v.dtype, np.inexact)
            else np.zeros(v.shape, jax.dtypes.float0), y,
        )  # fmt: skip
        return [ct for ct in pull(cts) if ct.dtype != jax.dtypes.float0]

    return run


def check(seed: int) -> None:
    s = sample(seed)
    plain, xs = function(s.source), inputs(s.seed, s.types)
    for f in (plain, pulled(plain)):
        try:
            before = jax.make_jaxpr(f)(*xs)
        except (TypeError, NotImplementedError):  # an integer program, or one that JAX cannot batch
            continue
        after = jax.make_jaxpr(ALL(f))(*xs)
        for points in (xs, special(xs, seed)):
            want, got = Machine().run(before, points), Machine().run(after, points)
            assert all(map(same, got, want)), f"{seed}\n{s.source}"


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", QUICK)
def test_a_pass_never_changes_a_value(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("seed", SLOW)
def test_a_pass_never_changes_a_value_of_many(seed: int) -> None:
    check(seed)


EXACT = {
    "neutral": lambda x: [x * 1.0, 1.0 * x, x / 1.0, x - 0.0, x + -0.0, x + 0.0, x - -0.0, 0.0 - x],
    "twice": lambda x: [jnp.negative(-x), lax.rev(lax.rev(x, (0,)), (0,)), jnp.abs(-x),
                        jnp.floor(jnp.ceil(x))],
    "halves": lambda x: [x.astype(np.float16).astype(np.float64).astype(np.float16),
                         x.astype(np.float32).astype(np.float64), x.astype(np.float64)],
    "whole": lambda x: [(x > 0).astype(np.int8).astype(np.float64).astype(np.int8),
                        (x > 0).astype(np.float64).astype(bool),
                        (x > 0).astype(np.int8).astype(np.int32).astype(np.int16)],
    "select": lambda x: [jnp.where(True, x, 0.0), jnp.where(x > 0, x, x), jnp.maximum(x, x),
                         (x > 0) & True, (x > 0) | False, (x > 0) & False],
    "shapes": lambda x: [x[:, None][:, 0], x.reshape(2, 4).T.T.reshape(8), x[0:8], jnp.pad(x, 0),
                         jnp.broadcast_to(jnp.broadcast_to(x[None], (1, 8)), (3, 8)),
                         jnp.concatenate([x]), jnp.max(x, ()), x**1],
    "complex": lambda x: [lax.real(lax.complex(x, -x)), lax.imag(lax.complex(x, -x)),
                          lax.complex(x, -x) * 1.0, lax.complex(x, -x) + 0.0],
}  # fmt: skip


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", EXACT)
def test_special_values(name: str) -> None:
    """Expressions that are simplified, and expressions that look like them."""
    f, tidy = EXACT[name], passes.Pipeline([passes.Inline(), passes.Simplify(), passes.Dce()])
    before, after = jax.make_jaxpr(f)(SPECIAL), jax.make_jaxpr(tidy(f))(SPECIAL)
    assert len(after.eqns) < len(before.eqns)
    assert after.out_avals == before.out_avals
    run = lambda jaxpr: ir.evaluate(ir.program(jaxpr), [SPECIAL])
    assert all(map(same, run(after), run(before)))


def test_simplify_keeps_inexact_identities() -> None:
    f = lambda x: [
        x + 0.0,
        x - -0.0,
        x * 0.0,
        0.0 - x,
        x - x,
        x / x,
        jnp.exp(jnp.log(x)),
        jnp.sum(x, ()),
    ]
    before, after = (jax.make_jaxpr(g)(np.float32(1)) for g in (f, passes.Simplify()(f)))
    assert len(after.eqns) == len(before.eqns)
