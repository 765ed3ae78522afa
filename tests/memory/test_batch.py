"""Which arguments have a batch, found by their sizes and by a trace."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xform
from tests.memory.test_capacity import f32
from xform.errors import WrongArgument
from xform.memory.batch import resizer_by_axis, resizer_by_inputs


def loss(params, x, y):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params["out"] - y) ** 2)


PARAMS = {"layers": [f32(16, 16)] * 2, "out": f32(16, 3)}


def shapes(f: Any, *args: Any, n: int, **options: Any) -> list[Any]:
    made = resizer_by_axis(f, args, options.get("argnums", "auto"), options.get("axis", 0))
    return [jax.tree.map(lambda x: x.shape, x) for x in made.make_arguments(n)]


def test_inputs_and_targets() -> None:
    for f in (loss, jax.jit(loss)):
        assert shapes(f, PARAMS, f32(8, 16), f32(8, 3), n=5)[1:] == [(5, 16), (5, 3)]
    # One example: targets alone could be broadcast.
    assert shapes(loss, PARAMS, f32(1, 16), f32(1, 3), n=5)[1:] == [(5, 16), (5, 3)]
    made = resizer_by_axis(loss, (PARAMS, f32(8, 16), f32(8, 3)), "auto", 0)
    assert (made.start_size, made.description) == (8, "axis 0 of x, y")


def test_weights_that_are_as_large_as_the_batch_are_left() -> None:
    f = lambda w, x: jnp.sum(x @ w)
    assert shapes(f, f32(8, 8), f32(8, 8), n=3) == [(8, 8), (3, 8)]


def test_strings_and_scalars_have_no_batch_axis() -> None:
    f = lambda mode, x, k: x * k if mode == "train" else x
    made = resizer_by_axis(f, ("train", f32(4, 2), 3.0), "auto", 0)
    assert made.description == "axis 0 of x"
    assert [getattr(x, "shape", x) for x in made.make_arguments(7)] == ["train", (7, 2), 3.0]


def test_another_axis() -> None:
    f = lambda x, y: jnp.sum(x * y)
    assert shapes(f, f32(2, 8), f32(3, 1, 8), n=4, axis=-1) == [(2, 4), (3, 1, 4)]


def test_failed_batch_search_names_the_size_and_the_batch_argnums_option() -> None:
    fixed = lambda x: jnp.sum(x * jnp.ones((8, 2)))
    with pytest.raises(WrongArgument) as caught:
        resizer_by_axis(fixed, (f32(8, 2),), "auto", 0)
    assert "with size 16 instead of 8 on axis 0 of x" in caught.value.problem
    assert "--batch-argnums 1,2" in caught.value.remedy


def test_inputs_make_them() -> None:
    inputs = lambda batch: (PARAMS, f32(batch, 16), f32(batch, 3))
    assert resizer_by_inputs(inputs).make_arguments(3)[1].shape == (3, 16)
    found = xform.memory.max_batch(loss, inputs=inputs, target="cpu", capacity="64 KiB")
    axes = xform.memory.max_batch(loss, *inputs(8), target="cpu", capacity="64 KiB")
    assert found.size == axes.size
    assert "(by inputs(batch=n))" in str(found)
    assert "(axis 0 of x, y)" in str(axes)
    with pytest.raises(WrongArgument, match="inputs=3"):
        xform.memory.max_batch(loss, inputs=3, target="cpu")  # type: ignore[arg-type]
