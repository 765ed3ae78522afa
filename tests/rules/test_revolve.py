"""Scans that store some states and are recomputed from them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.emitted import emitted
from tests.reference import close
from xform.errors import NotDifferentiable
from xform.interpret.cost import program_flops
from xform.interpret.joint import analyze
from xform.interpret.slots import steps_run
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.decide import schedule
from xform.planner.plan.decision import Decision, decision_of
from xform.policies import MinCut
from xform.program.ir import evaluate, trace

pytestmark = pytest.mark.usefixtures("x64")

W = np.cos(np.arange(36.0)).reshape(6, 6) / 3
X = np.sin(np.arange(24.0)).reshape(4, 6)
STEPS = np.sin(np.arange(17 * 24.0)).reshape(17, 4, 6)
ARGS = W, X, STEPS


def mixed(w, x, steps, reverse):
    """A scan of unchanged, counted, constant and empty carries, with inputs and outputs."""

    def step(state, x):
        h, c, i, fixed, none = state
        y = jnp.tanh(h @ w + x[0] * jnp.sin(fixed))
        c = 0.9 * c + lax.cond(i % 2 == 0, jnp.sin, jnp.cos, y)
        return (jnp.sin(c) * y, c, i + 1, fixed, none), (y * x[1], i)

    start = x, jnp.zeros(x.shape), 0, jnp.sum(x), jnp.zeros((0, 3))
    factors = jnp.cos(jnp.arange(float(len(steps))))
    (h, c, *_), (ys, _) = lax.scan(step, start, (steps, factors), reverse=reverse)
    return jnp.sum(h * c) + jnp.sum(ys**2)


def within(w, x, steps, reverse):
    """A scan with a loop in each step."""

    def step(h, x):
        h, ys = lax.scan(lambda h, k: (jnp.sin(h @ w + k * x), h), h, jnp.arange(3.0))
        return h, jnp.sum(ys)

    h, ys = lax.scan(step, x, steps, reverse=reverse)
    return jnp.sum(h**2) + jnp.sum(ys * ys)


def alone(w, x, steps, reverse):
    """A scan whose states are not needed."""
    return jnp.sum(lax.scan(lambda s, x: (s + jnp.sin(x @ w), None), x, steps, reverse=reverse)[0])


def gradient(f, snapshots, args=ARGS):
    """Return the gradient with the loops of `f` storing `snapshots` states, and its Plan."""
    joint = analyze(trace(f, *args), (True,) * len(args), (True,))
    how = schedule(joint, MinCut(), backend="cpu")
    inner = dict(decision_of(how).inner)
    for node in [n for n in inner if n.loop]:
        body: Decision = decision_of(schedule(node.joints[0]))
        inner[node] = (dataclasses.replace(body, snapshots=snapshots),)
    how = schedule(joint, dataclasses.replace(decision_of(how), inner=inner), "cpu")
    prog = emitted(how)
    return lambda *xs: tuple(evaluate(prog, [*xs, jnp.ones(())])[1:]), how


@pytest.mark.parametrize(("snapshots", "reverse"), [(1, True), (3, False), (30, True)])
@pytest.mark.parametrize("f", [mixed, within, alone])
def test_gradients_are_those_of_jax(f, snapshots, reverse) -> None:
    f = functools.partial(f, reverse=reverse)
    got, _ = gradient(f, snapshots)
    close(jax.jit(got)(*ARGS), jax.grad(f, (0, 1, 2))(*ARGS), 1e-12)


@pytest.mark.parametrize("length", [0, 1, 2])
def test_short_loops(length) -> None:
    args = W, X, STEPS[:length]
    f = functools.partial(mixed, reverse=False)
    close(gradient(f, 2, args)[0](*args), jax.grad(f, (0, 1, 2))(*args), 1e-12)


@pytest.mark.slow
def test_batches_and_second_derivatives() -> None:
    f = lambda w, x, s: jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x, s)[0])
    got, _ = gradient(f, 3)
    want = jax.grad(f, (0, 1, 2))
    many = [np.stack([a, 1.1 * a]) for a in ARGS]
    close(jax.jit(jax.vmap(got))(*many), jax.vmap(want)(*many), 1e-12)
    ours = jax.jit(lambda *xs: xform.jvp(got, xs, xs)[1])(*ARGS)
    close(ours, jax.jvp(want, ARGS, ARGS)[1], 1e-11)
    square = lambda g: lambda w: sum(jnp.sum(v**2) for v in g(w, X, STEPS))
    close(jax.jit(xform.grad(square(got)))(W), jax.grad(square(want))(W), 1e-10)
    with pytest.raises(NotDifferentiable, match="xform"):
        jax.grad(square(got))(W)


@pytest.mark.parametrize("snapshots", [1, 2, 4, 9])
def test_states_and_work_of_a_uniform_chain_are_those_of_revolve(snapshots) -> None:
    def chain(w, x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=17)[0])

    _, how = gradient(chain, snapshots, (W, X))
    # Each stored state, and the state from which a step runs backward.
    assert saved_bytes(how) == (snapshots + 1) * X.nbytes
    # The first forward pass is no recompute. Each step is recomputed for its backward step.
    again = steps_run(17, snapshots) - 16 + 17
    assert recompute_flops(how) == again * 2 * math.prod((*X.shape, 6))


def test_the_flops_of_the_program_count_every_recomputed_step() -> None:
    def chain(w, x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=170)[0])

    work, planned = [], []
    for snapshots in (1, 4, 40):
        got, how = gradient(chain, snapshots, (W, X))
        work.append(program_flops(got, W, X))
        planned.append(recompute_flops(how))
    forward_and_backward = 170 * 3 * 2 * math.prod((*X.shape, 6))
    for found, recomputed in zip(work, planned, strict=True):
        assert 1 < found / (forward_and_backward + recomputed) < 1.3  # the rest is elementwise


def test_compiled_temp_memory_does_not_grow_with_scan_length() -> None:
    if jax.config.jax_disable_jit:
        pytest.skip("the loop is unrolled: to compile 256 steps takes minutes")
    f = functools.partial(mixed, reverse=False)
    temp = []
    for length in (64, 256):
        args = W, X, np.resize(STEPS, (length, 4, 6))
        got, _ = gradient(lambda w, x, s: f(w, x, lax.stop_gradient(s)), 4, args)
        used = jax.jit(got).lower(*args).compile().memory_analysis()
        # The ys and their cotangents, and the place of each step's state.
        temp.append(used.temp_size_in_bytes - length * (3 * X.nbytes + 16))
    assert temp[1] <= temp[0] + 4 * X.nbytes


def test_sharded_arguments_on_eight_devices() -> None:
    mesh = jax.make_mesh((4,), ("d",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    f = functools.partial(mixed, reverse=False)
    got, _ = gradient(f, 3)
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))
    close(jax.jit(got)(W, x, STEPS), jax.grad(f, (0, 1, 2))(*ARGS), 1e-12)
