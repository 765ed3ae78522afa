"""Budgets restructure loops inside loops, calls, branches and remat regions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.emitted import emitted
from tests.parameters import slow
from tests.reference import close
from xform import errors, policies
from xform.interpret.joint import analyze
from xform.planner.candidates.as_written import cut_schedules
from xform.planner.candidates.large_loops import inner_loops, large_loops
from xform.planner.candidates.nested import nested_candidates
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.candidates.split import split_candidates
from xform.planner.costs.outcome import recompute_flops
from xform.planner.decide import schedule
from xform.planner.front import front
from xform.planner.loops import loop_origins, loops, reshape_loops
from xform.planner.plan.decision import decision_of
from xform.planner.plan.record import record
from xform.planner.problem import Problem
from xform.planner.simulate.liveness import liveness
from xform.policies import MinCut
from xform.program.ir import evaluate, trace

TRIPS = 12
W = np.cos(np.arange(TRIPS * 16.0)).reshape(TRIPS, 4, 4) / 2
X = np.sin(np.arange(128.0)).reshape(32, 4)


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def inner(x, w):
    return lax.scan(lambda x, w: (layer(x, w), None), jnp.sin(x), w)[0]


def in_loop(w, x):
    return jnp.sum(lax.scan(lambda x, _: (inner(x, w), None), x, None, length=6)[0] ** 2)


def in_branch(w, x):
    return jnp.sum(lax.cond(x[0, 1] > 0, lambda: inner(x, w), lambda: jnp.cos(x)) ** 2)


def in_region(w, x):
    return jnp.sum(jax.checkpoint(inner)(jnp.cos(x), w) ** 2)


def in_region_in_loop(w, x):
    step = lambda x, _: (jax.checkpoint(inner)(x, w), None)
    return jnp.sum(lax.scan(step, x, None, length=3)[0] ** 2)


def in_call(w, x):
    """A call that is too large to be inlined."""

    @jax.jit
    def f(x, w):
        for i in range(8):
            x = layer(x, w[i])
        return inner(x, w)

    return jnp.sum(f(f(x, w), w) ** 2)


def in_while(w, x):
    step = lambda i, x: inner(x, w)
    return jnp.sum(lax.fori_loop(0, jnp.int32(x[0, 0] < 2) * 4, step, x) ** 2)


PROGRAMS = {f.__name__: f for f in (in_loop, in_branch, in_region, in_region_in_loop, in_call,
                                    in_while)}  # fmt: skip
# Upper bounds, relative to the floor with unchanged loops.
SHARES = {"in_loop": 0.7, "in_branch": 0.85, "in_region": 0.62, "in_region_in_loop": 0.6,
          "in_while": 0.7}  # fmt: skip


def want(f, w=W, x=X):
    grad = xform.grad if f is in_while else jax.grad
    return jax.jit(grad(f, (0, 1)))(w, x)


def ends(f, w=W, x=X):
    return trace(lambda *xs: [f(*xs)], w, x), (True, True), (True,)


def peak(how) -> int:
    return liveness(how, "cpu").total_bytes


def right(f, whole) -> None:
    """Check that the gradient is JAX's."""
    run = jax.jit(lambda *xs: evaluate(emitted(whole.schedule), xs)[1:])
    close(tuple(run(W, X, 1.0)), want(f), 1e-12)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("x64")
def test_values_are_the_same(name: str) -> None:
    f, at = PROGRAMS[name], ends(PROGRAMS[name])
    found = [*nested_candidates(Problem(*at))][-1:]
    found += [[*one][-1] for one in snapshot_candidates(Problem(*at))][-1:]
    if name in ("in_call", "in_branch"):
        joint = analyze(*at)
        above, below = (schedule(joint, MinCut(n, n), backend="cpu") for n in (np.inf, 0.0))
        found += [*split_candidates(Problem(*at), above, below)][:1]
    assert found
    for whole in found:
        right(f, whole)
        as_data = record(decision_of(whole.schedule), whole.schedule.joint, whole.shapes)
        assert as_data.decision(analyze(reshape_loops(at[0], whole.shapes), *at[1:]), "").inner


@pytest.mark.parametrize("name", slow(SHARES, "in_branch", "in_region_in_loop"))
def test_the_floor_is_below_that_of_the_loops_as_they_are(name: str) -> None:
    at = ends(PROGRAMS[name])
    as_written = min(map(peak, cut_schedules(Problem(*at))))
    assert peak(front(Problem(*at)).smallest()[0].schedule) < SHARES[name] * as_written


@pytest.mark.parametrize("name", slow(["in_loop", "in_region"], "in_loop"))
def test_work_rises_as_bytes_fall(name: str) -> None:
    at = ends(PROGRAMS[name])
    most = peak(schedule(analyze(*at), policies.min_cut, backend="cpu"))
    sizes = np.linspace(most, peak(front(Problem(*at)).smallest()[0].schedule), 8)
    found = [
        front(Problem(*at)).least_recompute(lambda w, n=n: peak(w.schedule) <= n) for n in sizes
    ]
    works = [w.work for w in found if w is not None]
    assert len(works) == 8
    assert works == sorted(works)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", slow(["in_loop", "in_region"], "in_loop"))
