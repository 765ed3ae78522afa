"""The shims: each difference between JAX 0.10.2 and 0.12, in both forms."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.scheduling_groups import scheduling_group

import xform
from xform import _jax
from xform._jax.custom_functions import pull_custom_vjp
from xform.program import source


def _scan_eqn():
    def f(w, c, xs):
        return lax.scan(lambda c, x: (c * w + x, c), c, xs)

    jaxpr = jax.make_jaxpr(f)(2.0, 1.0, jnp.ones(3))
    return next(e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan")


def test_closed_reads_both_kinds_of_jaxpr():
    whole = jax.make_jaxpr(lambda x: x + jnp.arange(3.0))(jnp.ones(3))
    opened, consts = _jax.jaxpr_and_consts(whole)
    assert opened.eqns
    assert len(opened.constvars) == len(consts)
    merged = SimpleNamespace(eqns=opened.eqns, consts=("kept",))
    assert _jax.jaxpr_and_consts(merged) == (merged, ("kept",))
    bare = SimpleNamespace(eqns=opened.eqns)
    assert _jax.jaxpr_and_consts(bare) == (bare, ())


def test_scan_counts_of_this_version():
    eqn = _scan_eqn()
    assert _jax.scan_counts(eqn.params) == (1, 1)
    assert len(eqn.invars) == 3


@pytest.mark.parametrize("n_consts", [0, 2])
def test_scan_counts_of_both_versions(n_consts):
    tree = SimpleNamespace(unpack=lambda: ((None,) * n_consts, (None,), (None, None)))
    assert _jax.scan_counts({"ft_in": tree}) == (n_consts, 1)
    assert _jax.scan_counts({"num_consts": n_consts, "num_carry": 1}) == (n_consts, 1)


def test_backward_functions_with_and_without_a_log():
    plain = SimpleNamespace(call_wrapped=lambda *args: list(args))
    logged = SimpleNamespace(call_wrapped=lambda *args: (list(args), {"log": 1}))
    assert pull_custom_vjp(plain, [1], [2]) == ([1, 2], None)
    assert pull_custom_vjp(logged, [1], [2]) == ([1, 2], {"log": 1})


def test_policy_answers_are_read_by_kind():
    policies = jax.checkpoint_policies
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["s"],
        names_which_can_be_offloaded=["o"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    jaxpr = jax.make_jaxpr(lambda x: jax.ad_checkpoint.checkpoint_name(x, "s"))(1.0)
    (eqn,) = jaxpr.jaxpr.eqns
    assert _jax.policy_answer(offload(eqn.primitive, name="s")) is True
    assert _jax.policy_answer(offload(eqn.primitive, name="other")) is False
    moved = _jax.policy_answer(offload(eqn.primitive, name="o"))
    assert (moved.src, moved.dst) == ("device", "pinned_host")


def test_every_public_primitive_is_found_by_name():
    found = _jax.primitives()
    assert found["sin"].name == "sin"
    assert len(found) > 150


def test_frames_are_the_users_and_not_a_librarys():
    eqn = jax.make_jaxpr(lambda x: lax.sin(x))(1.0).jaxpr.eqns[0]
    assert "site-packages" not in source.frame(eqn)
    assert "test_jax.py" in source.frame(eqn)


def test_operations_run_in_the_current_trace():
    """In 0.12 they do not run where the trace was captured."""
    outermost = _jax.current_trace()
    assert outermost is _jax.current_trace()
    seen = []

    @jax.jit
    def f(x):
        seen.append(_jax.current_trace())
        return jnp.asarray(3) + x

    assert f(1) == 4
    assert seen[0] is not outermost


@pytest.mark.parametrize(
    ("inline", "asked"),
    [(True, True), (False, False), ("JAX_EARLY", True), ("JAX_LATE", True), ("AUTO", False)],
)
def test_is_inlined_reads_bool_and_enum_forms_of_inline(inline, asked):
    in_012 = isinstance(inline, str)
    value = SimpleNamespace(name=inline) if in_012 else inline
    assert _jax.is_inlined({"inline": value}) is asked
    if not in_012:
        nested = jax.jit(lambda x: x + 1, inline=inline)
        eqns = jax.make_jaxpr(nested)(1.0).jaxpr.eqns
        assert all(_jax.is_inlined(e.params) is asked for e in eqns if e.primitive.name == "jit")


def test_the_bodies_of_calls():
    for f in (lax.composite(jnp.sin, "a.name"), jax.jit(jnp.sin)):
        (eqn,) = jax.make_jaxpr(f)(1.0).jaxpr.eqns
        opened, _ = _jax.jaxpr_and_consts(_jax.callee(eqn.params, "jaxpr"))
        assert [e.primitive.name for e in opened.eqns] == ["sin"]
    assert _jax.callee({"call_jaxpr": 1}, "jaxpr") == 1


def _tagged(**how):
    jaxpr = jax.make_jaxpr(scheduling_group("a")(jnp.sin))(1.0)
    (eqn,) = jaxpr.jaxpr.eqns
    own = "ad_metadata" in eqn.params
    return eqn.replace(params={**eqn.params, **how}) if own else eqn


def test_metadata_of_both_versions():
    eqn = _tagged()
    (again,) = jax.make_jaxpr(_jax.with_metadata(jnp.sin, eqn.params))(1.0).jaxpr.eqns
    plain = lambda e: {k: v for k, v in e.params.items() if k != "jaxpr"}
    assert again.primitive is eqn.primitive
    assert plain(again) == plain(eqn)
    assert _jax.linear_part(eqn) is eqn


@pytest.mark.parametrize("derived", [(), (("scheduling_group", "b"),)])
def test_metadata_of_a_linear_part(derived):
    eqn = _tagged(ad_metadata=derived)
    if "ad_metadata" not in eqn.params:
        eqn = eqn.replace(params={"xla_metadata": (("scheduling_group", "a"),),
                                  "ad_metadata": derived})  # fmt: skip
    params = _jax.linear_part(eqn).params
    assert (params["xla_metadata"], params["ad_metadata"]) == (derived, "same")
    if "jaxpr" in params:
        pull = lambda x: xform.vjp(_jax.with_metadata(jnp.sin, eqn.params), x)[1](x)
        first, second = jax.make_jaxpr(pull)(1.0).jaxpr.eqns
        assert first.params["xla_metadata"] == eqn.params["xla_metadata"]
        assert second.params["xla_metadata"] == derived


def test_context_fields_holds_only_non_default_settings():
    plain, other = (
        jax.make_jaxpr(f)(1.0).jaxpr.eqns[0].ctx
        for f in (lax.sin, jax.threefry_partitionable(False)(lax.sin))
    )
    assert _jax.context_fields(plain) == {}
    assert _jax.context_fields(other) == {"threefry_partitionable": False}
