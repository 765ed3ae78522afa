"""A check that tests nothing is an error, and so is one that rounding decides."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.errors import WrongArgument, WrongRule
from xform.testing import Case, check_grads, check_rule

X = np.array([0.3, -2.0])
CASE = Case("sin", lax.sin, (X,))

NOTHING = {
    "no points": lambda: check_rule(jnp.sin),
    "no function": lambda: check_rule(3),
    "no function, but a point": lambda: check_rule(3, X),
    "integers alone": lambda: check_rule(jnp.sin, np.arange(3)),
    "a Case without points": lambda: check_rule(Case("sin", lax.sin, ())),
    "a Case of no function": lambda: check_rule(Case("sin", 3, (X,))),
    "a Case and a point": lambda: check_rule(CASE, X),
    "a Case and a field": lambda: check_rule(CASE, label="x"),
    "no dtypes": lambda: check_rule(CASE, dtypes=()),
    "one dtype as text": lambda: check_rule(CASE, dtypes="float64"),
    "dtypes of integers": lambda: check_rule(CASE, dtypes=["int32"]),
    "no checks": lambda: check_rule(CASE, checks=()),
    "an unknown check": lambda: check_rule(CASE, checks=["frist"]),
    "one check as text": lambda: check_rule(CASE, checks="first"),
    "a check that the Case leaves out": lambda: check_rule(
        dataclasses.replace(CASE, second=False), checks=["second"]
    ),
    "no outputs": lambda: check_rule(lambda x: None, X),
    "grads of no function": lambda: check_grads(3, [X]),
    "grads at no point": lambda: check_grads(jnp.sin, []),
    "grads at an array": lambda: check_grads(jnp.sin, X),
    "grads at integers": lambda: check_grads(jnp.sin, [np.arange(3)]),
    "grads without modes": lambda: check_grads(jnp.sin, [X], modes=()),
    "grads in an unknown mode": lambda: check_grads(jnp.sin, [X], modes=["fwd"]),
    "grads of order 0": lambda: check_grads(jnp.sin, [X], order=0),
    "grads of no outputs": lambda: check_grads(lambda x: None, [X]),
    "grads in float32": lambda: check_grads(jnp.sin, [X.astype(np.float32)]),
    "grads in complex64": lambda: check_grads(jnp.sin, [X.astype(np.complex64)]),
    "grads of an output in float32": lambda: check_grads(lambda x: x.astype(np.float32), [X]),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_test(name: str) -> None:
    with pytest.raises(WrongArgument):
        NOTHING[name]()


def message(call) -> str:
    with pytest.raises((WrongArgument, WrongRule)) as caught:
        call()
    return str(caught.value)


def test_messages() -> None:
    assert message(NOTHING["no points"]) == (
        "check_rule of sin in float64\n"
        "  problem: there is nothing to differentiate: no argument is an array of floats\n"
        "  remedy:  give a point to check, as float64 arrays"
    )
    # Without x64 every array is float32, whatever its dtype was.
    with jax.enable_x64(False):
        text = message(lambda: check_grads(jnp.sin, [jnp.asarray(X)]))
    assert text == (
        "check_grads in float32\n"
        "  problem: an argument has dtype float32, too inexact to check a derivative by "
        "differences\n"
        "  remedy:  compute in float64: set jax.config.update('jax_enable_x64', True) and pass "
        "float64 arrays"
    )
    with jax.enable_x64(True):
        text = message(lambda: check_grads(lambda x: lax.stop_gradient(x), [X], order=1))
    assert text.startswith("check of <lambda>, order 1\n  problem: jvp against differences:")
    assert "a custom rule that it calls" in text


def test_numbers_are_points() -> None:
    with jax.enable_x64(True):
        check_grads(lambda x: x**2, (3.0,))
        check_rule(jnp.sin, 0.5, dtypes=["float64"], checks=["first"])
