"""State-space models, differential equations, and other networks over time."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.unmodified.foreign.parts import (
    Made,
    Program,
    classified,
    cross_entropy,
    labels,
    normal,
    of_equinox,
    of_nnx,
)
from experiments.unmodified.programs import KEY, tokens
from experiments.unmodified.sources import definitions, module, package


def structured(folder: Path) -> Made:
    """The annotated S4: two layers of state 16, over 256 steps, by Fourier transforms."""
    s4 = package(folder / "annotated-s4", "s4.s4")
    model = s4.StackedModel(layer_cls=s4.S4Layer, layer={"N": 16, "l_max": 256}, d_output=10,
                            d_model=32, n_layers=2, dropout=0.1,
                            classification=True)  # fmt: skip
    sequences = normal(8, 256, 1)
    params = model.init({"params": KEY, "dropout": KEY}, sequences[0])["params"]

    def apply(params: Any, sequences: jax.Array, key: jax.Array) -> jax.Array:
        one = lambda x, key: model.apply({"params": params}, x, rngs={"dropout": key})
        return jax.vmap(one)(sequences, jax.random.split(key, len(sequences)))

    return classified(apply, params, sequences, labels(8, 10), KEY)


def linear_recurrent(folder: Path) -> Made:
    """Linear recurrent units: two layers of complex states, by an associative scan."""
    lru = module(folder / "minimal-LRU/lru/model.py")
    model = lru.ClassificationModel(lru=partial(lru.LRU, d_hidden=64, d_model=64), d_output=10,
                                    d_model=64, n_layers=2, norm="layer", dropout=0.1)  # fmt: skip
    sequences = normal(8, 256, 4)
    params = model.init({"params": KEY, "dropout": KEY}, sequences[0])

    def apply(params: Any, sequences: jax.Array, key: jax.Array) -> jax.Array:
        one = lambda x: model.apply(params, x, rngs={"dropout": key})
        return jax.vmap(one)(sequences)

    return classified(apply, params, sequences, labels(8, 10), KEY)


def unrolled_mamba(folder: Path) -> Made:
    """A minimal Mamba whose selective scan is a Python loop: two layers, 24 steps."""
    names = ("ModelArgs", "Mamba", "ResidualBlock", "MambaBlock", "RMSNorm")
    models = definitions(folder / "mamba-minimal-jax/model.py", *names)
    model = models.Mamba(models.ModelArgs(d_model=64, n_layer=2, vocab_size=1024))
    words = tokens(4, 25, 1024)
    params = model.init(KEY, words[:, :-1])
    return classified(model.apply, params, words[:, :-1], words[:, 1:])


def mamba2(folder: Path) -> Made:
    """Bonsai's Mamba 2, whose scan is in chunks of 32: three layers."""
    modeling = module(folder / "bonsai/bonsai/models/mamba2/modeling.py")
    config = modeling.ModelConfig(vocab_size=1024, hidden_size=64, state_size=16, head_dim=16,
                                  chunk_size=32, num_hidden_layers=3)  # fmt: skip
    params, whole = of_nnx(modeling.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)))
    words = tokens(4, 128, 1024)
    return lambda params, words: whole(params)(words, words)["loss"], (params, words)


def griffin(folder: Path) -> Made:
    """Griffin: two blocks of linear recurrences and one of local attention, not checkpointed."""
    griffin = package(folder / "recurrentgemma", "recurrentgemma.jax.griffin",
                      "recurrentgemma.jax")  # fmt: skip
    common = package(folder / "recurrentgemma", "recurrentgemma.common")
    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=1024, width=128, mlp_expanded_width=384, num_heads=2, lru_width=128,
        block_types=(kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION),
        embeddings_scale_by_sqrt_dim=True, attention_window_size=64, logits_soft_cap=30.0,
        scan_type=common.ScanType.ASSOCIATIVE_NATIVE,
    )  # fmt: skip
    model = griffin.Griffin(config, gradient_checkpointing=False)
    words, places = tokens(4, 129, 1024), jnp.tile(jnp.arange(128), (4, 1))

    def loss(params: Any, words: jax.Array, places: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, words[:, :-1], places)[0], words[:, 1:])

    return loss, (model.init(KEY, words[:, :-1], places), words, places)


