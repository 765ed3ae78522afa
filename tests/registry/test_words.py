"""The words for rules: what they do with operands that have no derivative."""

import jax
import jax.numpy as jnp
import numpy as np

import xform
from xform._jax import Primitive


def test_an_integer_operand_of_a_linear_primitive_keeps_its_value() -> None:
    pick_p = Primitive("pick")
    pick_p.def_impl(lambda x, i: x[i])
    pick_p.def_abstract_eval(lambda x, i: x.update(shape=()))
    xform.extend.linear(pick_p, lambda ct, x, i: jnp.zeros_like(x).at[i].set(ct))
    x, dx = jnp.arange(4.0), jnp.arange(10.0, 14.0)
    pick = lambda x: pick_p.bind(x, jnp.int32(2))
    assert [float(v) for v in xform.jvp(pick, (x,), (dx,))] == [2.0, 12.0]
    assert float(xform.linearize(pick, x)[1](dx)) == 12.0
    np.testing.assert_array_equal(xform.grad(pick)(x), jax.nn.one_hot(2, 4))
