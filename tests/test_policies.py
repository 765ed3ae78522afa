"""Policies: values with equality, callable by JAX's protocol, and accepted from JAX."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import Offloadable, checkpoint_name

import xform
from xform import policies
from xform.errors import WrongArgument

MADE = {
    "save_everything": lambda: policies.save_everything,
    "save_nothing": lambda: policies.save_nothing,
    "save_dots": lambda: policies.save_dots,
    "save_dots_with_no_batch_dims": lambda: policies.save_dots_with_no_batch_dims,
    "save_only_these_names": lambda: policies.save_only_these_names("a", "b"),
    "save_any_names_but_these": lambda: policies.save_any_names_but_these("a"),
    "save_and_offload_only_these_names": lambda: policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "offload_dots_with_no_batch_dims": lambda: policies.offload_dots_with_no_batch_dims(
        "device", "pinned_host"
    ),
    "save_from_both_policies": lambda: policies.save_from_both_policies(
        policies.save_dots, policies.save_only_these_names("a")
    ),
}
JAXS = {
    "save_everything": "everything_saveable",
    "save_nothing": "nothing_saveable",
    "save_dots": "dots_saveable",
    "save_dots_with_no_batch_dims": "dots_with_no_batch_dims_saveable",
}


@pytest.mark.parametrize("name", MADE)
def test_equal_by_value_hashable_and_frozen(name: str) -> None:
    one, other = MADE[name](), MADE[name]()
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.anything = 1
    assert len({repr(make()) for make in MADE.values()}) == len(MADE)
    assert repr(one).isprintable()


@pytest.mark.filterwarnings("ignore:.*(which no value has|offloads nothing)")
@pytest.mark.parametrize("name", MADE)
def test_a_copied_policy_does_the_same(name: str) -> None:
    f = lambda x: jnp.sum(jnp.sin(checkpoint_name(jnp.sin(jnp.outer(x, x) @ x), "a")))
    x = jax.ShapeDtypeStruct((3,), np.float32)
    one = xform.residuals(f, x, policy=MADE[name]())
    other = xform.residuals(f, x, policy=copy.deepcopy(MADE[name]()))
    assert [r.to_dict() for r in one] == [r.to_dict() for r in other]


EQUATIONS = {
    "sin": jnp.sin,
    "dot": lambda x: x @ x,
    "batched dot": lambda x: jnp.einsum("bij,bjk->bik", x[None], x[None]),
    "conv": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
    "named a": lambda x: checkpoint_name(x, "a"),
    "named b": lambda x: checkpoint_name(x, "b"),
    "named c": lambda x: checkpoint_name(x, "c"),
    "cumsum": jnp.cumsum,
}


def answers(policy) -> dict[str, object]:
    out = {}
    for name, f in EQUATIONS.items():
        for eqn in jax.make_jaxpr(f)(np.ones((2, 2), np.float32)).eqns:
            answer = policy(eqn.primitive, *[v.aval for v in eqn.invars], **eqn.params)
            kind = type(answer).__name__
            truth = answer if isinstance(answer, bool | Offloadable) else kind == "SaveableType"
            out[f"{name} {eqn.primitive.name}"] = truth
    return out


@pytest.mark.parametrize("name", MADE)
def test_answers_are_those_of_jaxs_policy(name: str) -> None:
    jaxs = jax.checkpoint_policies
    theirs = {
        **{ours: getattr(jaxs, theirs) for ours, theirs in JAXS.items()},
        "save_only_these_names": jaxs.save_only_these_names("a", "b"),
        "save_any_names_but_these": jaxs.save_any_names_but_these("a"),
        "save_and_offload_only_these_names": jaxs.save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["b"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        "offload_dots_with_no_batch_dims": jaxs.offload_dot_with_no_batch_dims(
            "device", "pinned_host"
        ),
        "save_from_both_policies": jaxs.save_from_both_policies(
            jaxs.dots_saveable, jaxs.save_only_these_names("a")
        ),
    }
    assert answers(MADE[name]()) == answers(theirs[name])


@pytest.mark.parametrize("name", MADE)
def test_jax_checkpoint_takes_ours(name: str) -> None:
    f = lambda x: jnp.sum(jnp.sin(checkpoint_name(jnp.sin(jnp.outer(x, x) @ x), "a")))
    x = np.array([0.3, -0.7, 1.1], np.float32)
    want = jax.grad(f)(x)
    policy = MADE[name]()
    np.testing.assert_allclose(
        jax.jit(jax.grad(jax.checkpoint(f, policy=policy)))(x), want, rtol=1e-5
    )
    np.testing.assert_allclose(
        jax.jit(xform.grad(xform.remat(f, policy=policy)))(x), want, rtol=1e-5
    )


def test_an_alias_in_jax_is_taken() -> None:
    for theirs in ("checkpoint_dots", "checkpoint_dots_with_no_batch_dims"):
        xform.grad(jnp.sin, policy=getattr(jax.checkpoint_policies, theirs))(1.0)


def test_unknown_policy_names_raise() -> None:
    for use in (
        lambda p: xform.remat(jnp.sin, policy=p),
        lambda p: xform.grad(jnp.sin, policy=p)(1.0),
        lambda p: xform.vjp(jnp.sin, 1.0, policy=p),
        lambda p: xform.residuals(jnp.sin, 1.0, policy=p),
    ):
        with pytest.raises(WrongArgument, match="no policy has the name 'dots'"):
            use("dots")


def test_conflicting_names_and_offloads_are_refused() -> None:
    with pytest.raises(WrongArgument, match="both lists"):
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["a"],
            offload_src="device",
            offload_dst="pinned_host",
        )
    both = policies.save_from_both_policies(
        MADE["offload_dots_with_no_batch_dims"](), policies.save_dots
    )
    with pytest.raises(WrongArgument, match="offloads"):
        answers(both)


@pytest.mark.parametrize("name", MADE)
def test_policies_pass_through_jit_scan_and_static_arguments(name: str) -> None:
    policy = MADE[name]()

    def f(x, policy):
        step = lambda c, _: (xform.remat(jnp.sin, policy=policy)(c), None)
        return jnp.sum(jax.lax.scan(step, x, None, length=2)[0])

    g = jax.jit(xform.grad(f), static_argnums=1)
    x = np.array([0.3, -0.7], np.float32)
    np.testing.assert_allclose(g(x, policy), jnp.cos(jnp.sin(x)) * jnp.cos(x), rtol=1e-6)


ODD = {"np.bool_": np.True_, "1": 1, "None": None, "a text": "save", "an array": jnp.bool_(True)}


@pytest.mark.parametrize("answer", ODD.values(), ids=ODD)
def test_an_answer_that_jax_does_not_know(answer: object) -> None:
    """JAX raises a TypeError. An unknown answer must not mean that nothing is saved."""
    policy = lambda prim, *_, **params: answer
    f = lambda x: jnp.sum(jnp.sin(jnp.sin(x) @ x))
    x = jax.ShapeDtypeStruct((3, 3), np.float32)
    doors = {
        "jax": jax.grad(jax.checkpoint(f, policy=policy)),
        "grad": xform.grad(f, policy=policy),
        "remat": xform.grad(xform.remat(f, policy=policy)),
        "remat of JAX": xform.grad(jax.checkpoint(f, policy=policy)),
        "either": xform.grad(f, policy=policies.save_from_both_policies(policy, policy)),
    }
    for name, door in doors.items():
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(door, x)
        assert isinstance(caught.value, WrongArgument) == (name != "jax")
    with pytest.raises(WrongArgument):
        xform.residuals(f, x, policy=policy)
    text = str(caught.value)
    assert text.startswith(f"policy=<lambda>\n  problem: it returned {answer!r}, of type ")
    assert text.endswith("return True (save), False (recompute) or a jax.ad_checkpoint.Offloadable")


MAKERS = {
    "budget": policies.budget,
    "names": policies.save_only_these_names,
    "offload": policies.offload_dots_with_no_batch_dims,
    "names of JAX": jax.checkpoint_policies.save_only_these_names,
    "both of JAX": jax.checkpoint_policies.save_from_both_policies,
    "a class": policies.Budget,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_policy_factories_given_as_policies_raise(maker: object) -> None:
    x = jax.ShapeDtypeStruct((3,), np.float32)
    doors = (
        lambda: xform.grad(jnp.sum, policy=maker),
        lambda: xform.value_and_grad(jnp.sum, policy=maker),
        lambda: xform.fwd_and_bwd(jnp.sum, 0, policy=maker),
        lambda: xform.vjp(jnp.sum, jnp.ones(3), policy=maker),
        lambda: xform.remat(jnp.sum, policy=maker),
        lambda: xform.plan(jnp.sum, x, policy=maker),
        lambda: xform.residuals(jnp.sum, x, policy=maker),
        lambda: xform.compare(jnp.sum, x, policies=[maker]),
        lambda: policies.save_from_both_policies(maker, policies.save_dots),
    )
    for door in doors:
        with pytest.raises(WrongArgument, match="returns a policy, not a policy"):
            door()


def test_a_policy_that_answers_a_policy_was_not_called() -> None:
    given = lambda *_, **params: policies.save_dots
    with pytest.raises(WrongArgument, match="call it first: it returns a policy"):
        xform.residuals(jnp.sin, jax.ShapeDtypeStruct((3,), np.float32), policy=given)


@pytest.mark.parametrize(
    "make",
    [
        lambda: policies.save_only_these_names(3),
        lambda: policies.save_only_these_names(["a"]),
        lambda: policies.save_any_names_but_these(None),
        lambda: policies.offload_dots_with_no_batch_dims(3, "pinned_host"),
        lambda: policies.save_and_offload_only_these_names(
            names_which_can_be_saved="ab", names_which_can_be_offloaded=[],
            offload_src="device", offload_dst="pinned_host"),
        lambda: policies.save_and_offload_only_these_names(
            names_which_can_be_saved=3, names_which_can_be_offloaded=[],
            offload_src="device", offload_dst="pinned_host"),
        lambda: policies.budget(1, batch_size="8"),
        lambda: policies.budget(1, batch_size=1.5),
        lambda: policies.budget(None),
    ],
)  # fmt: skip
def test_policy_factories_with_invalid_arguments_raise(make) -> None:
    with pytest.raises(WrongArgument):
        make()
