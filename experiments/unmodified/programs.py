"""Training losses of programs by other people: how to import each, and its arguments.

Each is `make(folder) -> (loss, (parameters, batch, key))` for a folder of checkouts. Models, losses
and, unless stated, sizes are theirs. Batches are random, and dropout is on if they have it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from experiments.unmodified.sources import definitions, module, package

Made = tuple[Callable[..., jax.Array], tuple[Any, Any, jax.Array]]
KEY = jax.random.key(0)


def tokens(batch: int, length: int, vocabulary: int) -> jax.Array:
    """Return random tokens without padding."""
    return jax.random.randint(jax.random.key(1), (batch, length), 1, vocabulary, jnp.int32)


def lm1b(folder: Path) -> Made:
    """Return Flax's language model in Linen, at half its width."""
    here = folder / "flax/examples/lm1b"
    models = module(here / "models.py")
    train = definitions(here / "train.py", "compute_weighted_cross_entropy")
    config = models.TransformerConfig(vocab_size=8192, output_vocab_size=8192, emb_dim=256,
                                      qkv_dim=256, mlp_dim=1024, max_len=256)  # fmt: skip
    model = models.TransformerLM(config)
    inputs = tokens(16, 256, 8192)

    def loss(params: Any, inputs: jax.Array, key: jax.Array) -> jax.Array:
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        logits = model.apply({"params": params}, inputs, rngs={"dropout": key})
        total, count = train.compute_weighted_cross_entropy(logits, inputs, weights, 0.0)
        return total / count

    params = linen.unbox(model.init({"params": KEY, "dropout": KEY}, inputs))["params"]
    return loss, (params, inputs, KEY)


def gemma(folder: Path) -> Made:
    """Return Flax's Gemma in NNX: configuration `tiny` with dropout, and a smaller vocabulary."""
    here = folder / "flax/examples/gemma"
    transformer = package(here, "transformer")
    cfg = package(here, "transformer_cfg")
    train = definitions(here / "train.py", "compute_weighted_cross_entropy")
    config = cfg.TransformerConfig(
        num_layers=4, num_embed=8192, embed_dim=256, hidden_dim=512, num_heads=4, head_dim=128,
        num_kv_heads=1, use_post_attn_norm=False, use_post_ffw_norm=False,
        attention_types=(cfg.AttentionType.GLOBAL,) * 4, final_logit_softcap=None,
        dropout_rate=0.1,
    )  # fmt: skip
    graph, params, rest = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)),
                                    nnx.Param, ...)  # fmt: skip
    inputs = tokens(16, 257, 8192)

    def loss(params: Any, inputs: jax.Array, key: jax.Array) -> jax.Array:
        inputs, targets = inputs[:, :-1], inputs[:, 1:]
        mask = inputs > 0
        logits, _ = nnx.merge(graph, params, rest)(
            inputs, positions=transformer.build_positions_from_mask(mask), cache=None,
            attention_mask=transformer.make_causal_attn_mask(mask), rngs=nnx.Rngs(dropout=key),
        )  # fmt: skip
        weights = mask.astype(jnp.float32)
        return train.compute_weighted_cross_entropy(logits, targets, weights, 0.0).mean()

    return loss, (params, inputs, KEY)


def vae(folder: Path) -> Made:
    """Return Flax's variational autoencoder, with a batch of 4096."""
    here = folder / "flax/examples/vae"
    model = module(here / "models.py").model(20)
    train = definitions(here / "train.py", "kl_divergence", "binary_cross_entropy_with_logits")
    images = jax.random.bernoulli(jax.random.key(1), 0.3, (4096, 784)).astype(jnp.float32)

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        made, mean, logvar = model.apply({"params": params}, images, key)
        error = train.binary_cross_entropy_with_logits(made, images).mean()
        return error + train.kl_divergence(mean, logvar).mean()

    return loss, (model.init(KEY, images, KEY)["params"], images, KEY)


def haiku(folder: Path) -> Made:
    """Return Haiku's character transformer and its loss: 16 texts of 256 instead of 2 of 64."""
    train = package(folder / "dm-haiku", "examples.transformer.train")
    both = tokens(16, 257, train.dataset.VOCAB_SIZE)
    batch = train.dataset.Batch(both[:, :-1], both[:, 1:])

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return train.loss_fn.apply(params, key, batch)

    return loss, (train.loss_fn.init(KEY, batch), batch, KEY)


def bert(folder: Path) -> Made:
    """Return the BERT of Equinox's notebook: six layers of width 256 instead of two of 128."""
    names = ("EmbedderBlock", "FeedForwardBlock", "AttentionBlock", "TransformerLayer", "Encoder",
             "BertClassifier", "compute_loss", "bert_config")  # fmt: skip
    book = definitions(folder / "equinox/docs/examples/bert.ipynb", *names)
    config = book.bert_config | {"num_hidden_layers": 6, "hidden_size": 256, "vocab_size": 8192,
                                 "intermediate_size": 1024, "num_attention_heads": 8}  # fmt: skip
    batch = {"token_ids": tokens(16, 256, 8192), "segment_ids": jnp.zeros((16, 256), jnp.int32),
             "label": tokens(16, 1, 2)[:, 0]}  # fmt: skip
    params, rest = equinox.partition(book.BertClassifier(config, 2, KEY), equinox.is_inexact_array)

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        return book.compute_loss.__wrapped__(equinox.combine(params, rest), batch, key)

    return loss, (params, batch, KEY)


def vit(folder: Path) -> Made:
    """Return Bonsai's vision transformer: six layers of width 256, 96 x 96 images, dropout."""
    modeling = module(folder / "bonsai/bonsai/models/vit/modeling.py")
    config = modeling.ModelConfig(
        image_size=(96, 96), patch_size=(8, 8), num_channels=3, hidden_dim=256,
        attn_dropout_prob=0.1, dropout_prob=0.1, num_heads=8, mlp_dim=1024, eps=1e-12,
        num_layers=6, num_labels=1000,
    )  # fmt: skip
    model = modeling.ViTClassificationModel(config, rngs=nnx.Rngs(0))
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    batch = jax.random.normal(jax.random.key(1), (16, 96, 96, 3)), tokens(16, 1, 1000)[:, 0]

    def loss(params: Any, batch: Any, key: jax.Array) -> jax.Array:
        images, labels = batch
        logits = nnx.merge(graph, params, rest)(images, rngs=nnx.Rngs(dropout=key))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss, (params, batch, KEY)


PROGRAMS: dict[str, Callable[[Path], Made]] = {
    "Flax lm1b": lm1b,
    "Flax gemma": gemma,
    "Flax vae": vae,
    "Haiku transformer": haiku,
    "Equinox BERT": bert,
    "Bonsai ViT": vit,
}
