"""The collectives that a plan repeats are those that its emitted program runs more often."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xform
from tests.planner.cuts.test_integer_program import joint_of
from xform._jax import jaxprs_of
from xform.interpret.slots import recomputed_steps
from xform.planner.decide import schedule as decided
from xform.planner.report.collectives import repeated_collectives
from xform.policies import min_cut, save_dots, save_everything, save_nothing

MESH = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
N = 4
W, X = np.ones((N, 8, 8), np.float32), np.ones((4, 8), np.float32)


def mapped(body):
    """Return the loss of a body that every device runs on its rows, with the same weights."""

    def loss(w, x):
        run = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
        return jnp.sum(run(w, x))

    return loss


def layer(w, x):
    y = jnp.sin(x @ w)
    return jnp.tanh(y * lax.psum(jnp.cos(y), "x"))


def unrolled(w, x):
    for i in range(N):
        x = layer(w[i], x)
    return x


def scanned(w, x):
    return lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def regions(w, x):
    return lax.scan(lambda x, w: (jax.checkpoint(layer)(w, x), None), x, w)[0]


def repeated(w, x):
    """The loop has an unknown length, so its steps run again from stored states."""
    step = lambda s: (s[0] + 1, layer(w[0], s[1]))
    return lax.while_loop(lambda s: s[0] < w[0, 0, 0] * N, step, (0, x))[1]


def branches(w, x):
    two = lambda w, x: layer(
        w, lax.ppermute(layer(w, x), "x", [(i, (i + 1) % 4) for i in range(4)])
    )
    return lax.cond(w[0, 0, 0] > 0, two, layer, w[0], x)


def gathered(w, x):
    for i in range(N):
        rows = lax.all_gather(jnp.sin(x @ w[i]), "x", tiled=True)
        x = lax.psum_scatter(jnp.tanh(rows), "x", tiled=True)
    return x


def counts(jaxpr, times=1):
    """Count the collectives of a jaxpr by name, from its equations alone."""
    found: dict[str, int] = {}
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [
            counts(getattr(j, "jaxpr", j), times * eqn.params.get("length", 1))
            for j in jaxprs_of(eqn)
        ]
        if name == "cond":
            inner = [max(inner, key=lambda c: sum(c.values()))]
        if name.startswith(("psum", "all_gather", "reduce_scatter", "ppermute")):
            inner.append({name: times})
        for each in inner:
            for key, n in each.items():
                found[key] = found.get(key, 0) + n
    return found


def emitted(loss, policy):
    """Count the collectives of a gradient that is emitted under a policy."""
    gradient = xform.value_and_grad(loss, (0, 1), policy=policy)
    return counts(jax.jit(gradient).trace(W, X).jaxpr.jaxpr)


def planned(loss, policy):
    return xform.plan(loss, W, X, policy=policy, argnums=(0, 1), verify=False)


@pytest.mark.parametrize("policy", [save_nothing, save_everything, save_dots, min_cut], ids=repr)
@pytest.mark.parametrize("body", [unrolled, scanned, regions, branches, gathered])
def test_they_are_those_that_the_program_runs_more_often(body, policy) -> None:
    once = emitted(mapped(scanned if body is regions else body), save_everything)
    more = {k: n - once[k] for k, n in emitted(mapped(body), policy).items() if n > once[k]}
    found: dict[str, int] = {}
    for c in planned(mapped(body), policy).repeated_collectives:
        found[c.operation] = found.get(c.operation, 0) + c.count
    assert found == {name.removesuffix("_invariant"): n for name, n in more.items()}
    assert bool(found) == (policy in (save_nothing, save_dots) or body is regions)


def test_a_while_loop_runs_a_step_again_for_its_state_and_for_its_values() -> None:
    (psum,) = planned(mapped(repeated), save_everything).repeated_collectives
    assert psum.count == emitted(mapped(repeated), save_everything)["psum_invariant"] - 3 == 2


def test_a_loop_of_few_stored_states_runs_them_again() -> None:
    joint = joint_of(mapped(scanned), np.ones((17, 8, 8), np.float32), X)
    how = decided(joint, save_everything, "cpu")
    ((shard, (body,)),) = how.inner.items()
    ((loop, (step,)),) = body.inner.items()
    few = {loop: (dataclasses.replace(step, snapshots=2),)}
    inner = {shard: (dataclasses.replace(body, inner=few),)}
    (psum,) = repeated_collectives(dataclasses.replace(how, inner=inner))
    assert psum.count == recomputed_steps(17, 2) + 17


def test_a_plan_names_them_and_stores_them(tmp_path: Path) -> None:
    plan = planned(mapped(unrolled), save_nothing)
    (psum,) = plan.repeated_collectives
    assert (psum.operation, psum.axes, psum.count, psum.bytes) == ("psum", ("x",), N, N * 8 * 4)
    assert "test_collectives.py" in psum.where
    (line,) = [line for line in str(plan).splitlines() if line.startswith("repeats")]
    assert line.startswith("repeats psum over x 4 times, 128 B on each device, ")
    stored = plan.to_dict()["repeated_collectives"]
    assert stored[0]["count"] == N
    plan.save(tmp_path / "plan.json")
    assert xform.load(tmp_path / "plan.json").repeated_collectives == (psum,)


def test_a_compiler_inserts_others_that_a_plan_does_not_mention() -> None:
    sharded = lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P("x")))
    loss = lambda w, x: jnp.sum(jnp.sin(sharded(x @ w[0])) ** 2)
    plan = planned(loss, save_nothing)
    assert not plan.repeated_collectives
    assert "repeats" not in str(plan)
