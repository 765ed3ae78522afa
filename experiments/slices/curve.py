"""Draw peak memory against recomputed work for GPT-2 124M, with plans in slices."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import xform
from models.nets.presets import PRESETS, abstract

HERE = Path(__file__).parent


def program(preset: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the loss of a language model with all its logits, and the types of its arguments."""
    config = PRESETS[preset]
    graphdef, params, rest = nnx.split(abstract(config), nnx.Param, ...)

    def gpt2(params: Any, tokens: Any) -> Any:
        logits = nnx.merge(graphdef, params, rest, copy=True)(tokens[:, :-1])
        losses = optax.losses.softmax_cross_entropy_with_integer_labels
        return losses(logits.astype("float32"), tokens[:, 1:]).mean()

    return gpt2, (params, jax.ShapeDtypeStruct((batch, config.context + 1), "int32"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="gpu:h100", help="the device to plan for")
    parser.add_argument("--preset", default="gpt2-124m")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--out", type=Path, default=HERE / "curve.png")
    options = parser.parse_args()
    f, args = program(options.preset, batch=8)
    curve = xform.pareto(f, *args, target=options.target, points=options.points, verify=False,
                         slices=True)  # fmt: skip
    print(curve)
    curve.plot(options.out)


if __name__ == "__main__":
    main()
