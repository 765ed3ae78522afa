"""Budgets of the peak, checked with the compiler: kept, monotone, the same in any order."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from xform import errors, policies
from xform.memory.compilation import compile_for
from xform.planner import search_front
from xform.planner.choice import Choice
from xform.planner.device import current_device, planning_for
from xform.planner.front import front
from xform.planner.measure import MAX_BEFORE_REFUSAL, Measure
from xform.planner.plan_program import plan_program
from xform.planner.simulate.liveness import liveness
from xform.transforms.inspect import derivative_at

X = jnp.ones((64, 96)) / 3


def layers(n: int):
    def f(ws, x):
        for w in ws:
            x = x + jnp.tanh(jnp.sin(x @ w) @ w.T)
        return jnp.sum(x**2)

    return f, jnp.ones((n, 96, 96)) / 50


def peak(f, w, budget: int) -> xform.Plan:
    return xform.plan(f, w, X, policy=policies.budget(int(budget)))


def test_a_plan_is_compiled_once_in_a_process() -> None:
    f, w = layers(7)
    most = xform.plan(f, w, X).compiled_bytes
    first, again = (peak(f, w, 0.97 * most) for _ in range(2))
    assert first.compiles > 0
    assert again.compiles == 0
    assert again.compiled_bytes == first.compiled_bytes
    assert again.record == first.record
    # Another function of the same program, and another donation of it.
    assert peak(lambda *args: f(*args), w, 0.97 * most).compiles == 0
    assert xform.plan(f, w, X).compiles == 0
    assert xform.plan(f, w, X, donate_argnums=0).compiles == 1


def test_earlier_compilations_do_not_change_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    f, w = layers(5)
    most = xform.plan(f, w, X).compiled_bytes
    budgets = [int(part * most) for part in (0.98, 0.97, 0.96, 0.95)]
    forget = lambda: monkeypatch.setattr("xform.planner.measure._known", {})
    said = lambda made: (made.record, made.compiled_bytes)
    alone = [forget() or said(peak(f, w, budget)) for budget in budgets]
    forget()
    for _ in range(2):
        assert [said(peak(f, w, budget)) for budget in budgets] == alone


def test_programs_equal_up_to_undifferentiated_parts_compile_separately() -> None:
    """Two programs that differ only in parts without a derivative, or only in their outputs."""

    def sums(n: int):
        def body(x, _):
            return jnp.sort(jnp.stack([jnp.sin(k * x) for k in range(n)]), 0)[-1], None

        return lambda w, x: jnp.sum(w * lax.stop_gradient(lax.scan(body, x, None, length=3)[0]))

    def kept(n: int):
        return lambda w, x: (jnp.sum(w * x), (x + 1,) * n)

    w = jnp.ones((64, 96))
    for make, aux in ((sums, False), (kept, True)):
        one, other = (xform.plan(make(n), w, X, has_aux=aux) for n in (1, 9))
        assert other.compiles == 1
        stats = jax.jit(xform.grad(make(9), has_aux=aux)).lower(w, X).compile()
        sizes = stats.memory_analysis()
        total = (sizes.argument_size_in_bytes + sizes.output_size_in_bytes
                 + sizes.temp_size_in_bytes)  # fmt: skip
        assert other.compiled_bytes == total > one.compiled_bytes


def attention(n: int):
    def f(ws, x):
        for w in ws:
            q = x @ w
            x = x + jax.nn.gelu(jax.nn.softmax(q @ q.T / 10) @ x @ w) @ w.T
        return jnp.sum(x**2)

    return f, jnp.ones((n, 96, 96)) / 50


@pytest.mark.slow
@pytest.mark.parametrize(("model", "n"), [(layers, 9), (layers, 5), (attention, 4)])
def test_every_budget_down_to_the_floor_is_kept_and_less_takes_more_work(model, n: int) -> None:
    f, w = model(n)
    most = xform.plan(f, w, X).compiled_bytes
    with pytest.raises(errors.BudgetInfeasible) as caught:
        peak(f, w, 1)
    work, size = 0, most
    for budget in np.linspace(most, caught.value.floor_bytes, 9):
        made = peak(f, w, budget)
        assert made.compiled_bytes <= min(budget, size)
        assert made.compiles <= 7  # the default and six more
        assert made.recompute_flops >= work
        work, size = made.recompute_flops, made.compiled_bytes


@pytest.mark.parametrize("seed", range(12))
def test_smaller_budgets_never_take_less_work_under_compiler_noise(seed: int, monkeypatch) -> None:
    """The compiler differs by up to a tenth for each plan, and compilations are unlimited."""
    for limit in ("MAX_FIRST_COMPILES", "MAX_COMPILES", "_MAX_MISSES"):
        monkeypatch.setattr(search_front, limit, 1000)
    monkeypatch.setattr(search_front, "_NEAR", 1.1 / 0.9)  # both plans differ by a tenth
    f, w = attention(3)
    at = derivative_at("plan", f, (w, X), 0, False)
    rng, simulated = np.random.default_rng(seed), lambda how: liveness(how, "cpu").total_bytes
    compiler = Measure(lambda choice: int(choice.peak * rng.uniform(0.9, 1.1)))
    work, most = (0, 0), simulated(at.planned(policies.min_cut).schedule)
    seen = set()
    for budget in np.linspace(1.1, 0.6, 60) * most:
        try:
            made = plan_program(at.problem, policies.budget(int(budget)), compiler)
        except errors.BudgetInfeasible:
            break
        assert compiler.bytes(Choice({"": at.problem}, {"": made})) <= budget
        assert made.work >= work
        work = made.work
        seen.add(work)
    assert len(seen) > 1


def looped(n: int):
    """Attention layers in a loop, wide enough for saved values to be offloaded for a while."""

    def f(ws, x):
        def body(x, w):
            q = x @ w
            x = x + jax.nn.softmax(q @ jnp.swapaxes(q, 1, 2)) @ x @ w
            return x + jax.nn.gelu(x @ w) @ w.T, None

        return jnp.sum(lax.scan(body, x, ws)[0] ** 2)

    aval = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    return f, aval(n, 4096, 4096), aval(16, 2048, 4096)


@pytest.fixture(scope="module")
def layers_in_a_loop():
    """The derivative of layers in a loop, for a chip with a link to its host."""
    f, ws, x = looped(12)
    with planning_for("tpu", "TPU v5e"):
        return derivative_at("plan", f, (ws, x), 0, False).problem


@pytest.fixture
def on_a_tpu(layers_in_a_loop):
    """The same, with plans for a chip with a link to its host."""
    with planning_for("tpu", "TPU v5e"):
        yield layers_in_a_loop


def searched(problem, bytes_of, budget: int):
    """Return what is found within a budget by a compiler without known answers."""
    compiler = Measure(bytes_of)
    made = plan_program(problem, policies.budget(budget), compiler)
    assert compiler.bytes(Choice({"": problem}, {"": made})) <= budget
    return made, compiler.compiles


def test_search_learns_that_offloading_plans_compile_smaller(on_a_tpu) -> None:
    """Plans that offload take a quarter less than predicted, so less has to be recomputed."""
    problem, simulated = on_a_tpu, on_a_tpu.peak
    most = simulated(plan_program(problem, policies.min_cut).schedule)
    spares = lambda choice: int(choice.peak * (0.75 if choice.offloads else 1))
    exact = lambda choice: choice.peak
    for budget in np.linspace(0.65, 0.4, 6) * most:
        made, compiles = searched(problem, spares, int(budget))
        assert compiles <= 7
        of_more, _ = searched(problem, exact, int(1.1 * budget))
        assert made.work[0] <= of_more.work[0]


@pytest.mark.parametrize(
    ("once", "each", "off"), [(0.05, 0, 0), (0.02, 0.15, 0.02), (0.1, 0, 0.02)]
)
def test_search_learns_extra_compiled_bytes_of_offloading_plans(on_a_tpu, once, each, off) -> None:
    """It adds a part of the default's peak and of the offloaded bytes, and a small error.

    As on a TPU, where XLA copies stacks of offloaded values into another layout.
    """
    problem, simulated = on_a_tpu, on_a_tpu.peak
    most = simulated(plan_program(problem, policies.min_cut).schedule)
    rng, errs = np.random.default_rng(0), dict[object, float]()

    def measure(choice) -> int:
        sent = choice.work[1]
        err = errs.setdefault(choice.key, rng.uniform(-off, off))
        return int(choice.peak * (1 + err) + bool(sent) * once * most + each * sent)

    least = simulated(front(problem).smallest()[0].schedule)
    still = [*front(dataclasses.replace(problem, offload=False))._plans]
    work, asked, compiled = (0, 0), list[bool](), set[object]()

    def asking(choice) -> int:
        compiled.add(choice.key)
        asked.append(choice.offloads and measure(choice) > budget)
        return measure(choice)

    for budget in np.linspace(0.98 * most, 1.1 * least, 20):
        before = frozenset(compiled)
        made, compiles = searched(problem, asking, int(budget))
        assert compiles <= 1 + search_front.MAX_COMPILES
        # Less work only under a plan that was not compiled for the larger budgets.
        assert made.work >= work or Choice({"": problem}, {"": made}).key not in before
        work = made.work
        # As good as without a host.
        choices = [Choice({"": problem}, {"": candidate}) for candidate in still]
        assert work[0] <= min(c.work[0] for c in choices if measure(c) <= budget)
    assert any(asked)  # or nothing was learned


def test_where_nothing_may_be_sent_the_plan_is_that_without_a_host(on_a_tpu) -> None:
    problem, simulated = on_a_tpu, on_a_tpu.peak
    refuses = lambda choice: math.inf if choice.offloads else choice.peak
    most = simulated(plan_program(problem, policies.min_cut).schedule)
    for part in (0.9, 0.7, 0.5):
        made, _ = searched(problem, refuses, int(part * most))
        with planning_for("tpu", "a chip without a host"):
            there = dataclasses.replace(problem, device=current_device())
            alone, _ = searched(there, refuses, int(part * most))
        assert made.work == alone.work


def test_infeasible_budget_error_has_the_compiled_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler needs twice what the simulation predicts, so does the floor."""
    f, w = layers(5)
    free = xform.plan(f, w, X)
    said: list[int] = []

    def twice(*args, **kwargs):
        report = compile_for(*args, **kwargs)
        said.append(2 * report.total_bytes)
        return type("Report", (), {"total_bytes": said[-1]})

    monkeypatch.setattr("xform.memory.compilation.compile_for", twice)
    monkeypatch.setattr("xform.planner.measure._known", {})
    with pytest.raises(errors.BudgetInfeasible) as caught:
        peak(f, w, free.compiled_bytes)
    assert 2 <= len(said) <= MAX_BEFORE_REFUSAL
    assert 1.15 * free.compiled_bytes < caught.value.floor_bytes == min(said)


