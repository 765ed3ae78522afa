"""From decisions to a Plan: recomputed equations stand before their first use."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tests.planner.cuts.test_integer_program import joint_of
from xform._jax import Offloadable, Var
from xform.interpret.joint import Joint, Schedule
from xform.planner.decide import schedule
from xform.planner.plan.decision import Decision
from xform.planner.schedule import schedule_by_decision, schedule_by_policy
from xform.policies import save_dots

W, X = jnp.ones((8, 8)) / 9, jnp.ones((4, 8))
HOST = Offloadable("device", "pinned_host")


def chain(w, x):
    return jnp.sum(jnp.sin(jnp.sin(jnp.sin(x @ w) @ w) @ w))


def named(w, x):
    return jnp.sum(jnp.sin(checkpoint_name(jnp.exp(x @ w), "h")) * x)


def masked(w, x):
    mask = lax.broadcasted_iota(jnp.int32, (4, 8), 0) > 1
    return jnp.sum(jnp.where(mask, jnp.sin(x @ w), 0.0) ** 2)


def joint(f) -> Joint:
    return joint_of(f, W, X)


def cut(of: Joint, saved=(), sent=None) -> Schedule:
    decision = Decision(frozenset(saved), {}, sent or {})
    return schedule_by_decision(of, decision, {}, schedule)


def made_by(of: Joint, primitive: str) -> list[Var]:
    return [e.outvars[0] for e in of.forward if e.primitive.name == primitive]


@pytest.mark.parametrize("f", [chain, named, masked])
@pytest.mark.parametrize("primitives", [(), ("dot_general",), ("cos", "exp")])
def test_every_operand_is_available_when_it_is_read(f, primitives) -> None:
    of = joint(f)
    made = cut(of, [v for p in primitives for v in made_by(of, p)])
    there = {*of.inputs, *of.seeds, *made.saved}
    for eqn in made.order:
        reads = (v for v in eqn.invars if isinstance(v, Var))
        assert all(v in there or of.named_copy.get(v) in there for v in reads)
        there.update(eqn.outvars)
    assert there.issuperset(v for v in of.backward_outputs if isinstance(v, Var))
    assert len(set(map(id, made.order))) == len(made.order)
    assert set(map(id, made.order)) >= of.backward_ids


def test_every_recomputed_equation_is_read_later() -> None:
    made = cut(joint(chain))
    for i, eqn in enumerate(made.order):
        if id(eqn) in made.recomputed:
            later = {v for e in made.order[i + 1 :] for v in e.invars if isinstance(v, Var)}
            assert later.intersection(eqn.outvars)


def test_only_decided_values_that_are_read_are_saved() -> None:
    of = joint(chain)
    products, cosines = made_by(of, "dot_general"), made_by(of, "cos")
    assert cut(of).saved == ()
    assert set(cut(of, products).saved) == set(products)
    assert set(cut(of, products + cosines).saved) == {*cosines, *products[:-1]}
    assert set(cut(of, of.producer).saved) < set(of.producer)


def test_a_constant_is_made_again_and_does_not_count() -> None:
    of = joint(masked)
    made = cut(of, of.producer)
    assert not of.always_recomputed.intersection(made.saved)
    again = [e for e in made.order if id(e) not in of.backward_ids]
    assert {e.primitive.name for e in again} >= {"iota"}
    assert not made.recomputed


def test_offloaded_values_have_their_memory_and_reason() -> None:
    of = joint(chain)
    first, *others = made_by(of, "dot_general")
    made = cut(of, [first, *others], {first: HOST})
    assert made.offloaded == {first: HOST}
    assert "pinned_host and back" in made.why[first]
    assert {made.why[v] for v in others if v in made.why} == {"on the cheapest cut"}


def test_saving_a_named_value_saves_its_checkpoint_name() -> None:
    of = joint(named)
    (value,), (name,) = made_by(of, "exp"), made_by(of, "name")
    assert cut(of, [value]).saved == cut(of, [name]).saved == (name,)


def test_a_policy_is_asked_and_is_the_reason() -> None:
    of = joint(chain)
    made = schedule_by_policy(of, save_dots, (), {}, schedule)
    assert set(made.saved) == set(made_by(of, "dot_general"))
    assert all(why.endswith("saves dot_general") for why in made.why.values())


def test_inputs_are_read_where_they_are() -> None:
    of = joint(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    assert cut(of, made_by(of, "cos")).reads == (True, True)
    alone = joint_of(lambda w: jnp.sum(2 * w), W)
    assert cut(alone).reads == (False,)
    assert jax.tree.leaves(cut(alone).saved) == []
