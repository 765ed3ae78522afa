"""The decoder: sizes, positions, heads, causality, layouts, and gradients at every policy."""

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
from models.nets.config import PRESETS, TransformerConfig
from models.nets.policies import POLICIES
from models.nets.stack import stack_blocks, unstack_blocks
from models.nets.transformer import (
    Attention,
    Transformer,
    abstract_transformer,
    next_token_loss,
    parameter_count,
    rotary_angles,
    rotate,
)
from tests.parameters import slow

MICRO = TransformerConfig(context=16, width=32, depth=2, heads=4, kv_heads=2, hidden=48)
VARIANTS = {
    "base": MICRO,
    "gelu, untied, one kv head": dataclasses.replace(MICRO, swiglu=False, tied=False, kv_heads=1),
    "bf16, all kv heads": dataclasses.replace(MICRO, dtype="bf16", kv_heads=4),
}


@functools.cache
def initial(config: TransformerConfig) -> nnx.State:
    return nnx.state(Transformer(config, rngs=nnx.Rngs(0)))


def build(config: TransformerConfig) -> Transformer:
    """The model, with values that are drawn once for all policies."""
    graphdef, _ = nnx.split(abstract_transformer(config))
    return nnx.merge(graphdef, initial(dataclasses.replace(config, block_policy=None)), copy=True)


def tokens(config: TransformerConfig, batch: int = 2, extra: int = 1) -> jax.Array:
    shape = (batch, config.context + extra)
    return jax.random.randint(jax.random.key(1), shape, 0, config.vocab)


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("tinyllama-1.1b", 1_100_048_384),
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
    ],
)
def test_published_parameter_counts(preset: str, count: int) -> None:
    assert parameter_count(abstract_transformer(PRESETS[preset])) == count


def test_gpt2_is_short_of_the_published_count_by_what_it_leaves_out() -> None:
    config = PRESETS["gpt2-124m"]
    learned_positions = config.context * config.width
    biases = config.depth * (3 * config.width + config.width + config.hidden + config.width)
    norm_biases = (2 * config.depth + 1) * config.width
    ours = parameter_count(abstract_transformer(config))
    assert ours + learned_positions + biases + norm_biases == 124_439_808


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_map_tokens_to_logits_as_shapes(preset: str) -> None:
    config = PRESETS[preset]
    model = abstract_transformer(config)
    chex.assert_type(jax.tree.leaves(nnx.state(model)), jnp.float32)
    logits = nnx.eval_shape(lambda m, t: m(t), model, tokens(config, extra=0))
    assert logits.shape == (2, config.context, config.vocab)
    assert logits.dtype == jnp.float32


@functools.cache
def gradient_of(
    config: TransformerConfig, transform: Any = xform.flax.value_and_grad, jitted: bool = True
) -> tuple[jax.Array, nnx.State]:
    """Loss and gradient of a model whose initial values depend on its sizes alone."""
    graphdef, params = nnx.split(build(config))

    def run(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        return transform(next_token_loss)(nnx.merge(graphdef, params), tokens(config))

    return (jax.jit(run) if jitted else run)(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_scanned_equals_unrolled(name: str) -> None:
    one, grads = gradient_of(VARIANTS[name])
    other, unrolled_grads = gradient_of(dataclasses.replace(VARIANTS[name], scan=False))

    tolerance = 2e-2 if VARIANTS[name].dtype == "bf16" else 1e-5
    np.testing.assert_allclose(one, other, rtol=tolerance)
    blocks = [unrolled_grads["stack"]["blocks"][i] for i in range(MICRO.depth)]
    chex.assert_trees_all_close(
        grads["stack"]["blocks"], stack_blocks(blocks), rtol=tolerance, atol=tolerance / 10
    )


def test_layouts_share_initial_values_and_convert() -> None:
    stacked = nnx.state(build(MICRO).stack.blocks)
    modules = build(dataclasses.replace(MICRO, scan=False)).stack.blocks
    separate = [nnx.state(module) for module in modules]
    chex.assert_trees_all_equal(stack_blocks(separate), stacked)
    chex.assert_trees_all_equal(unstack_blocks(stacked, MICRO.depth), separate)


@pytest.mark.parametrize("name", VARIANTS)
def test_positions_read_only_what_stands_before(name: str) -> None:
    model = nnx.jit(build(VARIANTS[name]))
    before = tokens(MICRO, extra=0)
    after = before.at[:, 9].set((before[:, 9] + 1) % MICRO.vocab)
    changed = np.any(np.asarray(model(before)) != np.asarray(model(after)), axis=(0, 2))
    assert not changed[:9].any()
    assert changed[9:].all()


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped = Attention(MICRO, rngs=nnx.Rngs(0))
    full = Attention(dataclasses.replace(MICRO, kv_heads=4), rngs=nnx.Rngs(0))
    shape = (MICRO.width, MICRO.kv_heads, MICRO.head_width)
    for name in ("query", "out"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("key", "value"):
        kernel = getattr(grouped, name).kernel[...].reshape(shape)
        repeated = jnp.repeat(kernel, MICRO.heads // MICRO.kv_heads, axis=1)
        getattr(full, name).kernel[...] = repeated.reshape(MICRO.width, MICRO.width)
    x = jax.random.normal(jax.random.key(2), (2, MICRO.context, MICRO.width))
    angles = rotary_angles(MICRO.context, MICRO.head_width, MICRO.rope_base)
    np.testing.assert_allclose(grouped(x, angles), full(x, angles), rtol=1e-5, atol=1e-6)


def test_rotary_positions_are_relative_and_keep_length() -> None:
    query, key = jax.random.normal(jax.random.key(3), (2, 1, 1, 1, 8))
    angles = rotary_angles(32, 8, 10_000.0)
    queries = rotate(jnp.broadcast_to(query, (1, 32, 1, 8)), angles)[0, :, 0]
    keys = rotate(jnp.broadcast_to(key, (1, 32, 1, 8)), angles)[0, :, 0]
    scores = queries @ keys.T
    for offset in (0, 1, 7):
        diagonal = jnp.diagonal(scores, offset)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    lengths = jnp.linalg.norm(queries, axis=-1)
    np.testing.assert_allclose(lengths, jnp.linalg.norm(query), rtol=1e-5)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    assert abs(next_token_loss(build(MICRO), tokens(MICRO)) - np.log(MICRO.vocab)) < 0.2


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("policy", slow([None, *POLICIES], *list(POLICIES)[1:]))
def test_gradients_at_every_policy_are_those_of_jax(policy: str | None, scan: bool) -> None:
    config = dataclasses.replace(MICRO, scan=scan)
    expected = gradient_of(config, nnx.value_and_grad)
    actual = gradient_of(dataclasses.replace(config, block_policy=policy))
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", slow([None, "save_dots"], "save_dots"))
def test_gradients_without_jit_are_those_of_jax(policy: str | None) -> None:
    actual = gradient_of(dataclasses.replace(MICRO, block_policy=policy), jitted=False)
    expected = gradient_of(MICRO, nnx.value_and_grad)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_marked_blocks_work_under_jax() -> None:
    actual = gradient_of(dataclasses.replace(MICRO, block_policy="save_names"), nnx.value_and_grad)
    expected = gradient_of(MICRO, nnx.value_and_grad)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ({"kv_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({"width": 36}, "not an even multiple"),
        ({"depth": 0}, "at least 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(MICRO, **sizes)
