"""The costs of a Plan, compared with the products and bytes of the program emitted for it."""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.emitted import emitted
from tests.fuzz.evaluate import Machine
from tests.planner.cuts.test_integer_program import joint_of
from xform import policies
from xform.interpret import emit
from xform.interpret.joint import Schedule, analyze
from xform.planner.candidates.snapshots import snapshot_candidates
from xform.planner.costs.outcome import (
    offloaded_bytes,
    peak_lower_bound,
    recompute_flops,
    residual_bytes,
    saved_bytes,
)
from xform.planner.decide import schedule
from xform.planner.problem import Problem
from xform.policies import MinCut
from xform.program.ir import evaluate, trace

N, ROWS = 8, 4
W, X = jnp.ones((6, N, N)) / 9, jnp.ones((ROWS, N))
PRODUCT = 2 * ROWS * N * N
ONE = ROWS * N * 4


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w) @ w)


def unrolled(w, x):
    for i in range(3):
        x = layer(x, w[i])
    return jnp.sum(x**2)


def loop(length):
    def f(w, x):
        x, ys = lax.scan(lambda x, w: (layer(x, w), jnp.sum(x)), x, w[:length])
        return jnp.sum(x**2) + jnp.sum(ys)

    return f


def loops(w, x):
    inner = lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, None, length=3)[0]
    return jnp.sum(lax.scan(lambda x, w: (inner(x, w), None), x, w)[0] ** 2)


def called(w, x):
    @jax.jit
    def block(x, w):
        for _ in range(30):
            x = jnp.sin(x) * 1.1
        return layer(x, w)

    return jnp.sum(block(block(x, w[0]), w[1]) ** 2)


PROGRAMS = {
    "unrolled": unrolled,
    "a loop": loop(5),
    "of one trip": loop(1),
    "of none": loop(0),
    "calls": called,
    "nothing": lambda w, x: jnp.float32(1),
}
POLICIES = (MinCut(), MinCut(0.0, 0.0), policies.save_nothing, policies.save_dots)


class Counting(Machine):
    """Count the FLOPs of products that run."""

    flops = 0

    def step(self, eqn):
        run = super().step(eqn)
        if eqn.primitive.name != "dot_general":
            return run
        ((summed, _), _), a = eqn.params["dimension_numbers"], eqn.invars[0].aval
        flops = 2 * math.prod(a.shape[i] for i in summed) * eqn.outvars[0].aval.size

        def counted(*xs):
            self.flops += flops
            return run(*xs)

        return counted


def compiled(how: Schedule):
    prog = emitted(how)
    run = jax.jit(lambda *xs: evaluate(prog, xs), keep_unused=True)
    return run, [jnp.ones(t.shape, t.dtype) for t in prog.in_avals]


def products(how: Schedule) -> int:
    """Return the FLOPs of the products that run, forward and backward."""
    run, xs = compiled(how)
    machine = Counting()
    machine.run(jax.make_jaxpr(run)(*xs), xs)
    return machine.flops


def bytes_of(values) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(values))


@pytest.mark.parametrize("name", [n for n in PROGRAMS if n != "calls"])
def test_work_is_the_products_that_are_run_once_more(name: str) -> None:
    joint = joint_of(PROGRAMS[name], W, X)
    once = products(schedule(joint, policies.save_everything, "cpu"))
    for policy in POLICIES:
        how = schedule(joint, policy, "cpu")
        assert recompute_flops(how) == products(how) - once


def test_a_loop_or_a_call_that_is_run_again_counts_whole() -> None:
    """Fused operations count too: two elementwise operations in each step, 62 in each call."""
    joint = joint_of(loops, W, X)
    how = schedule(joint, MinCut(0.0, 0.0), "cpu")
    steps, elements = 6 * 3, ROWS * N
    assert products(how) - products(schedule(joint, MinCut(), "cpu")) == steps * 2 * PRODUCT
    assert recompute_flops(how) == steps * 2 * (PRODUCT + elements)
    how = schedule(joint_of(called, W, X), policies.save_nothing, "cpu")
    assert recompute_flops(how) == 2 * (2 * PRODUCT + 62 * elements)


