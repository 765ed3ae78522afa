"""Restructured loops: the same values, and the fewest possible saved bytes."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.parameters import slow
from tests.reference import close
from xform import errors, policies
from xform._jax import JaxprEqn
from xform.passes.structured import bodies
from xform.planner.loops import loops, reshape_loops
from xform.planner.shape import fold_loop
from xform.program.ir import Program, evaluate, trace

pytestmark = pytest.mark.usefixtures("x64")

W = np.cos(np.arange(36.0)).reshape(6, 6) / 3
X = np.sin(np.arange(24.0)).reshape(4, 6)
STEPS = np.sin(np.arange(30 * 24.0)).reshape(30, 4, 6)


def recurrent(w, x, steps):
    """Two loops, one of them in a call and in reverse; stacked outputs; a constant."""
    step = lambda h, x: (jnp.tanh(h @ w + jnp.sin(x)), jnp.cos(h))
    h, ys = lax.scan(step, x, steps)
    h, zs = jax.jit(lambda h: lax.scan(step, h, steps, reverse=True))(h)
    return jnp.sum(h**2) + jnp.sum(ys * zs)


def final(w, x, steps):
    """Two loops of which only the last state is read."""
    step = lambda h, x: (jnp.tanh(h @ w + jnp.sin(x)), None)
    h, _ = lax.scan(step, x, steps)
    h, _ = jax.jit(lambda h: lax.scan(step, h, steps, reverse=True))(h)
    return jnp.sum(h**2)


SHAPES = [((2, 15),), ((2, 3, 5),), ((10,), (20,)), ((4, 7), (2,)), ((30, 1),), ((1, 30),),
          ((1,), (29,))]  # fmt: skip


@pytest.mark.parametrize("shape", slow(SHAPES, *SHAPES[1::2]))
def test_values_are_the_same(shape) -> None:
    prog = trace(lambda *xs: [recurrent(*xs)], W, X, STEPS)
    assert [eqn.params["length"] for eqn in loops(prog)] == [30, 30]
    (want,) = evaluate(prog, [W, X, STEPS])
    for places in ((0,), (1,), (0, 1)):
        apart = reshape_loops(prog, dict.fromkeys(places, shape))
        close(evaluate(apart, [W, X, STEPS])[0], want, 1e-12)


@pytest.mark.parametrize(("shape", "unrolled"), [
    (((10,), (20,)), [4, 4]),
    (((3, 10),), [1, 4]),
    (((15, 2),), [2, 4]),
    (((3, 5, 2),), [1, 2, 4]),
])  # fmt: skip
def test_unrolled_steps_stay_unrolled(shape, unrolled) -> None:
    loop = lambda x, xs: [lax.scan(lambda c, x: (c * x, None), x, xs, unroll=4)[0]]
    apart = reshape_loops(trace(loop, X[0, 0], STEPS[:, 0, 0]), {0: shape})
    found = [eqn.params["unroll"] for eqn in every(apart) if eqn.primitive.name == "scan"]
    assert found == unrolled


def every(prog: Program) -> list[JaxprEqn]:
    """Return the equations of a program; those of loops inside come after them."""
    return [e for eqn in prog.equations
            for e in (eqn, *(i for inner in bodies(eqn) for i in every(inner)))]  # fmt: skip


def test_a_shape_of_another_length_is_refused() -> None:
    prog = trace(lambda *xs: [recurrent(*xs)], W, X, STEPS)
    with pytest.raises(ValueError, match="does not have the 30 steps of the loop"):
        reshape_loops(prog, {0: ((4, 7),)})


def kept(shape, state: int, step: int) -> int:
    """Return the bytes that a shape saves: all outer states, and the innermost steps."""
    total = 0
    for part in shape:
        *outer, inner = part
        total += state * sum(outer) + step * inner
    return total


@pytest.mark.parametrize("length", [2, 3, 7, 12, 36, 97])
@pytest.mark.parametrize(("state", "step"), [(1, 1), (1, 5), (3, 4)])
def test_the_shape_of_one_level_is_the_best_of_all(length: int, state: int, step: int) -> None:
    shape, found = fold_loop(length, 1, state, step)
    assert sum(map(math.prod, shape)) == length
    assert found == kept(shape, state, step)
    every = [((length,),)]
    for k, n in itertools.product(range(2, length + 1), range(2, length + 1)):
        if k * n <= length:
            rest = length - k * n
            every.append(((k, n), *([(rest,)] if rest else [])))
    assert found <= min(kept(s, state, step) for s in every if len(s[0]) > 1 or length < 4)


def test_more_levels_keep_less() -> None:
    sizes = [fold_loop(1000, depth, 1, 3)[1] for depth in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    # (d + 1) (N r)^(1 / (d + 1)), up to rounding of the lengths.
    for depth, n in enumerate(sizes):
        assert n <= 1.25 * (depth + 1) * 3000 ** (1 / (depth + 1))


@pytest.mark.parametrize("part", slow([0.8, 0.5, 0.2, 0.15], 0.5, 0.15))
def test_a_budget_takes_loops_apart(part: float) -> None:
    most = xform.residuals(final, W, X, STEPS).total_bytes
    budget = policies.budget(int(part * most), of="saved")
    made = xform.plan(final, W, X, STEPS, argnums=None, policy=budget, verify=False)
    assert made.saved_bytes <= part * most
    _, pull = xform.vjp(final, W, X, STEPS, policy=budget)
    close(pull(1.0), jax.grad(final, (0, 1, 2))(W, X, STEPS), 1e-12)


def test_less_budget_is_more_work() -> None:
    most = xform.residuals(final, W, X, STEPS).total_bytes
    work = []
    for part in (1.0, 0.8, 0.6, 0.4, 0.2, 0.15):
        policy = policies.budget(int(part * most), of="saved")
        made = xform.plan(final, W, X, STEPS, argnums=None, policy=policy, verify=False)
        work.append(made.recompute_flops)
    assert work == sorted(work)
    assert work[0] == 0


@pytest.mark.parametrize(("part", "apart", "stored"), [(0.7, True, False), (0.16, False, True)])
def test_a_plan_with_loops_apart_or_stored_states_is_loaded(tmp_path, part, apart, stored) -> None:
    most = xform.residuals(final, W, X, STEPS).total_bytes
    policy = policies.budget(int(part * most), of="saved")
    made = xform.plan(final, W, X, STEPS, argnums=None, policy=policy, verify=False)
    assert bool(made.shapes()) == apart
    assert any(c["snapshots"] for c in made.record.decisions) == stored
    made.save(tmp_path / "plan.json")
    loaded = xform.Plan.load(tmp_path / "plan.json")
    _, pull = xform.vjp(final, W, X, STEPS, policy=loaded)
    close(pull(1.0), jax.grad(final, (0, 1, 2))(W, X, STEPS), 1e-12)
    with pytest.raises(errors.OtherProgram):
        xform.vjp(final, W, X, STEPS[:20], policy=loaded)


def test_second_derivatives_and_batches_of_loops_apart() -> None:
    policy = policies.budget(
        xform.residuals(final, W, X, STEPS).total_bytes // 4, of="saved", batch_size=1
    )
    f = lambda x: final(W, x, STEPS)
    g = xform.grad(f, policy=policy)
    xs = np.stack([X, 2 * X])
    close(jax.jit(jax.vmap(g))(xs), jax.vmap(jax.grad(f))(xs), 1e-12)
    ours = xform.jvp(jax.jit(g), (X,), (X,))[1]
    close(ours, jax.jvp(jax.grad(f), (X,), (X,))[1], 1e-11)
