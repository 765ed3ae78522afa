"""Networks that see: classifiers, segmentation, restoration, and models that make pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.unmodified import programs
from experiments.unmodified.foreign.parts import (
    Made,
    Program,
    classified,
    labels,
    normal,
    of_equinox,
    of_nnx,
)
from experiments.unmodified.programs import KEY
from experiments.unmodified.sources import definitions, module, package


def imagenet(folder: Path) -> Made:
    """Flax's ResNet18 on four images of 64 by 64, with its loss and weight decay."""
    here = folder / "flax/examples/imagenet"
    model = module(here / "models.py").ResNet18(num_classes=1000)
    train = definitions(here / "train.py", "cross_entropy_loss", "NUM_CLASSES")
    images = normal(4, 64, 64, 3)
    made = model.init(KEY, images, train=False)

    def loss(params: Any, images: jax.Array, targets: jax.Array, stats: Any) -> jax.Array:
        logits, _ = model.apply({"params": params, "batch_stats": stats}, images,
                                mutable=["batch_stats"])  # fmt: skip
        weights = [w for w in jax.tree.leaves(params) if w.ndim > 1]
        decay = 0.0001 * 0.5 * sum(jnp.sum(w**2) for w in weights)
        return train.cross_entropy_loss(logits, targets) + decay

    over_batch = lambda *args: jax.vmap(lambda _: loss(*args), axis_name="batch")(jnp.zeros(1))[0]
    return over_batch, (made["params"], images, labels(4, 1000), made["batch_stats"])


def mnist(folder: Path) -> Made:
    """Flax's convolutional network in NNX, with batch normalization and dropout."""
    train = definitions(folder / "flax/examples/mnist/train.py", "CNN", "loss_fn")
    params, whole = of_nnx(train.CNN(nnx.Rngs(0)))

    def loss(params: Any, images: jax.Array, targets: jax.Array, key: jax.Array) -> jax.Array:
        batch = {"image": images, "label": targets}
        return train.loss_fn(whole(params), batch, nnx.Rngs(dropout=key))[0]

    return loss, (params, normal(128, 28, 28, 1), labels(128, 10), KEY)


def convnext(folder: Path) -> Made:
    """Bonsai's ConvNeXt in three small stages, with stochastic depth."""
    modeling = module(folder / "bonsai/bonsai/models/convnext/modeling.py")
    config = modeling.ModelConfig(stage_depths=(2, 2, 2), stage_dims=(32, 64, 128),
                                  drop_path_rate=0.1, num_classes=100)  # fmt: skip
    params, whole = of_nnx(modeling.ConvNeXt(config, rngs=nnx.Rngs(0)))
    apply = lambda params, x, key: whole(params)(x, rngs=key, train=True)
    return classified(apply, params, normal(8, 64, 64, 3), labels(8, 100), KEY)


def densenet(folder: Path) -> Made:
    """Bonsai's DenseNet, with three blocks of four layers."""
    modeling = module(folder / "bonsai/bonsai/models/densenet121/modeling.py")
    config = modeling.ModelConfig(num_classes=100, dense_block_layers=[4, 4, 4], growth_rate=16)
    params, whole = of_nnx(modeling.DenseNet(config, rngs=nnx.Rngs(0)))
    apply = lambda params, x: whole(params)(x)
    return classified(apply, params, normal(8, 64, 64, 3), labels(8, 100))


def unet(folder: Path) -> Made:
    """Bonsai's U-Net, at a quarter of its width, on two images of 64 by 64."""
    modeling = module(folder / "bonsai/bonsai/models/unet/modeling.py")
    config = modeling.ModelConfig(in_channels=3, features=(16, 32, 64, 128, 256))
    params, whole = of_nnx(modeling.UNet(config, rngs=nnx.Rngs(0)))
    targets = labels(2 * 64 * 64, 2).reshape(2, 64, 64)
    return classified(lambda params, x: whole(params)(x), params, normal(2, 64, 64, 3), targets)


def mixer(folder: Path) -> Made:
    """The MLP-Mixer, in four blocks of width 128."""
    models = module(folder / "vision_transformer/vit_jax/models_mixer.py")
    patches = type("Patches", (), {"size": (8, 8)})
    model = models.MlpMixer(patches, num_classes=100, num_blocks=4, hidden_dim=128,
                            tokens_mlp_dim=64, channels_mlp_dim=512)  # fmt: skip
    images = normal(16, 64, 64, 3)
    apply = lambda params, x: model.apply(params, x, train=True)
    return classified(apply, model.init(KEY, images, train=True), images, labels(16, 100))


def nest(folder: Path) -> Made:
    """The nested transformer, with one layer in each of its four blocks."""
    models = package(folder / "nested-transformer", "models.nest_net", "models")
    config = models.ml_collections.ConfigDict()
    config.nest = {"num_layers_per_block": [1, 1, 1, 1], "embedding_dim": 96}
    model = models.create_model("nest_tiny_s16_32", config)(num_classes=10, train=True)
    images = normal(8, 32, 32, 3)
    apply = lambda params, x, key: model.apply(params, x, rngs={"dropout": key})
    params = model.init({"params": KEY, "dropout": KEY}, images)
    return classified(apply, params, images, labels(8, 10), KEY)


