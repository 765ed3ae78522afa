"""GPT-2, Llama and Mixtral: what holds of each, whatever the weights."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from models.nets.presets import abstract
from tests.models.nets.sizes import DECODERS, SIZES, drawn, tokens

# What holds of GPT-2 and Mixtral holds of Llama, unless its perceptron is wrong.
LLAMA = pytest.param("llama", marks=pytest.mark.slow)
each = pytest.mark.parametrize("kind", ["gpt2", "mixtral", LLAMA])


@functools.cache
def model(kind: str, **changes: Any) -> Any:
    return drawn(dataclasses.replace(DECODERS[kind], **changes))


@functools.cache
def reader(kind: str) -> Any:
    """Tokens and options to logits, compiled."""
    graphdef, params = nnx.split(model(kind))
    run = jax.jit(lambda params, *args, **options: nnx.merge(graphdef, params)(*args, **options))
    return functools.partial(run, params)


@each
def test_a_later_token_changes_no_earlier_logit(kind: str) -> None:
    before = tokens()
    after = before.at[:, 9].set((before[:, 9] + 1) % SIZES["vocab"])
    one, other = (np.asarray(reader(kind)(x)) for x in (before, after))
    assert one.shape == (2, 17, SIZES["vocab"])
    assert one.dtype == np.float32
    changed = np.any(one != other, axis=(0, 2))
    assert not changed[:9].any()
    assert changed[9:].all()


@each
def test_with_a_cache_logits_are_the_same(kind: str) -> None:
    """Prompts of two lengths, padded; then three tokens at once, then one by one."""
    graphdef, params = nnx.split(model(kind))

    @jax.jit
    def extend(params: Any, x: jax.Array, cache: Any) -> Any:
        return nnx.merge(graphdef, params).extend(x, cache)

    ids, lengths = tokens(), np.array([9, 6])
    whole = reader(kind)(ids)
    logits, cache = extend(params, ids[:, :9], model(kind).cache(2, SIZES["context"]))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], whole[row, :length], rtol=1e-4, atol=1e-5)
    cache = dataclasses.replace(cache, lengths=jnp.asarray(lengths))
    for size in (3, 1, 1):
        few = jnp.stack([ids[row, at : at + size] for row, at in enumerate(lengths)])
        logits, cache = extend(params, few, cache)
        for row, at in enumerate(lengths):
            expected = whole[row, at : at + size]
            np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5)
        lengths = lengths + size
    np.testing.assert_array_equal(cache.lengths, lengths)


@each
def test_packed_documents_are_read_as_if_alone(kind: str) -> None:
    ids = tokens(1)
    segments = jnp.asarray([[0] * 7 + [1] * 10])
    positions = jnp.concatenate([jnp.arange(7), jnp.arange(10)])[None]
    packed = reader(kind)(ids, segments=segments, positions=positions)
    np.testing.assert_allclose(packed[:, :7], reader(kind)(ids)[:, :7], rtol=1e-4, atol=1e-5)
    alone = reader(kind)(jnp.pad(ids[:, 7:], [(0, 0), (0, 7)]))[:, :10]
    np.testing.assert_allclose(packed[:, 7:], alone, rtol=1e-4, atol=1e-5)


def gradient(kind: str, transform: Any, **changes: Any) -> Any:
    """Loss and gradient, by parameters."""
    graphdef, params = nnx.split(drawn(dataclasses.replace(DECODERS[kind], **changes)))
    loss = lambda params: nnx.merge(graphdef, params).loss(tokens(), chunk=7, balance=0.1)
    return jax.jit(transform(loss))(params)


@each
def test_gradients_are_those_of_jax(kind: str) -> None:
    expected = gradient(kind, jax.value_and_grad)
    chex.assert_trees_all_close(
        gradient(kind, xform.value_and_grad), expected, rtol=1e-4, atol=1e-6
    )


def unrolled(kind: str) -> Any:
    """The same model with a module for each layer."""
    graphdef, state = nnx.split(abstract(dataclasses.replace(DECODERS[kind], scan_layers=False)))
    values = nnx.to_pure_dict(nnx.state(model(kind)))
    parts = values["layers"]["each"]
    each = [jax.tree.map(lambda x, i=i: x[i], parts) for i in range(SIZES["depth"])]
    values["layers"]["each"] = dict(enumerate(each))
    nnx.replace_by_pure_dict(state, values)
    return graphdef, state


def test_scanned_and_unrolled_are_the_same() -> None:
    graphdef, params = unrolled("gpt2")
    found = jax.jit(lambda params: nnx.merge(graphdef, params)(tokens()))(params)
    np.testing.assert_allclose(found, reader("gpt2")(tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_gradients_of_unrolled_and_run_again_layers_are_the_same(kind: str) -> None:
    expected = gradient(kind, jax.value_and_grad)
    again = gradient(kind, xform.value_and_grad, remat="save_nothing")
    chex.assert_trees_all_close(again, expected, rtol=1e-4, atol=1e-6)

    graphdef, params = unrolled(kind)
    loss = lambda params: nnx.merge(graphdef, params).loss(tokens(), chunk=7, balance=0.1)
    value, found = jax.jit(xform.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    found = nnx.to_pure_dict(found)
    each = [found["layers"]["each"][i] for i in range(SIZES["depth"])]
    found["layers"]["each"] = jax.tree.map(lambda *x: jnp.stack(x), *each)
    chex.assert_trees_all_close(found, nnx.to_pure_dict(expected[1]), rtol=1e-4, atol=1e-6)


def test_dropout_is_by_key() -> None:
    read = reader("gpt2")
    one, same, other = (read(tokens(), key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other, atol=1e-3)
    assert not np.allclose(one, read(tokens()), atol=1e-3)


def test_a_cache_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="5 tokens do not fit in a cache of 4"):
        model("gpt2").extend(tokens(length=5), model("gpt2").cache(2, 4))


def test_16_bits_compute_in_16_bits_and_keep_32_in_parameters_and_logits() -> None:
    other = abstract(dataclasses.replace(DECODERS["llama"], dtype="bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(other))} == {jnp.dtype("float32")}
    hidden, _, _ = nnx.eval_shape(lambda m: m.read(tokens()), other)
    assert hidden.dtype == jnp.bfloat16
    assert nnx.eval_shape(lambda m: m(tokens()), other).dtype == jnp.float32
