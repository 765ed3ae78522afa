"""Operations that XLA removes, checked by compiling each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xform.passes.erased import unchanged_operand
from xform.program.ir import trace

X, N = jnp.ones((3, 5)), jnp.ones((3, 5), jnp.int32)

SAME = {
    "x + 0": (lambda x: x + 0.0, X),
    "0 + x": (lambda x: 0.0 + x, X),
    "x - 0": (lambda x: x - 0.0, X),
    "x * 1": (lambda x: x * 1.0, X),
    "1 * x": (lambda x: 1.0 * x, X),
    "x / 1": (lambda x: x / 1.0, X),
    "n + 0": (lambda n: n + 0, N),
    "n * 1": (lambda n: n * 1, N),
    "a scalar + 0": (lambda x: x + 0.0, X[0, 0]),
    "narrow * 1": (lambda x: x * 1, X.astype(jnp.bfloat16)),
    "to its own type": (lambda x: lax.convert_element_type(x, jnp.float32), jnp.asarray(2.0)),
    "a copy": (lambda x: jnp.array(x), X),
    "without a gradient": (lax.stop_gradient, X),
    "no elements + 0": (lambda x: x + 0.0, X[:0]),
}  # fmt: skip
OTHER = {
    "0 - x": (lambda x: 0.0 - x, X),
    "1 / x": (lambda x: 1.0 / x, X),
    "x * 0": (lambda x: x * 0.0, X),
    "x + 1": (lambda x: x + 1.0, X),
    "max of x and 0": (lambda x: jnp.maximum(x, 0.0), X),
    "0 repeated + a scalar": (lambda x: lax.add(jnp.zeros((3, 5)), x), X),
    "to integers": (lambda x: x.astype(jnp.int32), X),
    "to numbers of the same bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32), X),
}


def last(f, x):
    """Return the place of the operand that is the last equation's result."""
    return unchanged_operand(trace(lambda x: [f(x)], x).equations[-1])


def compiled(f, x) -> str:
    return jax.jit(f).lower(x).compile().as_text()


def drops(f, x) -> bool:
    """Return whether XLA compiles a function to the same program as `x` itself."""
    lines = [line.split(" = ")[1].split("(")[0].split()[-1]
             for line in compiled(f, x).splitlines() if " = " in line]  # fmt: skip
    return set(lines) <= {"parameter", "copy", "constant"}


@pytest.mark.parametrize("name", SAME)
def test_identity_operations_are_found_and_dropped_by_xla(name: str) -> None:
    f, x = SAME[name]
    assert last(f, x) is not None
    assert drops(f, x)
    np.testing.assert_array_equal(f(x), x)


@pytest.mark.parametrize("name", OTHER)
def test_operations_that_change_their_operand_are_not_identities(name: str) -> None:
    f, x = OTHER[name]
    assert last(f, x) is None


def test_the_operand_that_is_left_is_the_one_that_is_no_number() -> None:
    assert [last(SAME[name][0], X) for name in ("x + 0", "0 + x", "1 * x", "x / 1")] == [0, 1, 1, 0]


def test_the_least_of_all_numbers_is_none_to_a_maximum() -> None:
    for f in (lambda x: jnp.maximum(x, -np.inf), lambda x: jnp.minimum(x, np.inf)):
        assert last(f, X) == 0
        assert drops(f, X)
    for f in (lambda x: jnp.maximum(x, np.inf), lambda x: jnp.minimum(x, -np.inf)):
        assert last(f, X) is None


def test_a_number_that_is_repeated_counts_where_its_equation_is_known() -> None:
    prog = trace(lambda x: [x + jnp.zeros_like(x)], X)
    by = {v: eqn for eqn in prog.equations for v in eqn.outvars}
    assert unchanged_operand(prog.equations[-1]) is None
    assert unchanged_operand(prog.equations[-1], by) == 0
    assert drops(lambda x: x + jnp.zeros_like(x), X)
