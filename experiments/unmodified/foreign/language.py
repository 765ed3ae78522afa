"""Language models: transformers and recurrent networks over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

from experiments.unmodified import programs
from experiments.unmodified.foreign.parts import (
    Made,
    Program,
    classified,
    cross_entropy,
    of_equinox,
    of_nnx,
)
from experiments.unmodified.programs import KEY, tokens
from experiments.unmodified.sources import definitions, module, package

SMALL = {"emb_dim": 128, "qkv_dim": 128, "mlp_dim": 512, "num_heads": 4, "num_layers": 3}


def translation(folder: Path) -> Made:
    """Flax's translator: an encoder and a decoder of three layers."""
    here = folder / "flax/examples/wmt"
    models = module(here / "models.py")
    train = definitions(here / "train.py", "compute_weighted_cross_entropy")
    config = models.TransformerConfig(vocab_size=4096, output_vocab_size=4096, max_len=128, **SMALL)
    model, source, target = models.Transformer(config), tokens(16, 64, 4096), tokens(16, 64, 4095)

    def loss(params: Any, source: jax.Array, target: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, source, target, rngs={"dropout": key})
        weights = jnp.where(target > 0, 1, 0).astype(jnp.float32)
        total, count = train.compute_weighted_cross_entropy(logits, target, weights, 0.1)
        return total / count

    params = model.init({"params": KEY, "dropout": KEY}, source, target)["params"]
    return loss, (linen.unbox(params), source, target, KEY)


def addition(folder: Path) -> Made:
    """Flax's LSTM that reads a sum and writes the answer, one character at a time."""
    here = folder / "flax/examples/seq2seq"
    models = module(here / "models.py")
    train = definitions(here / "train.py", "cross_entropy_loss")
    train.cross_entropy_loss.__globals__["mask_sequences"] = definitions(
        here / "input_pipeline.py", "mask_sequences"
    ).mask_sequences
    model = models.Seq2seq(teacher_force=True, hidden_size=256, vocab_size=15)
    query, answer = (jax.nn.one_hot(tokens(256, n, 15), 15) for n in (16, 12))

    def loss(params: Any, query: jax.Array, answer: jax.Array, key: jax.Array) -> jax.Array:
        logits, _ = model.apply({"params": params}, query, answer, rngs={"lstm": key})
        lengths = jnp.full(len(query), logits.shape[1])
        return train.cross_entropy_loss(logits, answer[:, 1:], lengths)

    params = model.init({"params": KEY, "lstm": KEY}, query, answer)["params"]
    return loss, (params, query, answer, KEY)


def sentiment(folder: Path) -> Made:
    """Flax's classifier of sentences: an LSTM in both directions, then attention."""
    here = folder / "flax/examples/sst2"
    models = module(here / "models.py")
    train = definitions(here / "train.py", "sigmoid_cross_entropy_with_logits")
    model = models.TextClassifier(embedding_size=300, hidden_size=256, vocab_size=4096,
                                  output_size=1, dropout_rate=0.5, word_dropout_rate=0.1,
                                  deterministic=False)  # fmt: skip
    words, lengths = tokens(64, 32, 4096), tokens(64, 1, 32)[:, 0]

    def loss(params: Any, words: jax.Array, lengths: jax.Array, key: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, words, lengths, rngs={"dropout": key})
        targets = (words[:, :1] % 2).astype(jnp.float32)
        return train.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits).mean()

    params = model.init({"params": KEY, "dropout": KEY}, words, lengths)["params"]
    return loss, (params, words, lengths, KEY)


def gpt(folder: Path) -> Made:
    """A GPT-2 in Linen: four layers of width 128, with dropout."""
    models = module(folder / "gpt-jax/model.py")
    config = models.GPTConfig(block_size=128, vocab_size=4096, num_layers=4, num_heads=4,
                              num_embeds=128, dtype="float32")  # fmt: skip
    model, words = models.GPT(config), tokens(8, 129, 4096)
    apply = lambda params, x, key: model.apply(params, x, False, rngs={"dropout": key})
    return classified(apply, model.init(KEY), words[:, :-1], words[:, 1:], KEY)


def nano_lm(folder: Path) -> Made:
    """The transformer of characters of Optax's notebook, at its size, with 32 texts."""
    book = definitions(folder / "optax/examples/nanolm.ipynb", "NanoLM")
    model, words = book.NanoLM(vocab_size=65), tokens(32, 65, 65)
    apply = lambda params, x, key: model.apply(params, x, training=True, rngs={"dropout": key})
    params = model.init(KEY, words[:, :-1], training=False)
    return classified(apply, params, words[:, :-1], words[:, 1:], KEY)


