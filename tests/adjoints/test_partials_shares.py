"""`partials` along one edge, and edge by edge, against JAX's gradient of functions cut by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xform
from tests.adjoints.programs import TAPS, W, X, block, recurrent
from tests.reference import close

pytestmark = pytest.mark.usefixtures("x64")


def severed(x: Any, use: int) -> Any:
    """Return JAX's gradient at h, in the block with all uses cut except one."""

    def rest(h: Any) -> Any:
        cut = lambda use_here, at: use_here if at == use else lax.stop_gradient(use_here)
        a = jnp.exp(cut(h, 0))
        b = a * cut(h, 1)
        c = jax.nn.silu(cut(h, 2))
        return jnp.sum(b * c) + jnp.sum(cut(h, 3) ** 2) + jnp.sum(a)

    return jax.grad(rest)(jnp.sin(x))


@pytest.mark.parametrize("use", range(4))
def test_the_share_of_one_use(use: int) -> None:
    close(xform.adjoints.partials(block, "h", via=use)(X), severed(X, use))
    close(jax.jit(xform.adjoints.partials(block, "h", via=use))(X), severed(X, use))


def test_shares_add_up_and_say_whose_they_are() -> None:
    shares = xform.adjoints.partials(block, "h", per_use=True)(X)
    assert [label.split(",")[0] for label in shares] == [
        "0: exp",
        "1: mul",
        "2: jit silu",
        "3: integer_pow",
    ]
    assert all("programs.py:" in label for label in shares)
    for use, share in enumerate(shares.values()):
        close(share, severed(X, use))
    close(sum(shares.values()), xform.adjoints.partials(block, "h")(X))


def test_the_share_through_a_name() -> None:
    def rest(h: Any, through: str) -> Any:
        held = lax.stop_gradient(h)
        b = jnp.exp(h) * h if through == "b" else jnp.exp(held) * held
        c = jax.nn.silu(h if through == "c" else held)
        return jnp.sum(b * c)

    for through in "bc":
        got = xform.adjoints.partials(block, "h", via=through)
        close(got(X), jax.grad(rest)(jnp.sin(X), through))
        close(jax.jit(got)(X), jax.grad(rest)(jnp.sin(X), through))


def test_the_share_through_the_next_trip() -> None:
    """The share of h through the next h is the full gradient of the next h, pulled back."""
    total = xform.adjoints.partials(recurrent, "h")(W, X, TAPS)
    through = xform.adjoints.partials(recurrent, "h", via="h")(W, X, TAPS)
    h, want = X, np.zeros((4, 3))
    for t in range(4):
        h = np.tanh(W @ h + t)
        if t:
            want[t - 1] = W.T @ ((1 - h**2) * np.asarray(total[t]))
    close(through, want)


def test_shares_in_a_loop_add_up() -> None:
    shares = jax.jit(xform.adjoints.partials(recurrent, "h", per_use=True))(W, X, TAPS)
    close(sum(shares.values()), xform.adjoints.partials(recurrent, "h")(W, X, TAPS))


def test_through_a_branch() -> None:
    def f(x: Any, i: int) -> Any:
        h = xform.adjoints.name(jnp.sin(x), "h")
        odd, even = (lambda h: xform.adjoints.name(h**2, "square")), (lambda h: 3.0 * h)
        return jnp.sum(lax.switch(i, [even, odd], h) * h)

    got = [xform.adjoints.partials(f, "h", via="square")(X, i) for i in (0, 1)]
    close(got[0], np.zeros(3))
    close(got[1], 2 * np.sin(X) ** 2)
