"""A few random programs, the stored cases, and proof that the check can fail."""

import dataclasses
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.fuzz import odd
from tests.fuzz.cases import Case, load
from tests.fuzz.check import WAYS, check, check_source, describe, distance
from tests.fuzz.evaluate import Machine
from tests.fuzz.generate import inputs, sample
from tests.fuzz.in_numpy import IN_NUMPY
from tests.fuzz.modes import KINDS, Level, order
from tests.fuzz.source import function
from xform._jax import jax_primitives as jp
from xform.program.ir import bind
from xform.registry.table import RULES

pytestmark = pytest.mark.usefixtures("x64")


@pytest.fixture(autouse=True)
def _quiet():
    """Silence NumPy's warnings about compared values: infinities and NaN."""
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("seed", np.random.default_rng(0).integers(0, 2**31, 20).tolist())
def test_random_programs(seed: int) -> None:
    s = sample(seed)
    outcome = check(s, (list(WAYS)[seed % len(WAYS)],))
    text = f"python -m experiments.fuzz.run --only {seed}\n{describe(s.levels)}\n{s.source}"
    assert outcome.verdict in ("agrees", "ill-conditioned", "refused"), f"{outcome.text}\n{text}"


def _cases() -> list:
    def mark(c: Case):
        return pytest.mark.xfail(reason=c.open, strict=True) if c.open else ()

    return [pytest.param(c, id=c.name, marks=mark(c)) for c in load()]


@pytest.mark.parametrize("case", _cases())
def test_case(case: Case) -> None:
    outcome = case.check()
    assert outcome.verdict in ("agrees", "ill-conditioned"), outcome.text


def test_programs_are_the_same_every_time() -> None:
    for seed in (3, 14):
        assert sample(seed) == sample(seed)


def test_compositions_reach_every_kind_and_order() -> None:
    many = [sample(seed) for seed in range(150)]
    kinds = {level.kind for s in many for level in s.levels}
    assert kinds == {*KINDS, "vmap", "jit"}
    assert {order(s.levels) for s in many} == {1, 2, 3}
    text = "\n".join(s.source for s in many)
    for word in ("lax.scan", "lax.cond", "lax.switch", "while_loop", "jax.jit", "jax.custom_jvp",
                 "jax.custom_vjp", "jax.checkpoint", "xform.remat", "jax.vmap", "reverse=True",
                 "length=0", "allow_negative_indices=False"):  # fmt: skip
        assert word in text, word


# The check can fail.


def _caught(word: str) -> bool:
    """Return whether one of a few dozen programs that contain a word fails."""
    with_it = (s for s in map(sample, itertools.count()) if word in s.source)
    return any(check(s).failed for s in itertools.islice(with_it, 36))


def test_a_wrong_partial_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda y, x: lax.mul(lax.cos(x), np.float64(1 + 1e-7))
    rule = dataclasses.replace(RULES[jp.sin_p], formulas=(wrong,), used={wrong: ()})
    monkeypatch.setitem(RULES, jp.sin_p, rule)
    assert _caught("lax.sin(")


def test_a_transpose_of_the_wrong_sign_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda ct, x, *, dimensions: ct
    rule = dataclasses.replace(RULES[jp.rev_p], formulas=(wrong,), used={wrong: ("dimensions",)})
    monkeypatch.setitem(RULES, jp.rev_p, rule)
    assert _caught("lax.rev(")


def test_a_custom_rule_that_is_not_asked_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, jp.custom_jvp_call_p, RULES[jp.closed_call_p])
    assert _caught("jax.custom_jvp")


def test_a_wrong_shape_or_nan_is_a_difference() -> None:
    a = np.array([1.0, np.nan])
    assert distance([a], [a.copy()]) == 0
    assert distance([a], [np.array([1.0, 2.0])]) == np.inf
    assert distance([a], [a[:, None]]) == np.inf
    assert distance([a, a], [a]) == np.inf


# The reference is correct.


