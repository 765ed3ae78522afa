"""Requests that `partials` refuses, and its messages."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import xform
from tests.adjoints.programs import X, block, plain
from xform.errors import NotDifferentiable, NotScalar, WrongArgument, WrongDtype

pytestmark = pytest.mark.usefixtures("x64")


def error(call: Callable[[], Any], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert "problem:" in text
    assert "remedy:" in text
    return text


def test_a_name_that_does_not_exist() -> None:
    f = functools.partial(plain, xform.adjoints.name)
    assert "such as 'h'" in error(lambda: xform.adjoints.partials(f, "H")(X), WrongArgument)
    named = lambda x: jnp.sum(xform.adjoints.name(x, "hidden_1") * xform.adjoints.name(x, "logits"))
    said = error(lambda: xform.adjoints.partials(named, "hiden")(X), WrongArgument)
    assert "such as 'hidden_1'" in said
    assert "logits" not in said
    unnamed = error(lambda: xform.adjoints.partials(lambda x: x.sum(), "h")(X), WrongArgument)
    assert 'h = xform.adjoints.name(h, "h")' in unnamed
    assert "'h'" in error(lambda: xform.adjoints.partials(f, "h", via="i")(X), WrongArgument)


def test_a_use_that_does_not_exist() -> None:
    said = error(lambda: xform.adjoints.partials(block, "h", via=9)(X), WrongArgument)
    assert "4 uses: 0: exp, " in said
    assert "programs.py:" in said
    error(lambda: xform.adjoints.partials(block, "h", via=-1)(X), WrongArgument)


def test_a_loss_that_is_no_scalar() -> None:
    error(lambda: xform.adjoints.partials(lambda x: xform.adjoints.name(x, "h"), "h")(X), NotScalar)
    f = lambda x: jnp.sum(xform.adjoints.name(x + 1j, "h"))
    error(lambda: xform.adjoints.partials(f, "h")(X), WrongDtype)


def test_a_value_without_a_derivative() -> None:
    f = lambda x: jnp.sum(x * xform.adjoints.name(jnp.arange(3), "h"))
    assert "int64[3]" in error(lambda: xform.adjoints.partials(f, "h")(X), WrongDtype)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (xform.adjoints.name(x, "h"), jnp.sum(x))[1],
        lambda x: jnp.sum(lax.stop_gradient(xform.adjoints.name(x, "h")) * x),
        lambda x: jnp.sum(xform.adjoints.name(x, "h").astype(int) * x),
    ],
    ids=["not used", "stopped", "integers"],
)
def test_a_value_that_no_path_reaches(f: Any) -> None:
    said = error(lambda: xform.adjoints.partials(f, "h")(X), NotDifferentiable)
    assert "leads from the value named 'h' to the output" in said
    assert "test_partials_errors.py" in said


def test_a_consumer_that_is_not_one() -> None:
    f = lambda x: jnp.sum(xform.adjoints.name(x, "h") ** 2 + xform.adjoints.name(jnp.sin(x), "k"))
    said = error(lambda: xform.adjoints.partials(f, "h", via="k")(X), NotDifferentiable)
    assert "to a value named 'k'" in said


def test_where_no_perturbation_enters() -> None:
    def f(x: Any) -> Any:
        step = lambda s: (s[0] + 1, xform.adjoints.name(jnp.sin(s[1]), "h"))
        return jnp.sum(lax.while_loop(lambda s: s[1][0] > s[0], step, (0.0, x))[1])

    assert "trip count is not known" in error(
        lambda: xform.adjoints.partials(f, "h")(X), NotDifferentiable
    )


def test_through_a_value_in_a_function_with_a_rule() -> None:
    @jax.custom_vjp
    def odd(x: Any) -> Any:
        return xform.adjoints.name(x * 3.0, "inside") ** 2

    odd.defvjp(lambda x: (odd(x), None), lambda _, ct: (7.0 * ct,))
    f = lambda x: jnp.sum(odd(xform.adjoints.name(x, "h")))
    said = error(lambda: xform.adjoints.partials(f, "h", via="inside")(X), NotDifferentiable)
    assert "name an argument or the result" in said


@pytest.mark.parametrize("names", [[], 3, ["h", None, 2], ("h", 1)])
def test_names_that_are_none(names: Any) -> None:
    error(lambda: xform.adjoints.partials(block, names), WrongArgument)


@pytest.mark.parametrize("options", [{"via": 0, "per_use": True}, {"via": True}, {"via": 1.5}])
def test_options_that_contradict(options: Any) -> None:
    error(lambda: xform.adjoints.partials(block, "h", **options), WrongArgument)


def test_a_name_is_text() -> None:
    error(lambda: xform.adjoints.name("h", X), WrongArgument)
