"""Generated tokens are the model's likeliest ones, whatever is cached and batched."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.nets.generate import Draw, generate
from tests.models.nets.sizes import DECODERS, SIZES, drawn

PROMPTS = [np.array([3, 1, 4, 1, 5]), np.array([9, 2])]


@functools.cache
def model(kind: str) -> Any:
    return drawn(DECODERS[kind])


def by_hand(kind: str, prompt: np.ndarray, length: int) -> np.ndarray:
    """Return the likeliest token each time, by reading all tokens again."""
    graphdef, params = nnx.split(model(kind))
    read = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens))
    row = list(prompt)
    for _ in range(length):
        padded = np.pad(row, (0, SIZES["context"] - len(row)))
        row.append(int(np.argmax(read(padded[None])[0, len(row) - 1])))
    return np.array(row)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_prompts_of_several_lengths_go_on_as_each_alone(kind: str) -> None:
    found = generate(model(kind), PROMPTS, 9, Draw(temperature=0))
    for prompt, row in zip(PROMPTS, found, strict=True):
        np.testing.assert_array_equal(row, by_hand(kind, prompt, 9))


def test_a_draw_depends_on_prompt_row_and_seed_alone() -> None:
    one = generate(model("gpt2"), PROMPTS[:1], 9, Draw(), seed=1)[0]
    np.testing.assert_array_equal(one, generate(model("gpt2"), PROMPTS, 9, Draw(), seed=1)[0])
    both = generate(model("gpt2"), PROMPTS[:1] * 2, 9, Draw(), seed=1)
    np.testing.assert_array_equal(both[0], one)
    assert not np.array_equal(both[1], one)
    assert not np.array_equal(one, generate(model("gpt2"), PROMPTS[:1], 9, Draw(), seed=2)[0])


def test_more_than_the_context_is_written_by_reading_its_last_half() -> None:
    length = 2 * SIZES["context"]
    (row,) = generate(model("gpt2"), PROMPTS[:1], length, Draw(temperature=0))
    assert len(row) == 5 + length
    context, half = SIZES["context"], SIZES["context"] // 2
    np.testing.assert_array_equal(row[:context], by_hand("gpt2", PROMPTS[0], context - 5))
    later = by_hand("gpt2", row[context - half : context], half)
    np.testing.assert_array_equal(row[context - half : context + half], later)
    (cut,) = generate(model("gpt2"), [row[:40]], 3, Draw(temperature=0))
    assert len(cut) == 43


LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.05, 0.2, 0.25]]))
DRAWS = {
    "all": (Draw(), {0, 1, 2, 3, 4}),
    "the best": (Draw(temperature=0), {1}),
    "two best": (Draw(top_k=2), {1, 4}),
    "more than there are": (Draw(top_k=9), {0, 1, 2, 3, 4}),
    "0.6 of probability": (Draw(top_p=0.6), {1, 4}),
    "next to none": (Draw(top_p=1e-6), {1}),
    "both": (Draw(top_k=3, top_p=0.9), {1, 3, 4}),
    "first tokens": (Draw(vocab=3), {0, 1, 2}),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_of_the_likeliest_tokens_by_their_probabilities(name: str) -> None:
    draw, possible = DRAWS[name]
    keys = jax.random.split(jax.random.key(0), 4000)
    tokens = np.asarray(jax.jit(draw)(jnp.repeat(LOGITS, 4000, axis=0), keys))
    assert {*tokens.tolist()} == possible
    if draw.temperature == 1:
        shares = np.exp(LOGITS[0])[sorted(possible)]
        counts = np.bincount(tokens, minlength=5)[sorted(possible)] / 4000
        np.testing.assert_allclose(counts, shares / shares.sum(), atol=0.03)