def test_a_plan_fits_by_the_compiler_and_is_loaded(tmp_path, name: str) -> None:
    f, w, x = PROGRAMS[name], jnp.asarray(W), jnp.asarray(X)
    with pytest.raises(errors.BudgetInfeasible) as refused:
        xform.plan(f, w, x, argnums=(0, 1), policy=policies.budget(1))
    floor = refused.value.floor_bytes
    made = xform.plan(f, w, x, argnums=(0, 1), policy=policies.budget(floor))
    assert made.compiled_bytes == floor
    assert made.shapes() or any(c["snapshots"] for c in made.record.decisions)
    made.save(tmp_path / "plan.json")
    loaded = xform.Plan.load(tmp_path / "plan.json")
    assert loaded.shapes() == made.shapes()
    close(jax.jit(xform.grad(f, (0, 1), policy=loaded))(w, x), want(f, w, x), 1e-10)


@pytest.mark.usefixtures("x64")
def test_second_derivatives() -> None:
    f = lambda x: in_region_in_loop(W, x)
    at = ends(in_region_in_loop)
    least = peak(front(Problem(*at)).smallest()[0].schedule)
    g = xform.grad(f, policy=policies.budget(int(1.1 * least)))
    ours = xform.jvp(jax.jit(g), (X,), (X,))[1]
    close(ours, jax.jvp(jax.grad(f), (X,), (X,))[1], 1e-10)


def test_a_region_with_a_policy_is_left_alone() -> None:
    def f(w, x):
        region = jax.checkpoint(inner, policy=jax.checkpoint_policies.dots_saveable)
        return jnp.sum(region(jnp.cos(x), w) ** 2)

    at = ends(f)
    assert loops(at[0]) == ()
    assert inner_loops(Problem(*at)) == large_loops(Problem(*at)) == {}
    assert len(loops(ends(in_region)[0])) == 1


def layers(w, x, policy=None):
    """Checkpointed layers in a loop, as in most training code."""
    region = jax.checkpoint(layer, policy=policy)
    return jnp.sum(lax.scan(lambda x, w: (region(x, w), None), x, w)[0] ** 2)


def test_a_budget_with_room_saves_more_in_regions_and_the_default_does_not() -> None:
    w, x = jnp.asarray(W, "float32"), jnp.asarray(X, "float32")
    f = lambda w, x: layers(w, x)  # a loss whose regions have a policy of their own
    planned = lambda policy: xform.plan(f, w, x, argnums=(0, 1), policy=policy)
    default = planned(policies.min_cut)
    assert default.recompute_flops > 0
    room = default.compiled_bytes
    found = [planned(policies.budget(int(part * room))) for part in (4, 1.5, 1, 0.9)]
    works = [p.recompute_flops for p in found]
    assert works == sorted(works)
    assert works[0] == 0 < works[1] < default.recompute_flops == works[2] < works[3]
    for part, p in zip((4, 1.5, 1, 0.9), found, strict=True):
        assert p.compiled_bytes <= part * room
        for got, right in zip(jax.jit(xform.grad(layers, (0, 1), policy=p))(w, x),
                              jax.grad(layers, (0, 1))(w, x), strict=True):  # fmt: skip
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


def test_remat_region_policy_holds_under_each_budget() -> None:
    f = lambda w, x: layers(w, x, jax.checkpoint_policies.nothing_saveable)
    at = ends(f)
    default = schedule(analyze(*at), policies.min_cut, backend="cpu")
    found = [schedule for schedule in cut_schedules(Problem(*at)) if recompute_flops(schedule)]
    assert min(map(recompute_flops, found)) == recompute_flops(default) > 0
    for budget in ("1 GiB", "auto"):
        policy = policies.budget(budget) if budget != "auto" else budget
        made = xform.plan(f, W, X, argnums=(0, 1), policy=policy, verify=False)
        assert made.recompute_flops == recompute_flops(default)


def test_each_loop_of_a_program_in_other_shapes_is_known_by_its_place() -> None:
    def f(w, x):
        y = in_loop(w, x) + in_region(w, x)
        return y + jnp.sum(inner(x, w))

    prog = ends(f)[0]
    assert [e.params["length"] for e in loops(prog)] == [6, TRIPS, TRIPS, TRIPS]
    shapes = {0: ((2, 2), (2,)), 1: ((3, 4),), 2: ((1,), (11,))}
    apart = reshape_loops(prog, shapes)
    lengths = [e.params["length"] for e in loops(apart)]
    assert lengths == [2, 2, 3, 4, 2, 3, 4, 1, 11, TRIPS]
    assert loop_origins(prog, shapes) == [
        (0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1),
        (2, 0, 0), (2, 1, 0), (3, 0, 0),
    ]  # fmt: skip
    np.testing.assert_allclose(evaluate(apart, [W, X]), evaluate(prog, [W, X]), rtol=1e-5)