def test_primitives_in_numpy_agree_with_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the primitives of programs in NumPy and in XLA, for a few types of their inputs."""
    seen: dict = {}
    times: Counter = Counter()

    def step(self, eqn):
        run, name = machine_step(self, eqn), eqn.primitive.name
        key = name, tuple(v.aval.str_short() for v in eqn.invars)
        if name not in IN_NUMPY or name in ("xform_barrier", "keep_lane", "loop_result"):
            return run

        def noted(*xs):
            ys = run(*xs)
            zero = any(x.dtype == jax.dtypes.float0 for x in (*xs, *ys))
            if key not in seen and times[name] < 2 and not zero:
                seen[key] = eqn, xs, ys
                times[name] += 1
            return ys

        return noted

    machine_step = Machine.step
    monkeypatch.setattr(Machine, "step", step)
    for seed in range(100, 107):
        check(sample(seed))
    calls = list(seen.values())
    assert len(calls) > 60

    def everything(*args):
        return [bind(eqn, xs) for (eqn, *_), xs in zip(calls, args, strict=True)]

    args = [list(map(np.asarray, xs)) for _, xs, _ in calls]
    for (eqn, _, ys), zs in zip(calls, jax.jit(everything)(*args), strict=True):
        assert distance(ys, zs) < 1e-12, (eqn.primitive, eqn.params)


def test_the_machine_agrees_with_jit() -> None:
    for seed in (5, 8):
        s = sample(seed)
        xs, f = inputs(s.seed, s.types), function(s.source)
        run = Machine().run(jax.make_jaxpr(f)(*xs), xs)
        assert distance(run, list(jax.jit(f)(*xs))) < 1e-12


def test_noise_reveals_ill_conditioned_programs() -> None:
    f = lambda x: ((1e12 + jnp.sin(x)) - 1e12,)
    x = np.float64(0.3)
    jaxpr = jax.make_jaxpr(f)(x)
    quiet, noisy = Machine().run(jaxpr, [x]), Machine(2e-15).run(jaxpr, [x])
    assert distance(noisy, quiet) > 1e-6


def test_noise_reveals_rounding_to_float32() -> None:
    narrow = lambda x: (x.astype(np.float32).astype(np.float64) * 0.7,)
    wide = lambda x: (x.astype(np.complex128).real * 0.7,)
    x = np.linspace(0.3, 0.9, 50)
    spread = []
    for f in (narrow, wide):
        jaxpr = jax.make_jaxpr(f)(x)
        spread.append(distance(Machine(2e-15).run(jaxpr, [x]), Machine().run(jaxpr, [x])))
    assert 1e-8 < spread[0] < 1e-7
    assert spread[1] < 1e-14


def test_reductions_are_compared_with_loops() -> None:
    """The loops compute the same: JAX's own derivative of `reduce` ignores the initial value."""
    random = np.random.default_rng(0)
    for text, shapes, *_ in (*odd.INITIAL, *odd.ODD):
        if "reduce(" not in text and "reduce_window(" not in text:
            continue
        names = [f"x{i}" for i in range(len(shapes))]
        source = f"def program({', '.join(names)}):\n    return ({text.format(*names)},)"
        xs = [random.uniform(-1.4, 1.4, s) for s in shapes]
        both = [jax.make_jaxpr(function(source, for_jax=loops))(*xs) for loops in (False, True)]
        assert distance(*(Machine().run(jaxpr, xs) for jaxpr in both)) < 1e-14, text


def test_a_value_of_another_type_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A derivative turns a Python number into an array that is not weakly typed."""
    source = "def program(x):\n    return (lax.square(x),)"
    ways, levels = ("staged", "closed", "single", "eager"), [Level("vjp", (0,), both=True)]
    assert check_source(source, [0.4], levels, ways).verdict == "agrees"
    vjp = xform.vjp
    monkeypatch.setattr(xform, "vjp", lambda f, *xs: vjp(f, *(x + np.float64(0) for x in xs)))
    outcome = check_source(source, [0.4], levels)
    assert (outcome.verdict, outcome.text.split()[0]) == ("mismatch", "types")


def test_a_while_loop_is_compared_with_a_scan() -> None:
    source = (
        "def program(x):\n"
        "    return while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1:]"
    )
    levels = [Level("vjp", (0,)), Level("grad", (0,), both=True)]
    assert check_source(source, [np.float64(0.4)], levels).verdict == "agrees"
