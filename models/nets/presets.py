"""Model configurations by name, in their published sizes, and functions that build the models."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from models.nets.gpt2 import GPT2, GPT2Config
from models.nets.llama import Llama, LlamaConfig
from models.nets.mlp import MLP, MLPConfig
from models.nets.objectives import OBJECTIVES
from models.nets.ode import NeuralODE, ODEConfig
from models.nets.recurrent import Recurrent, RecurrentConfig
from models.nets.resnet import ResNet, ResNetConfig
from models.nets.unet import UNet, UNetConfig
from models.nets.vit import ViT, ViTConfig

KINDS: dict[type[Any], type[Any]] = {
    GPT2Config: GPT2,
    LlamaConfig: Llama,
    ViTConfig: ViT,
    ResNetConfig: ResNet,
    UNetConfig: UNet,
    RecurrentConfig: Recurrent,
    ODEConfig: NeuralODE,
    MLPConfig: MLP,
}


def _gpt2(width: int, depth: int, heads: int) -> GPT2Config:
    return GPT2Config(50_257, 1024, width, depth, heads)


def _llama(
    vocab: int, context: int, width: int, depth: int, heads: int, **more: Any
) -> LlamaConfig:
    return LlamaConfig(vocab, context, width, depth, heads, **more)


_LLAMA3 = {"kv_heads": 8, "rope_theta": 500_000.0}
_LLAMA31 = {**_LLAMA3, "rope_factor": 8.0}
PRESETS: dict[str, Any] = {
    # The first four are small enough for a laptop and read text as bytes. `tiny-vit` and
    # `tiny-unet` are small models of pictures.
    "tiny": GPT2Config(dropout=0.0),
    "tiny-llama": LlamaConfig(tie_embeddings=True),
    "tiny-mixtral": LlamaConfig(tie_embeddings=True, experts=4),
    "small": GPT2Config(256, 512, 384, 8, 6, dropout=0.0),
    "gpt2-124m": _gpt2(768, 12, 12),
    "gpt2-355m": _gpt2(1024, 24, 16),
    "gpt2-774m": _gpt2(1280, 36, 20),
    "gpt2-1.5b": _gpt2(1600, 48, 25),
    "tinyllama-1.1b": _llama(32_000, 2048, 2048, 22, 32, kv_heads=4, mlp_width=5632),
    "llama2-7b": _llama(32_000, 4096, 4096, 32, 32, kv_heads=32, mlp_width=11_008),
    "llama2-13b": _llama(32_000, 4096, 5120, 40, 40, kv_heads=40, mlp_width=13_824),
    "llama2-70b": _llama(32_000, 4096, 8192, 80, 64, kv_heads=8, mlp_width=28_672),
    "llama3-8b": _llama(128_256, 8192, 4096, 32, 32, mlp_width=14_336, **_LLAMA3),
    "llama3-70b": _llama(128_256, 8192, 8192, 80, 64, mlp_width=28_672, **_LLAMA3),
    "llama3.1-8b": _llama(128_256, 131_072, 4096, 32, 32, mlp_width=14_336, **_LLAMA31),
    "qwen3-8b": _llama(
        151_936,
        40_960,
        4096,
        36,
        32,
        kv_heads=8,
        mlp_width=12_288,
        rope_theta=1e6,
        norm_epsilon=1e-6,
        qk_norm=True,
    ),
    "mixtral-8x7b": _llama(
        32_000,
        32_768,
        4096,
        32,
        32,
        kv_heads=8,
        mlp_width=14_336,
        rope_theta=1e6,
        experts=8,
    ),
    "resnet20": ResNetConfig(
        16, (16, 32, 64), (3, 3, 3), 10, bottleneck=False, small_pictures=True
    ),
    "resnet50": ResNetConfig(64, (256, 512, 1024, 2048), (3, 4, 6, 3), 1000, bottleneck=True),
    "tiny-vit": ViTConfig(),
    "vit-s": ViTConfig(224, 16, 384, 12, 6, 1536, 1000, norm_epsilon=1e-6),
    "tiny-unet": UNetConfig(),
    "unet": UNetConfig(1, (64, 128, 256, 512, 1024), 2),
    "lstm": RecurrentConfig("lstm", 64, 128, output_layer=True),
    "gru": RecurrentConfig("gru", 64, 128, output_layer=True),
    "ode": ODEConfig(64, 256, 200),
    "mlp": MLPConfig(),
}


# The presets that the trainer can train.
TRAINED = {name: config for name, config in PRESETS.items() if type(config) in OBJECTIVES}


def build(config: Any, seed: int = 0) -> Any:
    """Make a model with random weights."""
    return KINDS[type(config)](config, rngs=nnx.Rngs(seed))


def abstract(config: Any) -> Any:
    """Make a model of shapes and dtypes only. Nothing is allocated, whatever its size.

    While the model is made, the current mesh is hidden: NNX would look for the names of our
    parameters' axes in it.
    """
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return nnx.eval_shape(lambda: build(config))


def parameter_count(model: nnx.Module) -> int:
    """Count the elements of all parameters. The model may be abstract."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
