"""A row of packed documents has the logits, loss and gradient of the separate documents."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xform
from models.nets.segments import unpacked
from tests.models.nets.sizes import DECODERS, SIZES, drawn

LENGTHS = [5, 1, 8, 3]  # of documents in a row of 17 tokens, of which 16 are read


def packed() -> tuple[jax.Array, jax.Array]:
    ids = jax.random.randint(jax.random.key(1), (1, sum(LENGTHS)), 0, SIZES["vocab"])
    starts = np.cumsum([0, *LENGTHS])[1:-1]
    return ids, ids.at[:, starts].set(~ids[:, starts])


def test_positions_and_weights() -> None:
    ids, marked = packed()
    tokens, options = unpacked(marked)
    np.testing.assert_array_equal(tokens, ids)
    assert options["positions"].tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1]]
    assert options["segments"].tolist() == [[0] * 5 + [1] + [2] * 8 + [3] * 2]
    assert options["weights"].tolist() == [[1] * 4 + [0] + [0] + [1] * 7 + [0] + [1, 1]]
    _, alone = unpacked(jnp.zeros((2, 6), jnp.int32))
    assert alone["positions"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert alone["weights"].all()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_documents_are_read_and_judged_as_if_alone(kind: str) -> None:
    graphdef, params = nnx.split(drawn(DECODERS[kind]))
    ids, marked = packed()
    alone = jnp.split(ids[0], np.cumsum(LENGTHS)[:-1])

    def logits(params: Any, tokens: jax.Array, **options: Any) -> jax.Array:
        return nnx.merge(graphdef, params)(tokens, **options)

    def loss(params: Any) -> jax.Array:
        tokens, options = unpacked(marked)
        return nnx.merge(graphdef, params).loss(tokens, **options)

    def expected(params: Any) -> jax.Array:
        """Compute it from the logits of each document, without chunks or segments."""
        total, count = jnp.zeros(()), 0
        for document in alone:
            scores = jax.nn.log_softmax(logits(params, document[None, :-1])[0])
            total -= jnp.take_along_axis(scores, document[1:, None], axis=-1).sum()
            count += len(document) - 1
        return total / count

    options = {k: v for k, v in unpacked(marked)[1].items() if k != "weights"}
    row = jax.jit(logits)(params, ids[:, :-1], **options)[0]
    separate = [jax.jit(logits)(params, document[None])[0] for document in alone]
    np.testing.assert_allclose(row, jnp.concatenate(separate)[:-1], rtol=1e-4, atol=1e-5)
    found = jax.jit(xform.value_and_grad(loss))(params)
    reference = jax.jit(jax.value_and_grad(lambda p: expected(p)))(params)
    chex.assert_trees_all_close(found, reference, rtol=1e-4, atol=1e-5)
