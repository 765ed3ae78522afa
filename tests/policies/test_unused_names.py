"""Names in policies that no value has: a warning says which names exist."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import xform
from xform import policies
from xform.policies.unused_names import names_in

WS = jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
OFFLOAD = {"offload_src": "device", "offload_dst": "pinned_host"}


def loss(ws, x):
    layer = lambda h, w: (checkpoint_name(jnp.tanh(jnp.sin(h @ w)), "act"), None)
    return jax.lax.scan(layer, x, ws)[0].sum()


def nameless(ws, x):
    return jnp.sum(jnp.tanh(x @ ws[0]))


def with_region(policy):
    layer = lambda h, w: checkpoint_name(jnp.tanh(jnp.sin(h @ w)), "act")
    return lambda ws, x: jax.checkpoint(layer, policy=policy)(x, ws[0]).sum()


def own(*names):
    return policies.save_only_these_names(*names)


def of_jax(*names):
    return jax.checkpoint_policies.save_only_these_names(*names)


@pytest.fixture(params=["residuals", "memory_analysis", "jit"])
def asked(request):
    def ask(f, policy):
        if request.param == "residuals":
            xform.residuals(f, WS, X, policy=policy)
        elif request.param == "memory_analysis":
            xform.memory_analysis(xform.grad(f, policy=policy), WS, X)
        else:
            xform.jit(lambda ws, x: xform.grad(f)(ws, x), policy).lower(WS, X)

    return ask


@pytest.mark.parametrize("save", [own, of_jax])
def test_a_name_that_no_value_has(asked, save) -> None:
    line = f"test_unused_names.py:{loss.__code__.co_firstlineno + 1}"
    with pytest.warns(UserWarning, match=rf"'typo', which no value has.* 'act' \(.*{line}"):
        asked(loss, save("typo", "act"))


@pytest.mark.parametrize("save", [own, of_jax])
def test_a_name_that_a_value_has(asked, save, recwarn) -> None:
    asked(loss, save("act"))
    assert not [w for w in recwarn if "no value has" in str(w.message)]


def test_a_program_without_names() -> None:
    with pytest.warns(UserWarning, match="No value has a name: give names by"):
        xform.residuals(nameless, WS, X, policy=own("a"))


@pytest.mark.parametrize("save", [own, of_jax])
def test_the_policy_of_a_region(asked, save) -> None:
    with pytest.warns(UserWarning, match=r"the policy of a remat region at .* has the name 'typo'"):
        asked(with_region(save("typo")), policies.min_cut)


def test_several_names_are_one_warning() -> None:
    with pytest.warns(UserWarning, match="has the names 'a', 'b', which no value has") as found:
        xform.residuals(loss, WS, X, policy=own("b", "a"))
    assert len(found) == 1
    assert found[0].filename == __file__


def test_an_offload_that_moves_nothing() -> None:
    def f(ws, x):
        return checkpoint_name(jnp.sum(x @ ws[0]), "total")

    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["total"], **OFFLOAD)  # fmt: skip
    with pytest.warns(UserWarning, match="offloads nothing: the backward pass of f reads no value"):
        xform.residuals(f, WS, X, policy=policy)


def test_the_names_of_policies() -> None:
    jax_own = jax.checkpoint_policies
    assert names_in(own("a", "b")) == names_in(of_jax("a", "b")) == {"a", "b"}
    assert names_in(policies.save_any_names_but_these("c")) == {"c"}
    assert names_in(jax_own.save_any_names_but_these("c")) == {"c"}
    both = policies.save_from_both_policies(policies.save_dots, own("d"))
    assert names_in(both) == {"d"}
    assert names_in(jax_own.save_from_both_policies(jax_own.dots_saveable, of_jax("d"))) == {"d"}
    kinds = {"names_which_can_be_saved": ["e"], "names_which_can_be_offloaded": ["f"]}
    assert {"e", "f"} <= names_in(jax_own.save_and_offload_only_these_names(**kinds, **OFFLOAD))
    assert names_in(policies.save_and_offload_only_these_names(**kinds, **OFFLOAD)) == {"e", "f"}
    for policy in (policies.min_cut, policies.save_dots, policies.budget("1GiB"), None,
                   lambda prim, *_, **params: params.get("name") in ("x", "y")):  # fmt: skip
        assert not names_in(policy)


def test_plain_use_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.jit(xform.grad(loss, policy=own("typo"))), WS, X)