def neural_ode(folder: Path) -> Made:
    """A neural differential equation of Diffrax's notebook, at its size, 32 paths."""
    package(folder / "diffrax", "diffrax")
    book = definitions(folder / "diffrax/docs/examples/neural_ode.ipynb", "Func", "NeuralODE")
    params, whole = of_equinox(book.NeuralODE(2, 64, 2, key=KEY))
    times, paths = jnp.linspace(0, 1, 10), normal(32, 10, 2)

    def loss(params: Any, times: jax.Array, paths: jax.Array) -> jax.Array:
        made = jax.vmap(whole(params), in_axes=(None, 0))(times, paths[:, 0])
        return jnp.mean((paths - made) ** 2)

    return loss, (params, times, paths)


def neural_cde(folder: Path) -> Made:
    """A neural controlled differential equation of Diffrax's notebook, at its size."""
    diffrax = package(folder / "diffrax", "diffrax")
    book = definitions(folder / "diffrax/docs/examples/neural_cde.ipynb", "Func", "NeuralCDE")
    params, whole = of_equinox(book.NeuralCDE(3, 8, 128, 1, key=KEY))
    times = jnp.tile(jnp.linspace(0, 4, 50), (32, 1))
    paths = jnp.concatenate([times[:, :, None], normal(32, 50, 2)], -1)
    control = jax.vmap(diffrax.backward_hermite_coefficients)(times, paths)
    targets = labels(32, 2).astype(jnp.float32)

    def loss(params: Any, times: jax.Array, control: Any, targets: jax.Array) -> jax.Array:
        chance = jax.vmap(whole(params))(times, control)
        return -jnp.mean(targets * jnp.log(chance) + (1 - targets) * jnp.log(1 - chance))

    return loss, (params, times, control, targets)


def latent_ode(folder: Path) -> Made:
    """Diffrax's latent differential equation: an unrolled GRU, then a solver."""
    package(folder / "diffrax", "diffrax")
    book = definitions(folder / "diffrax/docs/examples/latent_ode.ipynb", "Func", "LatentODE")
    model = book.LatentODE(data_size=2, hidden_size=16, latent_size=16, width_size=32, depth=2,
                           key=KEY)  # fmt: skip
    params, whole = of_equinox(model)
    times, paths = jnp.tile(jnp.linspace(0, 3, 20), (32, 1)), normal(32, 20, 2)

    def loss(params: Any, times: jax.Array, paths: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(paths))
        one = lambda t, y, key: whole(params).train(t, y, key=key)
        return jax.vmap(one)(times, paths, keys).mean()

    return loss, (params, times, paths, KEY)


PROGRAMS = {
    "S4": Program("srush/annotated-s4", "s4/s4.py", structured),
    "LRU": Program("NicolasZucchet/minimal-LRU", "lru/model.py", linear_recurrent),
    "Mamba, unrolled": Program("radarFudan/mamba-minimal-jax", "model.py", unrolled_mamba),
    "Bonsai Mamba 2": Program("jax-ml/bonsai", "bonsai/models/mamba2", mamba2),
    "Griffin": Program("google-deepmind/recurrentgemma", "recurrentgemma/jax", griffin),
    "neural ODE": Program("patrick-kidger/diffrax", "docs/examples/neural_ode.ipynb", neural_ode),
    "neural CDE": Program("patrick-kidger/diffrax", "docs/examples/neural_cde.ipynb", neural_cde),
    "latent ODE": Program("patrick-kidger/diffrax", "docs/examples/latent_ode.ipynb", latent_ode),
}
