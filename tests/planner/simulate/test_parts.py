"""The flat program of a Plan equals that of the emitted program, step by step."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.emitted import emitted
from xform import policies
from xform.interpret.joint import analyze
from xform.planner.candidates.nested import nested_candidates
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.decide import schedule
from xform.planner.problem import Problem
from xform.planner.simulate.flat import flatten
from xform.planner.simulate.parts import flatten_schedule
from xform.planner.simulate.profiles import backend_profile
from xform.policies import MinCut
from xform.program.ir import trace

W, X = jnp.ones((6, 16, 16)) / 9, jnp.ones((8, 16))


@jax.custom_vjp
def squared(x):
    return x**2


squared.defvjp(lambda x: (x**2, x), lambda x, ct: (2 * x * ct,))


def layer(x, w):
    return x + jnp.tanh(jax.nn.softmax(x @ w) @ w.T) / (1 + jnp.sum(x**2, -1, keepdims=True))


def unrolled(w, x):
    for i in range(3):
        x = layer(x, w[i])
    return jnp.sum(squared(x))


def scanned(w, x):
    return jnp.sum(lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w)[0] ** 2)


def branched(w, x):
    return jnp.sum(lax.cond(jnp.sum(x) > 0, jnp.sin, lambda x: x @ w[0], layer(x, w[1])))


def region(w, x):
    inner = jax.checkpoint(lambda x: layer(layer(x, w[0]), w[1]))
    return jnp.sum(inner(jnp.sin(x)) ** 2)


def until(w, x):
    step = lambda s: (s[0] + 1, jnp.tanh(s[1] @ w[0]))
    return jnp.sum(lax.while_loop(lambda s: s[0] < 4, step, (0, x))[1])


def nest(w, x):
    inner = lambda x: lax.scan(lambda x, w: (layer(x, w), None), x, w[:2])[0]
    return jnp.sum(lax.scan(lambda x, _: (inner(x), x), x, None, length=3)[1] ** 2)


def literal(w, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, s: s * x + 1.0, 2.0 * x))


PROGRAMS = unrolled, scanned, branched, region, until, nest, literal
OFFLOADED = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
POLICIES = {
    "min_cut": policies.min_cut,
    "no price": MinCut(0.0, 0.0),
    "a price": MinCut(0.01, 0.0, 0.5),
    "everything": policies.save_everything,
    "nothing": policies.save_nothing,
    "dots": policies.save_dots,
    "offloaded": OFFLOADED,
}


def same(how, backend: str) -> None:
    n_cotangents, by = len(how.joint.seeds), backend_profile(backend)
    flats = flatten_schedule(how, by), flatten(emitted(how), by, n_cotangents)
    assert len(flats[0].steps) > 3
    ours, theirs = (_written(flat) for flat in flats)
    assert ours == theirs


def _written(flat):
    """Return the steps as text, where a value is the place of its step."""
    names = {id(c): f"i{i}" for i, c in enumerate(flat.inputs)}
    lines = []
    for i, s in enumerate(flat.steps):
        names |= {id(c): f"v{i}.{k}" for k, c in enumerate(s.results)}
        lines.append(
            (s.primitive.name, [names[id(c)] for c in s.operands], [c.bytes for c in s.results])
        )
    return lines, [names.get(id(c), "constant") for c in flat.outputs]


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("f", PROGRAMS)
def test_flattened_schedule_equals_the_flattened_emitted_program(
    f, policy: str, backend: str
) -> None:
    joint = analyze(trace(lambda *xs: [f(*xs)], W, X), (True, True), (True,))
    same(schedule(joint, POLICIES[policy], backend="cpu"), backend)


def test_loops_of_loops_and_stored_states() -> None:
    long = lambda w, x: lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()
    prog = trace(lambda *xs: [long(*xs)], jnp.ones((24, 16, 16)) / 9, X)
    ends = prog, (True, True), (True,)
    found = [
        *nested_candidates(Problem(*ends)),
        *itertools.chain(*snapshot_candidates(Problem(*ends))),
    ]
    assert len(found) > 5
    for whole in found:
        same(whole.schedule, "cpu")


def test_pushed_forward() -> None:
    joint = analyze(trace(lambda *xs: [scanned(*xs)], W, X), (True, True), push=True)
    same(schedule(joint, policies.min_cut, backend="cpu"), "cpu")