def palm(folder: Path) -> Made:
    """PaLM in Equinox: attention and feed-forward side by side, four layers of width 128."""
    models = package(folder / "PaLM-jax", "palm_jax.palm_lite")
    model = models.PaLM(num_tokens=4096, dim=128, depth=4, heads=4, dim_head=32, max_seq_len=128,
                        key=jax.random.PRNGKey(0))  # fmt: skip
    params, whole = of_equinox(model)
    words = tokens(8, 129, 4096)
    apply = lambda params, x: jax.vmap(whole(params))(x)
    return classified(apply, params, words[:, :-1], words[:, 1:])


def progen(folder: Path) -> Made:
    """ProGen in Haiku: local attention, gated layers, and their own loss of a sequence."""
    models = package(folder / "progen", "progen_transformer.progen")
    losses = package(folder / "progen", "progen_transformer.utils")
    model = models.ProGen(num_tokens=256, dim=128, seq_len=256, window_size=64, depth=4, heads=4,
                          dim_head=32)  # fmt: skip
    words = tokens(8, 257, 256)

    def loss(params: Any, words: jax.Array, key: jax.Array) -> jax.Array:
        one = lambda words: losses.cross_entropy(model.apply(params, key, words[:-1]), words[1:])
        return jax.vmap(one)(words).mean()

    return loss, (model.init(KEY, words[0, :-1]), words, KEY)


def penzai(folder: Path) -> Made:
    """A Llama of Penzai's, whose axes have names: four layers of width 128."""
    pz = package(folder / "penzai", "penzai.pz")
    models = package(folder / "penzai", "penzai.models.transformer.variants.llamalike_common")
    config = models.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=128, projection_dim=32,
        mlp_hidden_dim=384, num_decoder_blocks=4, vocab_size=4096, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip
    model = models.build_llamalike_transformer(config, init_base_rng=KEY)
    rest, params = pz.unbind_params(model, freeze=True)
    words = tokens(8, 129, 4096)

    def apply(params: Any, words: jax.Array) -> jax.Array:
        named = pz.nx.wrap(words).tag("batch", "seq")
        places = pz.nx.arange("seq", words.shape[1])
        logits = pz.bind_variables(rest, params)(named, token_positions=places)
        return logits.unwrap("batch", "seq", "vocabulary")

    return classified(apply, params, words[:, :-1], words[:, 1:])


def umt5(folder: Path) -> Made:
    """Bonsai's UMT5: an encoder and a decoder with relative positions."""
    modeling = module(folder / "bonsai/bonsai/models/umt5/modeling.py")
    config = modeling.ModelConfig(vocab_size=4096, d_model=128, d_kv=32, d_ff=256, num_layers=3,
                                  num_heads=4)  # fmt: skip
    params, whole = of_nnx(modeling.UMT5Model(config, rngs=nnx.Rngs(0)))
    source, target = tokens(8, 64, 4096), tokens(8, 65, 4096)

    def loss(params: Any, source: jax.Array, target: jax.Array) -> jax.Array:
        model = whole(params)
        hidden = model(input_ids=source, decoder_input_ids=target[:, :-1])
        return cross_entropy(model.lm_head(hidden), target[:, 1:])

    return loss, (params, source, target)


PROGRAMS = {
    "Flax lm1b": Program("google/flax", "examples/lm1b", programs.lm1b),
    "Flax gemma": Program("google/flax", "examples/gemma", programs.gemma),
    "Flax wmt": Program("google/flax", "examples/wmt", translation),
    "Flax seq2seq": Program("google/flax", "examples/seq2seq", addition),
    "Flax sst2": Program("google/flax", "examples/sst2", sentiment),
    "Haiku transformer": Program("google-deepmind/dm-haiku", "examples/transformer",
                                 programs.haiku),
    "Equinox BERT": Program("patrick-kidger/equinox", "docs/examples/bert.ipynb", programs.bert),
    "GPT-2": Program("jenkspt/gpt-jax", "model.py", gpt),
    "Optax nanolm": Program("google-deepmind/optax", "examples/nanolm.ipynb", nano_lm),
    "PaLM": Program("lucidrains/PaLM-jax", "palm_jax/palm_lite.py", palm),
    "ProGen": Program("lucidrains/progen", "progen_transformer", progen),
    "Penzai Llama": Program("google-deepmind/penzai", "penzai/models/transformer", penzai),
    "Bonsai UMT5": Program("jax-ml/bonsai", "bonsai/models/umt5", umt5),
}  # fmt: skip
