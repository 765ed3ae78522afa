"""ResNet and ViT against `transformers`, U-Net against the layers of `torch.nn`."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models.nets import names
from models.nets.presets import build
from models.nets.resnet import ResNetConfig
from models.nets.unet import UNetConfig
from models.nets.vit import ViTConfig
from models.nets.weights import Name, fill
from tests.models.nets.twins import CLOSE, drawn, torch, weights

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers")


def images(side: int, channels: int = 3) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, side, side, channels))


def answer(twin: Any, x: jax.Array) -> np.ndarray:
    """Return a twin's output for images; its channels come first."""
    with torch.no_grad():
        out = twin(torch.tensor(np.asarray(x).transpose(0, 3, 1, 2)))
    return getattr(out, "logits", out).numpy()


@pytest.mark.parametrize("bottleneck", [True, False])
def test_resnet_for_photographs(bottleneck: bool) -> None:
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[16, 24],
        depths=[2, 1],
        layer_type="bottleneck" if bottleneck else "basic",
        num_labels=5,
    )
    twin = drawn(transformers.ResNetForImageClassification(config))
    ours = build(ResNetConfig(8, (16, 24), (2, 1), 5, bottleneck))
    same_resnet(ours, twin, images(33))


def test_resnet_for_small_images() -> None:
    """Compare with the blocks of `transformers`, with ResNet-20's stem and shortcuts."""

    class Shortcut(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            zeros = torch.zeros_like(x[:, :4, ::2, ::2])
            return torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    twin = transformers.ResNetForImageClassification(config)
    stem = twin.resnet.embedder.embedder
    stem.convolution = torch.nn.Conv2d(3, 8, 3, padding=1, bias=False)
    twin.resnet.embedder.pooler = torch.nn.Identity()
    twin.resnet.encoder.stages[1].layers[0].shortcut = Shortcut()
    ours = build(ResNetConfig(8, (8, 16), (2, 2), 5, bottleneck=False, small_pictures=True))
    same_resnet(ours, drawn(twin), images(32))


def same_resnet(ours: Any, twin: Any, x: jax.Array) -> None:
    """Compare with running statistics, and with statistics of the batch."""
    ours = fill(ours, names.RESNET, weights(twin))
    np.testing.assert_allclose(
        nnx.view(ours, use_running_average=True)(x), answer(twin, x), **CLOSE
    )
    np.testing.assert_allclose(ours(x), answer(twin.train(), x), **CLOSE)


def test_vit(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    twin = drawn(transformers.ViTForImageClassification(config))
    with torch.no_grad():  # not of the state's first axis
        twin.vit.embeddings.position_embeddings.normal_()
    twin.save_pretrained(tmp_path)  # files use the common names
    source = load_file(tmp_path / "model.safetensors")
    ours = fill(build(ViTConfig(32, 8, 32, 2, 4, 48, 5, query_chunk_size=5)), names.VIT, source)
    np.testing.assert_allclose(ours(images(32)), answer(twin, images(32)), **CLOSE)


class TorchUNet(torch.nn.Module):
    """A U-Net of PyTorch's own layers, with our names."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        nn, levels = torch.nn, list(zip((channels, *widths[:-1]), widths, strict=True))

        def part(a: int, b: int) -> Any:
            convolution = nn.Conv2d(a, b, 3, padding=1, bias=False)
            return nn.ModuleDict({"convolution": convolution, "norm": nn.BatchNorm2d(b)})

        pair = lambda a, b: nn.ModuleDict({"first": part(a, b), "second": part(b, b)})
        self.down = nn.ModuleList(pair(a, b) for a, b in levels)
        self.enlarge = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in levels[:0:-1])
        self.up = nn.ModuleList(pair(2 * a, a) for a, _ in levels[:0:-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Any) -> Any:
        def run(pair: Any, x: Any) -> Any:
            for part in (pair["first"], pair["second"]):
                x = torch.relu(part["norm"](part["convolution"](x)))
            return x

        seen = []
        for i, pair in enumerate(self.down):
            x = run(pair, torch.nn.functional.max_pool2d(x, 2) if i else x)
            seen.append(x)
        for enlarge, pair, skip in zip(self.enlarge, self.up, seen[-2::-1], strict=True):
            x = run(pair, torch.cat([skip, enlarge(x)], 1))
        return self.head(x)


def test_unet() -> None:
    sizes: Any = (2, (4, 8, 12), 3)
    twin = drawn(TorchUNet(*sizes))
    table = {
        **names.linear("enlarge", "enlarge.{}", "in out places"),
        **names.linear("head", "head", "out in places"),
    }
    for side in ("down", "up"):
        for part in ("first", "second"):
            here, there = f"{side}.{part}", f"{side}.{{}}.{part}"
            kernel = Name(f"{there}.convolution.weight", "out in places")
            table[f"{here}.convolution.kernel"] = kernel
            table |= names.batch_norm(f"{here}.norm", f"{there}.norm")
    ours = fill(build(UNetConfig(*sizes)), table, weights(twin))
    ours = nnx.view(ours, use_running_average=True)
    expected = answer(twin, images(16, 2)).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(ours(images(16, 2)), expected, **CLOSE)
