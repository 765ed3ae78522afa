"""Lines of operations with rarely used parameters, and with initial values."""

from __future__ import annotations

import functools

import jax
import numpy as np

from tests.fuzz.source import function
from tests.fuzz.writer import Writer

Shape = tuple[int, ...]
_MESH = "jax.make_mesh((1,), ('i',), (jax.sharding.AxisType.Auto,))"
# Text, shapes of its arguments, bounds of its arguments and of its value.
INITIAL = (
    ("reduce({0}, 0.37, lax.add, (0,))", ((2, 3),), 1.2, 2.8),
    ("reduce({0}, np.float64(1.7), lax.mul, (1,))", ((2, 3),), 1.2, 3.0),
    ("reduce({0}, 0.2107, lax.max, (0,))", ((3, 2),), 2.0, 2.0),
    ("reduce({0}, np.array(0.2107), lax.min, (0, 1))", ((3, 2),), 2.0, 2.0),
    ("reduce({0}, 0.6, lambda a, b: a + b + 0.3 * a * b, (1,))", ((3, 3),), 1.0, 8.0),
    ("reduce({0}, {1}[0], lax.add, (0, 1))", ((2, 3), (2,)), 0.7, 5.0),
    ("reduce({0}, {1}[0], lambda a, b: a + b + 0.3 * a * b, (0,))", ((3,), (2,)), 1.0, 8.0),
    ("reduce(({0}, {1}), (0.3, np.float64(0.7)), lambda a, b: (a[0] + b[0], a[1] * b[1]),"
     " (0,))[0]", ((3,), (3,)), 1.0, 4.0),
    ("jnp.cumulative_sum({0}, axis=1, include_initial=True)", ((2, 3),), 1.2, 3.6),
    ("reduce_window({0}, 0.37, lax.add, (2, 2), (1, 1), 'SAME')", ((2, 3),), 1.0, 4.4),
    ("reduce_window({0}, 0.37, lax.add, (2,), (2,), ((1, 1),))", ((3,),), 1.0, 2.4),
    ("reduce_window({0}, np.float64(0.2107), lax.max, (2, 2), (1, 2), 'SAME')",
     ((3, 3),), 2.0, 2.0),
    ("reduce_window({0}, 0.2107, lax.min, (2,), (1,), 'VALID')", ((3,),), 2.0, 2.0),
    ("reduce_window({0}, 0.37, lax.mul, (2,), (1,), 'VALID')", ((3,),), 1.4, 2.0),
    ("reduce_window({0}, 0.37, lambda a, b: a + b + 0.3 * a * b, (2,), (1,), 'SAME')",
     ((3,),), 1.0, 4.0),
    ("reduce_window({0}, 0.37, lax.mul, (2, 1), (1, 1), ((1, 0), (0, 0)), (1, 2), (1, 1))",
     ((2, 3),), 1.4, 2.0),
)  # fmt: skip
ODD = (
    ("reduce_window({0}, 0.0, lax.add, (2, 2), (1, 2), ((1, 0), (0, 1)), (1, 2), (2, 1))",
     ((3, 3),), 1.0, 4.0),
    ("reduce_window({0}, -np.inf, lax.max, (2, 2), (1, 2), ((1, 0), (0, 1)), (1, 1), (2, 1))",
     ((3, 3),), 2.0, 2.0),
    ("reduce_window({0}, np.inf, lax.min, (2,), (2,), ((1, 0),), (1,), (1,))", ((3,),), 2., 2.),
    ("lax.conv_general_dilated({0}[None], {1}[:, None], (1,), ((1, -1),),"
     " feature_group_count=2)[0]", ((2, 3), (2, 2)), 1.0, 3.0),
    ("lax.conv_general_dilated({0}[:, None], {1}[:, None], (2,), ((0, 2),), (2,), (1,),"
     " batch_group_count=2)[0]", ((2, 3), (2, 2)), 1.0, 3.0),
    ("lax.conv_general_dilated({0}[..., None], {1}[..., None], (1,), 'SAME', dimension_numbers="
     "('NWC', 'WIO', 'NWC'), rhs_dilation=(2,))[..., 0]", ((3, 3), (2, 1)), 1.0, 3.0),
    ("lax.dot_general({0}, {1}, (((0,), (0,)), ((), ())), precision='highest',"
     " preferred_element_type=F)", ((3, 2), (3, 2)), 1.0, 3.0),
    ("lax.dot_general({0}, {1}, (((), ()), ((1,), (0,))))", ((3, 2), (2, 3)), 1.4, 2.0),
    ("jnp.einsum('ij,kj,i->k', {0}, {1}, {2})", ((2, 3), (3, 3), (2,)), 0.9, 4.4),
    ("jnp.einsum('ii->i', {0})", ((3, 3),), 2.5, 2.5),
    ("lax.sort(({1}, {0}), dimension=0, is_stable=False, num_keys=1)[1]",
     ((3, 2), (3, 2)), 2.5, 2.5),
    ("jnp.sort({0}, descending=True)", ((2, 3),), 2.5, 2.5),
    ("lax.top_k({0}, 2, axis=0)[0]", ((3, 2),), 2.5, 2.5),
    ("lax.slice({0}, (0, 1), (3, 3), (2, 1))", ((3, 3),), 2.5, 2.5),
    ("lax.rev({0}, (1, 0))", ((2, 3),), 2.5, 2.5),
    ("lax.pad({0}, {1}[0], ((-1, 2, 1), (1, -2, 0)))", ((3, 3), (2,)), 2.5, 2.5),
    ("lax.dynamic_slice({0}, (-1, np.int64(5)), (2, 2))", ((3, 3),), 2.5, 2.5),
    ("lax.dynamic_update_slice({0}, {1}[None], (np.int32(-2), np.int32(1)))",
     ((3, 3), (2,)), 2.5, 2.5),
    ("jnp.asarray({0}).at[np.array([0, -1, 5])].get(mode='fill', fill_value=0.25)",
     ((3, 2),), 2.5, 2.5),
    ("jnp.take({0}, np.array([4, -2, 1]), axis=0, mode='wrap')", ((3, 2),), 2.5, 2.5),
    ("jnp.asarray({0}).at[np.array([2, 0, 1])].mul({1}, unique_indices=True)",
     ((3,), (3,)), 1.2, 1.8),
    ("jnp.asarray({0}).at[np.array([0, 1, -1])].divide({1} + 3.0, unique_indices=True)",
     ((3,), (3,)), 1.5, 1.5),
    ("jnp.asarray({0}).at[np.array([0, 2])].power(2)", ((3,),), 1.5, 2.3),
    ("jnp.asarray({0}).at[::2, 1].min({1})", ((3, 3), (2,)), 2.5, 2.5),
    ("jnp.asarray({0})[np.array([[0, 1], [2, 0]]), 1:]", ((3, 3),), 2.5, 2.5),
    ("{0}[..., np.newaxis, ::-1]", ((2, 3),), 2.5, 2.5),
    ("jnp.roll({0}, np.int32(2), 1)", ((2, 3),), 2.5, 2.5),
    ("lax.integer_pow({0} + 3.0, 0) * {0}", ((3,),), 2.0, 2.0),
    ("lax.integer_pow({0} + 3.0, -1)", ((3,),), 2.0, 1.0),
    ("lax.cumlogsumexp({0}, 0, True)", ((3, 2),), 2.5, 3.7),
    ("lax.linalg.triangular_solve({0} + 3.7 * np.eye(3), {1}, left_side=False, lower=False,"
     " transpose_a=True)", ((3, 3), (2, 3)), 1.0, 1.0),
    ("lax.linalg.triangular_solve(0.3 * {0}, {1}, left_side=True, lower=True, unit_diagonal=True)",
     ((3, 3), (3, 2)), 1.0, 3.0),
    ("lax.linalg.cholesky({0} @ {0}.T + 2.1 * np.eye(3), symmetrize_input=False)",
     ((3, 3),), 1.0, 3.0),
    ("lax.linalg.eigh(np.diag([1.0, 2.7, 4.1]) + 0.1 * {0}, lower=False)[1]", ((3, 3),), 1., 5.),
    ("jnp.linalg.qr({0} + np.eye(3, 2) * 3.0, mode='reduced')[1]", ((3, 2),), 1.0, 7.0),
    ("jnp.linalg.pinv({0} + np.eye(3, 2) * 3.0)", ((3, 2),), 1.0, 2.0),
    ("jnp.linalg.matrix_power(0.4 * {0}, 3)", ((3, 3),), 1.0, 2.0),
    ("jnp.linalg.multi_dot([{0}, {1}, {2}])", ((2, 3), (3, 3), (3,)), 0.8, 5.0),
    ("jax.scipy.linalg.expm(0.3 * {0})", ((3, 3),), 1.0, 3.0),
    ("jnp.fft.irfft2(jnp.fft.rfft2({0}) * (0.6 + 0.5j), (2, 3))", ((2, 3),), 1.0, 2.0),
    ("jnp.fft.hfft({0} + 0.3j * {0}, 4)", ((3,),), 1.0, 7.0),
    ("jnp.real(jnp.fft.ifftn({0}, (2, 4)))", ((2, 3),), 2.5, 2.5),
    ("jnp.percentile({0} + np.array([0.31, 0.12, -0.73]), 30.0)", ((3,),), 2.0, 3.0),
    ("jnp.diff({0}, axis=0, prepend=0.3)", ((3, 2),), 1.2, 2.4),
    ("jnp.gradient({0}, 0.7)", ((3,),), 1.2, 3.4),
    ("jnp.cross({0}, {1})", ((3,), (3,)), 1.2, 3.0),
    ("jnp.polyval({0}, {1})", ((3,), (2, 3)), 1.0, 3.0),
    ("jnp.select([{0} > 0.9117, {0} > 0.1131], [{0} ** 2, np.float64(0.4)], {1})",
     ((3,), (3,)), 1.4, 2.0),
    ("jnp.logaddexp.reduce({0})", ((3,),), 2.0, 3.2),
    ("jax.nn.logsumexp({0}, 1, b={1} + 3.0, keepdims=True)", ((2, 3), (2, 3)), 2.0, 5.0),
    ("jax.nn.softmax({0}, 0, where=np.array([True, False, True]))", ((3,),), 2.5, 1.0),
    ("jax.nn.standardize({0} + np.array([0.31, 0.12, -0.73]))", ((3,),), 1.0, 2.0),
    ("jax.nn.celu({0} + 0.0917, 0.8)", ((2, 3),), 2.5, 2.6),
    ("jax.nn.selu({0} + 0.0917)", ((3,),), 2.3, 2.6),
    ("jax.nn.leaky_relu({0} + 0.0917, 0.2)", ((3,),), 2.3, 2.6),
    ("jax.nn.mish({0})", ((3,),), 2.3, 2.5),
    ("jax.nn.squareplus({0})", ((3,),), 2.0, 3.0),
    ("jax.nn.hard_swish({0} * 2.1)", ((3,),), 1.2, 2.5),
    ("jax.nn.log_sigmoid({0})", ((3,),), 2.0, 2.2),
    ("jax.scipy.special.xlogy({0}, {1} + 3.1)", ((3,), (3,)), 1.6, 2.7),
    ("jax.scipy.special.xlog1py({0}, {1} + 3.1)", ((3,), (3,)), 1.6, 2.9),
    ("jax.scipy.special.log_ndtr({0})", ((3,),), 2.0, 3.9),
    ("jax.scipy.special.entr(jnp.square({0}) + 0.5)", ((3,),), 1.2, 1.5),
    ("jnp.nan_to_num({0})", ((3,),), 2.5, 2.5),
    ("jnp.unwrap({0} * 2.0)", ((3,),), 1.2, 9.0),
    ("ldexp({0}, np.int32(1))", ((3,),), 1.2, 2.5),
    ("jnp.modf({0} * 2.1)[0]", ((3,),), 1.2, 1.0),
    ("frexp({0} + 3.3)[0]", ((3,),), 1.0, 1.0),
    ("jnp.deg2rad({0}) * 40.0", ((3,),), 2.5, 2.0),
    ("jnp.float_power(lax.convert_element_type({0}, F) + 3.1, np.float32(0.5))", ((3,),), 1.5, 2.3),
    ("lax.convert_element_type({0}, np.float32).astype(F)", ((3,),), 2.5, 2.5),
    ("lax.convert_element_type({0}, jnp.float8_e4m3fn).astype(F)", ((3,),), 2.5, 2.6),
    ("lax.convert_element_type({0}, jnp.float8_e5m2)[np.int32([2, 0, 2])].astype(F)", ((3,),), 2.5,
     2.8),
    ("jax.enable_x64(True)(lambda a: jnp.sin(a.astype(np.float64) * 1.3).astype(F))({0})",
     ((3,),), 2.5, 1.0),
    ("jax.enable_x64(False)(lambda a, b: a.astype(np.float32) @ b.astype(np.float32))({0}, {1})"
     ".astype(F)", ((2, 3), (3,)), 1.0, 3.0),
    ("jax.enable_x64(True)(lambda a: jnp.cumsum(a.astype(np.float64) ** 2).astype(F))({0})",
     ((3,),), 1.2, 4.4),
    ("jax.shard_map(lambda a, b: jnp.sin(a) * lax.psum(a * b, 'i'), in_specs=jax.P('i'),"
     f" out_specs=jax.P('i'), mesh={_MESH})({{0}}, {{1}})", ((3,), (3,)), 1.3, 1.7),
    ("jax.shard_map(lambda a, b: lax.psum(jnp.cos(a) @ b, 'i'), in_specs=(jax.P(None, 'i'),"
     f" jax.P('i')), out_specs=jax.P(), mesh={_MESH})({{0}}, {{1}})", ((2, 3), (3,)), 0.9, 2.7),
    ("jax.numpy.piecewise({0}, [{0} > 0.1131], [jnp.sin, 0.25])", ((3,),), 2.5, 1.0),
)  # fmt: skip


@functools.cache
def _shape(text: str, shapes: tuple[Shape, ...]) -> Shape:
    """Return the shape of a text's value."""
    names = [f"x{i}" for i in range(len(shapes))]
    source = f"def program({', '.join(names)}):\n    return {text.format(*names)}"
    return jax.eval_shape(function(source), *map(np.ones, shapes)).shape


def _one(w: Writer, table: tuple[tuple[str, tuple[Shape, ...], float, float], ...]) -> None:
    text, shapes, limit, most = w.choose(table)
    args = [w.bounded(w.pick("f", s), limit) for s in shapes]
    if any(op in text for op in ("max", "min", "sort", "top_k")):
        ramp = w.ramp(shapes[0])
        args[0] = w.emit("{0} + {1}", [args[0], ramp], shapes[0], "f", limit + ramp.most)
        most = args[0].most
    w.emit(text, args, _shape(text, shapes), "f", most)


def initial(w: Writer) -> None:
    """Write a reduction that starts from a value other than the identity."""
    _one(w, INITIAL)


def odd(w: Writer) -> None:
    """Write an operation with an unusual parameter."""
    _one(w, ODD)


FAMILY = ((initial, 1.5), (odd, 3.5))
