"""The least work within a budget, compared with all saved sets where possible, and all prices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.planner.cuts.test_fit import PROGRAMS, WS, X
from xform.interpret.cost import aval_bytes, equation_flops
from xform.interpret.joint import analyze, reads_of
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.costs.recompute import fusible, recomputable
from xform.planner.decide import schedule
from xform.policies import MinCut, budget
from xform.program.ir import trace

SHORT = {
    "two layers": lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x @ w) @ w) @ w),
    "shared": lambda w, x: jnp.sum(jnp.exp(x @ w) * jnp.sin(x @ w @ w)),
    "of many sizes": lambda w, x: jnp.sum(jnp.sin((x @ w) @ w[:, :2]) @ jnp.exp(w[:2] @ w)),
    "cumulative": lambda w, x: jnp.sum(jnp.sin(jnp.cumsum(jnp.sin(jnp.cumsum(x @ w, 0)), 1))),
}


def joint_of(f, *args):
    leaves, tree = jax.tree.flatten(args)
    prog = trace(lambda *xs: [f(*jax.tree.unflatten(tree, xs))], *leaves)
    return analyze(prog, (True,) * len(leaves))


def work(joint, saved) -> float:
    """Return the recomputed FLOPs of a saved set; infinite if an equation is forbidden."""
    todo = [v for e in joint.backward for v in reads_of(e, {}) if v in joint.producer]
    done, total = set(), 0.0
    while todo:
        v = todo.pop()
        eqn = joint.producer[v]
        if v in saved or id(eqn) in done:
            continue
        done.add(id(eqn))
        if not fusible(eqn):
            total += equation_flops(eqn) if recomputable(eqn) else np.inf
        todo += [u for u in reads_of(eqn, {}) if u in joint.producer]
    return total


@pytest.mark.parametrize("name", SHORT)
def test_no_saved_set_that_fits_needs_less_work(name: str) -> None:
    joint = joint_of(SHORT[name], jnp.ones((6, 6)), jnp.ones((4, 6)))
    values = [v for e in joint.forward for v in e.outvars if v not in joint.always_recomputed]
    assert len(values) <= 14
    sets = [s for n in range(len(values) + 1) for s in itertools.combinations(values, n)]
    size = {s: sum(aval_bytes(v.aval) for v in s) for s in sets}
    cost = {s: work(joint, set(s)) for s in sets}
    most = saved_bytes(schedule(joint, MinCut(), "cpu"))
    for n in np.linspace(0, most, 9).astype(int):
        best = min(cost[s] for s in sets if size[s] <= n)
        assert recompute_flops(schedule(joint, budget(int(n), of="saved"), "cpu")) == best


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_price_gives_less_work_for_its_bytes(name: str) -> None:
    """This holds within loops, calls and branches too."""
    joint = joint_of(PROGRAMS[name], WS, X)
    for price in (1e-3, 3e-2, 0.1, 0.3, 1.0):
        by_price = schedule(joint, MinCut(price, price), "cpu")
        exact = schedule(joint, budget(saved_bytes(by_price), of="saved"), "cpu")
        assert saved_bytes(exact) <= saved_bytes(by_price)
        assert recompute_flops(exact) <= recompute_flops(by_price)
