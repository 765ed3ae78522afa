"""The values that a compiler may keep with half their bits."""

import jax.numpy as jnp
import pytest
from jax import lax

from tests.planner.cuts.test_integer_program import joint_of
from xform.planner.costs.product_operands import product_operands

W, X = jnp.ones((8, 8)), jnp.ones((4, 8))

# What a function of `w` and `x` does, and which of its operations make what products alone read.
FUNCTIONS = {
    "an operand": (lambda w, x: jnp.sum((x @ w + w[0]) @ w), {"add"}),
    "a view of it": (lambda w, x: jnp.sum((x @ w + w[0]).reshape(2, 2, 8) @ w), {"add", "reshape"}),
    "read otherwise too": (lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w), set()),
    "an output": (lambda w, x: x @ w + w[0], set()),
    "of more precision":
        (lambda w, x: jnp.sum(jnp.dot(x @ w + w[0], w, precision="highest")), set()),
    "of 16 bits": (lambda w, x: jnp.sum((x @ w + w[0]).astype("bfloat16") @ w.astype("bfloat16")),
                   set()),
    "inside a loop": (lambda w, x: lax.scan(lambda c, _: (c @ w, None), x + 1, None, length=2)[0],
                      set()),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_product_operands_are_float32_values_read_only_by_products(name: str) -> None:
    f, expected = FUNCTIONS[name]
    joint = joint_of(f, W, X)
    found = {joint.producer[v].primitive.name for v in product_operands(joint)}
    assert found == expected
