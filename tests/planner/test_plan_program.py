"""The entry of every policy: the least work within a budget, over all possible saved sets."""

import collections
import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from tests.planner.cuts.test_integer_program import joint_of
from xform import errors, policies
from xform.planner.costs.outcome import recompute_flops, residual_bytes, saved_bytes
from xform.planner.decide import schedule
from xform.planner.device import Device, planning_for
from xform.planner.front import front
from xform.planner.plan.decision import Decision
from xform.planner.plan_program import plan_program
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness
from xform.planner.simulate.profiles import CPU, TPU
from xform.policies import min_cut
from xform.program.ir import trace

W, X = jnp.ones((16, 16)) / 17, jnp.ones((64, 16))
PROGRAMS = {
    "two layers": lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w) @ w) @ w),
    "shared": lambda w, x: jnp.sum(jnp.exp(x @ w) * jnp.sin(x @ w @ w)),
    "three layers": lambda w, x: jnp.sum(jnp.tanh(jnp.sin(jnp.cos(x @ w) @ w) @ w) @ w),
    "one": lambda w, x: jnp.sum(jnp.sin(x @ w) * x),
}


def ends(f, *args):
    args = args or (W, X)
    return Problem(trace(lambda *xs: [f(*xs)], *args), (True,) * len(args), (True,))


def peak(how) -> int:
    return liveness(how, "cpu").total_bytes


def everything(f):
    """Return the Plans of all saved sets."""
    joint = joint_of(f, W, X)
    values = [v for e in joint.forward for v in e.outvars if v not in joint.always_recomputed]
    sets = itertools.chain(*(itertools.combinations(values, n) for n in range(len(values) + 1)))
    schedules = (schedule(joint, Decision(frozenset(s), {}), "cpu") for s in sets)
    return list({frozenset(p.saved): p for p in schedules}.values())


def with_margin(n: int) -> int:
    """Return the least budget that leaves a margin beyond so many bytes."""
    return math.ceil(n / (1 - CPU.margin))


def graph_attention(params, x, mask):
    """The scores of each head are sums of two vectors, so they are cheap to recompute."""
    for w, a, b in params:
        h = jnp.einsum("nf,hfo->hno", x, w)
        scores = (h @ a)[:, :, None] + (h @ b)[:, None, :]
        weights = jax.nn.softmax(jax.nn.leaky_relu(scores, 0.2) + mask, -1)
        x = (weights @ h).transpose(1, 0, 2).reshape(len(x), -1)
    return jnp.sum(jax.nn.log_softmax(x))


@pytest.mark.parametrize("heads", [(16, 1), (2, 2)])
def test_the_default_recomputes_nothing_if_that_raises_the_peak(heads) -> None:
    """With 16 heads the work on one layer is the peak, and recomputed weights add to it."""
    params = []
    for inputs, n in zip((64, *(8 * n for n in heads)), heads, strict=False):
        params.append((jnp.ones((n, inputs, 8)), jnp.ones(8), jnp.ones(8)))
    leaves, tree = jax.tree.flatten((params, jnp.ones((256, 64)), jnp.zeros((256, 256))))
    prog = trace(lambda *xs: [graph_attention(*tree.unflatten(xs))], *leaves)
    problem = Problem(prog, (*(True,) * 6, False, False), (True,))
    default = plan_program(problem, min_cut).schedule
    cut = problem.schedule(dataclasses.replace(min_cut, slow_price=CPU.slow_price))
    everything = problem.schedule(policies.save_everything)
    assert peak(default) == min(peak(cut), peak(everything))
    assert bool(default.recomputed) == (heads == (2, 2))


@pytest.mark.parametrize(("backend", "recomputes"), [("cpu", False), ("gpu", True)])
def test_on_a_cpu_the_default_recomputes_only_for_a_lower_peak(backend, recomputes) -> None:
    """One layer of an associative scan has the same peak with and without recomputation."""

    def loss(w, x):
        decay = jax.nn.sigmoid(x @ w)
        merge = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        return [jnp.mean(lax.associative_scan(merge, (decay, x @ w.T), axis=0)[1] ** 2)]

    prog = trace(loss, jnp.ones((64, 64)), jnp.ones((512, 64)))
    problem = Problem(prog, (True, True), (True,), device=Device(backend))
    assert bool(plan_program(problem, min_cut).schedule.recomputed) == recomputes


def residual_layers(ws, x):
    for w in lax.unstack(ws):
        x = x + jnp.tanh(jax.nn.softmax(x @ w) @ w)
    return x