def maxim(folder: Path) -> Made:
    """MAXIM, which restores pictures by gated networks over blocks and grids: one stage."""
    models = module(folder / "maxim/maxim/models/maxim.py")
    model = models.MAXIM(features=16, depth=2, num_stages=1, block_size_hr=(8, 8),
                         grid_size_hr=(8, 8), high_res_stages=2)  # fmt: skip
    images, targets = normal(2, 64, 64, 3), normal(2, 64, 64, 3, seed=2)

    def loss(params: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
        made = model.apply(params, images, train=True)[-1][-1]
        return jnp.mean(jnp.sqrt((made - targets) ** 2 + 1e-6))

    return loss, (model.init(KEY, images), images, targets)


def diffusion(folder: Path) -> Made:
    """The score model of Equinox's notebook, with its loss, at its size."""
    names = ("MixerBlock", "Mixer2d", "single_loss_fn", "batch_loss_fn")
    book = definitions(folder / "equinox/docs/examples/score_based_diffusion.ipynb", *names)
    model = book.Mixer2d((1, 28, 28), 4, 64, 512, 512, 4, 10.0, key=KEY)
    params, whole = of_equinox(model)
    beta = lambda t: t
    weight = lambda t: 1 - jnp.exp(-beta(t))

    def loss(params: Any, images: jax.Array, key: jax.Array) -> jax.Array:
        return book.batch_loss_fn(whole(params), weight, beta, images, 10.0, key)

    return loss, (params, normal(64, 1, 28, 28), KEY)


def score_unet(folder: Path) -> Made:
    """The U-Net with attention of another of Equinox's notebooks, as a score model."""
    names = ("SinusoidalPosEmb", "LinearTimeSelfAttention", "upsample_2d", "downsample_2d",
             "exact_zip", "key_split_allowing_none", "Residual", "ResnetBlock", "UNet")  # fmt: skip
    book = definitions(folder / "equinox/docs/examples/unet.ipynb", *names)
    model = book.UNet(data_shape=(3, 32, 32), is_biggan=False, dim_mults=[1, 2], hidden_size=32,
                      heads=4, dim_head=16, dropout_rate=0.1, num_res_blocks=2,
                      attn_resolutions=[16], key=KEY)  # fmt: skip
    params, whole = of_equinox(model)

    def loss(params: Any, images: jax.Array, times: jax.Array, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, len(images))
        noise = jax.random.normal(key, images.shape)
        made = jax.vmap(lambda t, y, k: whole(params)(t, y, key=k))(times, images + noise, keys)
        return jnp.mean((made + noise) ** 2)

    return loss, (params, normal(4, 3, 32, 32), jnp.linspace(0.1, 0.9, 4), KEY)


def gan(folder: Path) -> Made:
    """The generator's loss of Equinox's convolutional GAN, on eight pictures."""
    book = definitions(folder / "equinox/docs/examples/deep_convolutional_gan.ipynb",
                       "Generator", "Discriminator")  # fmt: skip
    one, other = jax.random.split(KEY)
    generator = book.Generator(input_shape=100, output_shape=(32, 32, 1), key=one)
    judge = book.Discriminator(input_shape=(32, 32, 1), key=other)
    state = book.Generator.__init__.__globals__["eqx"].nn.State((generator, judge))
    params, whole = of_equinox(generator)

    def loss(params: Any, noise: jax.Array) -> jax.Array:
        def each(model: Any, x: jax.Array) -> jax.Array:
            both = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
            return both(x, state)[0]

        logits = each(judge, each(whole(params), noise))
        return jax.nn.softplus(-logits).mean()

    return loss, (params, normal(8, 100, 1, 1))


PROGRAMS = {
    "Flax imagenet": Program("google/flax", "examples/imagenet", imagenet),
    "Flax mnist": Program("google/flax", "examples/mnist/train.py", mnist),
    "Flax vae": Program("google/flax", "examples/vae", programs.vae),
    "Bonsai ViT": Program("jax-ml/bonsai", "bonsai/models/vit", programs.vit),
    "Bonsai ConvNeXt": Program("jax-ml/bonsai", "bonsai/models/convnext", convnext),
    "Bonsai DenseNet": Program("jax-ml/bonsai", "bonsai/models/densenet121", densenet),
    "Bonsai U-Net": Program("jax-ml/bonsai", "bonsai/models/unet", unet),
    "MLP-Mixer": Program("google-research/vision_transformer", "vit_jax/models_mixer.py", mixer),
    "NesT": Program("google-research/nested-transformer", "models/nest_net.py", nest),
    "MAXIM": Program("google-research/maxim", "maxim/models/maxim.py", maxim),
    "Equinox diffusion": Program("patrick-kidger/equinox",
                                 "docs/examples/score_based_diffusion.ipynb", diffusion),
    "Equinox U-Net": Program("patrick-kidger/equinox", "docs/examples/unet.ipynb", score_unet),
    "Equinox GAN": Program("patrick-kidger/equinox",
                           "docs/examples/deep_convolutional_gan.ipynb", gan),
}  # fmt: skip
