"""Draw peak memory against recomputed work for two language models, with plans in slices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import optax
from flax import nnx

import xform
from experiments.unmodified.programs import lm1b
from models.nets.presets import PRESETS, abstract

HERE = Path(__file__).parent


def gpt2(batch: int = 8) -> tuple[Any, tuple[Any, ...]]:
    """Return the loss of GPT-2 124M with all its logits, and the types of its arguments."""
    config = PRESETS["gpt2-124m"]
    graphdef, params, rest = nnx.split(abstract(config), nnx.Param, ...)

    def gpt2(params: Any, tokens: Any) -> Any:
        logits = nnx.merge(graphdef, params, rest, copy=True)(tokens[:, :-1])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return losses(logits.astype("float32"), tokens[:, 1:]).mean()

    return gpt2, (params, jax.ShapeDtypeStruct((batch, config.context + 1), "int32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True, help="the folder with Flax's code")
    parser.add_argument("--target", default="gpu:h100", help="the device to plan for")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "curve.png")
    options = parser.parse_args()
    figure, axes = plt.subplots(1, 2, figsize=(13, 4.8), dpi=110, layout="constrained")
    for title, (f, args), ax in (
        ("GPT-2 124M", gpt2(), axes[0]),
        ("Flax lm1b", lm1b(options.sources), axes[1]),
    ):
        curve = xform.pareto(f, *args, target=options.target, points=options.points, verify=False,
                             slices=True)  # fmt: skip
        print(curve, flush=True)
        curve.draw(ax)
        ax.set_title(f"{title} on {options.target}", loc="left")
    figure.savefig(options.out)


if __name__ == "__main__":
    main()
