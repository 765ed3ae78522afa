"""What xform reads from a function: whether it is a derivative, and where it is defined."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import xform
from xform.errors import WrongArgument, WrongDtype
from xform.introspection.callables import (
    TransformRecord,
    argument_names,
    check_callable,
    check_parameter,
    definition_site,
    transform_record,
)

X = jnp.ones(3)


def loss(w, *xs, policy=None):
    return jnp.sum(w) + sum(map(jnp.sum, xs))


def text(x):
    return "a text"


def several(x):
    yield x


def test_transform_record_describes_gradients_also_when_jitted() -> None:
    g = xform.grad(loss, (0, 1), policy=xform.policies.save_dots)
    assert transform_record(g) == TransformRecord("grad", (0, 1), xform.policies.save_dots)
    assert transform_record(jax.jit(g)) == transform_record(g)
    assert transform_record(xform.value_and_grad(loss)) == TransformRecord(
        "value_and_grad", 0, None
    )

    @functools.wraps(g)
    def step(*args):
        return g(*args)

    for f in (loss, step, jnp.sin, functools.partial(loss, X), 3):
        assert transform_record(f) is None


def test_arguments() -> None:
    assert argument_names(loss, 3) == ["w", "xs[0]", "xs[1]"]
    assert argument_names(print, 1) == ["args[0]"]


def test_parameters() -> None:
    def step(w, x, *, policy=None):
        return w

    for f, n in ((step, 2), (functools.partial(step, X), 1), (jax.jit(step), 2),
                 (lambda *args, **kwargs: step(*args, **kwargs), 2)):  # fmt: skip
        check_parameter(f, n, "policy", "ask")
    for f, name in ((step, "x"), (step, "other"), (lambda policy: policy, "policy")):
        with pytest.raises(WrongArgument, match=name):
            check_parameter(f, 2 if f is step else 1, name, "ask")


def test_the_place() -> None:
    assert re.fullmatch(r".*test_callables\.py:\d+ \(loss\)", definition_site(loss))
    assert (
        definition_site(xform.grad(loss)) == definition_site(jax.jit(loss)) == definition_site(loss)
    )
    assert definition_site(jnp.sin) == definition_site(3) == "" or "jax" in definition_site(jnp.sin)


@pytest.mark.parametrize("use", [
    lambda f: xform.memory_analysis(f, X),
    lambda f: xform.memory_analysis(f, X, target="cpu:2"),
    lambda f: xform.plan(f, X),
    lambda f: xform.residuals(f, X),
    lambda f: xform.grad(f)(X),
    lambda f: jax.jit(xform.grad(f))(X),
    lambda f: xform.vjp(f, X),
    lambda f: xform.compare(f, X, policies=[None]),
])  # fmt: skip
def test_functions_that_return_strings_or_generators_raise(use) -> None:
    with pytest.raises((WrongArgument, WrongDtype)) as caught:
        use(text)
    assert "it returned a value of type str, which is no array" in str(caught.value)
    assert "(text)" in caught.value.where
    with pytest.raises(WrongArgument, match="several is a generator function") as caught:
        use(several)
    assert "(several)" in caught.value.where


def test_a_coroutine() -> None:
    async def later(x):
        return x

    with pytest.raises(WrongArgument, match="later is a coroutine function"):
        check_callable(later, "grad")