def test_the_floor_is_one_number() -> None:
    """It is the same for every budget below it, every entry point, compiled or simulated."""
    f, w = layers(4)

    def floors(**how) -> set[int]:
        found = set[int]()
        for budget in (0, 1000, 100_000, int(0.97 * least[how["verify"]])):
            with pytest.raises(errors.BudgetInfeasible) as caught:
                xform.plan(f, w, X, policy=policies.budget(budget), **how)
            found.add(caught.value.floor_bytes)
        return found

    compiled, simulated = (
        xform.pareto(f, w, X, points=2, verify=verify) for verify in (True, False)
    )
    least = {c.compiled: min(p.peak_bytes for p in c if not p.stock) for c in (compiled, simulated)}
    assert floors(verify=True) == {least[True]}
    assert floors(verify=False) == {least[False]}
    (row,) = xform.compare(f, w, X, policies=[policies.budget(0)])
    assert row.floor_bytes == least[True]
    for verify in (True, False):
        with pytest.raises(errors.BudgetInfeasible) as caught:
            jax.eval_shape(xform.grad(f, policy=policies.budget(0, verify=verify)), w, X)
        assert caught.value.floor_bytes == least[verify]
    # It is feasible, and so is the other one.
    assert peak(f, w, least[True]).compiled_bytes == least[True]