LOSSES = {
    "rows of an array": lambda ws, x: jnp.sum(
        functools.reduce(lambda x, w: jnp.tanh(x @ w), lax.unstack(ws), x)
    ),
    "a jitted model": lambda ws, x: jnp.sum(jax.jit(residual_layers)(ws, x) ** 2),
    "a jitted model under vmap": lambda ws, x: jnp.sum(
        jax.vmap(jax.jit(residual_layers), (None, 0))(ws, x[:, None]) ** 2
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_default_takes_no_more_than_jax_grad(name: str) -> None:
    args = jnp.ones((8, 128, 128)), jnp.ones((256, 128))
    temporary = lambda f: jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes
    assert temporary(xform.grad(LOSSES[name])) <= temporary(jax.grad(LOSSES[name]))


def test_a_jitted_model_is_planned_like_the_unjitted_model() -> None:
    """A function that is called once is planned as if it were not jitted, however large it is."""
    f = lambda model: xform.grad(lambda ws, x: jnp.sum(model(ws, x) ** 2))
    args = jnp.ones((8, 128, 128)), jnp.ones((256, 128))
    kept = lambda model: str(jax.make_jaxpr(f(model))(*args))
    assert kept(jax.jit(residual_layers)) == kept(residual_layers)


@pytest.mark.parametrize("of", ["peak", "saved"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_saved_set_within_a_budget_runs_less_again(name: str, of: str) -> None:
    size = peak if of == "peak" else residual_bytes
    every = [(size(p), recompute_flops(p)) for p in everything(PROGRAMS[name])]
    at = ends(PROGRAMS[name])
    for n in sorted({n for n, _ in every}):
        found = plan_program(
            at, policies.budget(with_margin(n) if of == "peak" else n, of=of)
        ).schedule
        assert size(found) <= n
        assert recompute_flops(found) <= min(work for m, work in every if m <= n)


def test_a_budget_that_the_default_plan_fits_returns_the_default() -> None:
    at = ends(PROGRAMS["three layers"])
    default = plan_program(at, min_cut).schedule
    most = with_margin(peak(default))
    assert plan_program(at, policies.budget(most)).schedule is default
    assert plan_program(at, policies.budget(most - 2)).schedule is not default


def test_without_a_margin_there_is_only_the_lowest() -> None:
    at = ends(PROGRAMS["three layers"])
    with pytest.raises(errors.BudgetInfeasible) as caught:
        plan_program(at, policies.budget(0))
    least = caught.value.floor_bytes
    found = [plan_program(at, policies.budget(n)) for n in (with_margin(least), least + 1, least)]
    assert {peak(whole.schedule) for whole in found} == {least}
    assert [whole.work for whole in found] == sorted(whole.work for whole in found)


def test_the_floor_that_is_named_is_the_least_that_can_be_had() -> None:
    at = ends(PROGRAMS["two layers"])
    with pytest.raises(errors.BudgetInfeasible) as caught:
        plan_program(at, policies.budget(0))
    least = caught.value.floor_bytes
    assert peak(plan_program(at, policies.budget(least)).schedule) == least
    assert least <= min(map(peak, everything(PROGRAMS["two layers"])))
    with pytest.raises(errors.BudgetInfeasible):
        plan_program(at, policies.budget(least - 1))


def test_donated_bytes_are_spared() -> None:
    at = ends(PROGRAMS["two layers"])
    least, donating = (
        peak(front(at).smallest()[0].schedule),
        dataclasses.replace(at, outside_bytes=-W.nbytes),
    )
    found = plan_program(donating, policies.budget(least - W.nbytes))
    assert peak(found.schedule) == least
    with pytest.raises(errors.BudgetInfeasible) as caught:
        plan_program(donating, policies.budget(0))
    assert caught.value.floor_bytes == least - W.nbytes


def test_a_program_is_planned_once_for_each_backend() -> None:
    at, policy = ends(PROGRAMS["shared"]), policies.budget("1 MiB")
    here = plan_program(at, policy)
    assert plan_program(at, policies.budget(2**20)) is here
    assert front(at) is front(at)
    there = dataclasses.replace(at, device=Device("tpu", "a tpu"))
    assert plan_program(there, policy) is not here
    assert front(there) is not front(at)


def test_offload_false_plans_as_for_a_device_without_a_host_link() -> None:
    def f(ws, x):
        def body(x, w):
            x = x + jnp.tanh(x @ w[0]) @ w[1]
            return x + jnp.sin(jnp.tanh(x @ w[2]) @ w[3]), None

        return jnp.sum(lax.scan(body, x, ws)[0] ** 2)

    aval = lambda *shape: jax.ShapeDtypeStruct(shape, "bfloat16")
    at = ends(f, aval(12, 4, 4096, 4096), aval(32768, 4096))
    here = dataclasses.replace(at, device=Device("tpu", "TPU v5e"))
    alone = dataclasses.replace(here, offload=False)
    without = dataclasses.replace(at, device=Device("tpu", "one without a link"))
    works = lambda at: [w.work for w in front(at).smallest()]
    sends = lambda at: any(w.work[1] for w in front(at)._plans)
    assert sends(here)
    assert not sends(alone)
    assert front(without) is front(dataclasses.replace(without, offload=False))
    assert works(without) == works(alone)


@pytest.mark.parametrize("x", [jnp.ones((0, 3)), jnp.float32(2), jnp.ones(3, jnp.bfloat16)])
def test_little_and_nothing_is_planned(x) -> None:
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(x))).astype(jnp.float32)
    at = ends(f, x)
    for policy in (min_cut, policies.budget("1 KiB"), policies.budget(0, of="saved")):
        found = plan_program(at, policy)
        assert found.shapes == {}
        assert recompute_flops(found.schedule) == 0
    constant = Problem(trace(lambda x: [jnp.float32(1)], x), (True,), (True,))
    assert saved_bytes(plan_program(constant, policies.budget(0, of="saved")).schedule) == 0


def test_a_recorded_plan_is_for_loops_of_its_lengths() -> None:
    def f(length):
        step = lambda w: lambda x, _: (jnp.sin(x @ w), None)
        return lambda w, x: jnp.sum(lax.scan(step(w), x, None, length=length)[0])

    policy = policies.budget(12 * X.nbytes, of="saved")
    made = xform.plan(f(24), W, X, argnums=None, policy=policy, verify=False)
    found = plan_program(ends(f(24)), made)
    assert found.shapes == made.shapes() != {}
    assert residual_bytes(found.schedule) == made.saved_bytes <= policy.bytes
    for g, has in ((PROGRAMS["one"], "the program has no such loop"), (f(23), "23 in the program")):
        with pytest.raises(errors.OtherProgram, match=has):
            plan_program(ends(g), made)


# Its products exceed the memory on the chip of a TPU.
LARGE = jax.ShapeDtypeStruct((2**13, 16), "float32")


@pytest.mark.parametrize(("rows", "recomputes"), [(2**10, False), (2**13, True)])
def test_the_default_on_a_tpu_saves_everything_that_fits_on_the_chip(rows, recomputes) -> None:
    """These saved values take no memory, so a plan that recomputes would only cost time."""
    f = lambda w, x: jnp.sum(jnp.cos(jnp.sin((x @ w) @ (x @ w[::-1]).T)) ** 2)
    x = jax.ShapeDtypeStruct((rows, 16), "float32")
    with planning_for("tpu"):
        assert bool(plan_program(ends(f, W, x), min_cut).schedule.recomputed) is recomputes
    with planning_for("gpu"):
        assert plan_program(ends(f, W, x), min_cut).schedule.recomputed


def test_the_tpu_min_cut_saves_products_and_operands_of_products() -> None:
    """A value fused with a product would be in memory too; operands of products are rounded."""

    def f(w, x):
        scores = (x @ w + 1.0) @ (x @ w[::-1] + 2.0).T
        return jnp.sum(jax.nn.logsumexp(scores, -1))

    saved = {}
    for profile in (CPU, TPU):
        names = ("fused_save_price", "rounds_operands", "slow_price")
        cut = dataclasses.replace(min_cut, **{name: getattr(profile, name) for name in names})
        with planning_for(name := profile.name):
            how = plan_program(ends(f, W, jnp.ones((2048, 16))), cut).schedule
            of = collections.Counter(how.joint.producer[v].primitive.name for v in how.saved)
            saved[name] = of
    assert saved["cpu"]["exp"] == 1
    products = {"exp": 0, "dot_general": 1, "add": 1, "transpose": 1}
    assert {name: saved["tpu"][name] for name in products} == products


def test_values_stacked_by_a_loop_are_the_same_on_cpu_and_tpu() -> None:
    """A stacked value is written as it is: without copies, and without rounding."""
    f = lambda w, x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w + 1) @ w, None), x, w)[0])
    stacked = []
    for name in ("cpu", "tpu"):
        with planning_for(name):
            how = plan_program(ends(f, jnp.ones((3, 16, 16)), LARGE), min_cut).schedule
            ((inner,),) = how.inner.values()
            stacked.append([inner.joint.producer[v].primitive.name for v in inner.saved])
    assert stacked[0] == stacked[1] == ["tanh"]