def test_work_is_counted_in_each_step_of_the_way_between_stored_states() -> None:
    prog = trace(lambda *xs: [loop(9)(*xs)], jnp.ones((9, N, N)) / 9, X)
    ends = prog, (True, True), (True,)
    once = products(schedule(analyze(*ends), policies.save_everything, "cpu"))
    works = []
    for whole in itertools.chain(*snapshot_candidates(Problem(*ends))):
        works.append(recompute_flops(whole.schedule))
        assert works[-1] == products(whole.schedule) - once
    assert len(set(works)) > 5


def test_work_of_all_devices_is_counted() -> None:
    mesh = jax.make_mesh((4,), ("i",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec("i")
    f = lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1]))
    whole = jax.shard_map(lambda w, x: jax.lax.psum(f(w, x), "i"), mesh=mesh,
                          in_specs=(jax.sharding.PartitionSpec(), spec),
                          out_specs=jax.sharding.PartitionSpec())  # fmt: skip
    alone, shared = (schedule(joint_of(g, W, X), MinCut(0.0, 0.0), "cpu") for g in (f, whole))
    assert recompute_flops(shared) == recompute_flops(alone) == 2 * PRODUCT


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_are_those_that_the_forward_part_hands_over(name: str) -> None:
    joint = joint_of(PROGRAMS[name], W, X)
    for policy in (*POLICIES, policies.save_everything):
        how = schedule(joint, policy, "cpu")
        _, handed = jax.eval_shape(lambda *xs, how=how: emit.forward(how, xs), W, X)
        assert saved_bytes(how) == bytes_of(handed)
        assert offloaded_bytes(how) == 0


def test_offloaded_bytes_are_excluded_from_saved_bytes() -> None:
    joint = joint_of(loop(5), W, X)
    offload = policies.offload_dots_with_no_batch_dims("device", "pinned_host")
    sent, all_kept = (schedule(joint, p, "cpu") for p in (offload, policies.save_dots))
    assert offloaded_bytes(sent) == 2 * 5 * ONE
    assert saved_bytes(sent) == saved_bytes(all_kept) - 2 * 5 * ONE


def test_an_inner_loop_that_is_run_again_waits_for_one_trip() -> None:
    """Inside: a state and three factors per iteration; outside: a state each, and the last."""
    how = schedule(joint_of(loops, W, X), MinCut(0.0, 0.0), "cpu")
    assert saved_bytes(how) == (6 + 1) * ONE
    assert residual_bytes(how) == (6 + 1) * ONE + 3 * (1 + 3) * ONE


@pytest.mark.parametrize("name", ["unrolled", "a loop", "nothing"])
def test_no_compiled_program_takes_less_than_the_least(name: str) -> None:
    joint = joint_of(PROGRAMS[name], W, X)
    for policy in (MinCut(), policies.save_nothing):
        how = schedule(joint, policy, "cpu")
        run, xs = compiled(how)
        took = run.lower(*xs).compile().memory_analysis()
        whole = took.argument_size_in_bytes + took.output_size_in_bytes + took.temp_size_in_bytes
        assert bytes_of([W, X]) <= peak_lower_bound(how, "cpu") <= whole


def test_residuals_may_share_the_buffer_of_a_result() -> None:
    x = jnp.ones((64, 64))
    how = schedule(joint_of(lambda x: jnp.sum(jnp.exp(x)), x), policies.save_everything, "cpu")
    assert saved_bytes(how) == x.nbytes
    run, xs = compiled(how)
    took = run.lower(*xs).compile().memory_analysis()
    # Besides scalars: the sum, and its cotangent.
    assert peak_lower_bound(how, "cpu") - 4 == x.nbytes + x.nbytes
    assert took.temp_size_in_bytes < x.nbytes


def test_of_branches_the_dearest_counts() -> None:
    def branched(*branches):
        def f(w, x):
            for i in range(3):
                x = lax.switch(i, branches, x, w[i])
            return jnp.sum(x**2)

        prog = trace(lambda w, x: [f(w, x)], W, X)
        return schedule(analyze(prog, (True, True)), MinCut(0.0, 0.0), "cpu")

    twice = lambda x, w: layer(layer(x, w), w)
    one, two = (recompute_flops(branched(f, f)) for f in (layer, twice))
    assert 0 < one < two
    assert recompute_flops(branched(layer, twice)) == recompute_flops(branched(twice, layer)) == two
