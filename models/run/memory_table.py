"""Compiled memory of the training gradient under each policy, scanned and unrolled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from rich.table import Table

import xform
from models.nets.decoder import DecoderConfig
from models.nets.presets import abstract
from models.train.step import make_loss

MIB = 2**20


# The policies of the layers' remat regions. The blocks give names to the two values that are most
# expensive to recompute for their size: the attention's mean of values, and the input of the
# perceptron's last matrix.
POLICIES = (
    "save_everything",
    "save_dots",
    "save_dots_with_no_batch_dims",
    "save_only_these_names:attention_out+mlp_hidden",
    "save_nothing",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """Measurements of the gradient with one transform and one policy.

    A layout is "scanned" (the layers run in a loop over stacked parameters) or "unrolled".

    Attributes:
      name: the transform and the policy.
      temp_bytes: temporary memory of the compiled gradient, by layout.
      flops_recomputed: how many FLOPs more than with `save_everything`, by layout.
    """

    name: str
    temp_bytes: dict[str, int]
    flops_recomputed: dict[str, int]


def measure(config: DecoderConfig, batch: int) -> list[Row]:
    """Compile the gradient of the loss from shapes, once for every policy and layout.

    The first rows are `jax.grad` and `xform.grad` of the model without remat regions. In the other
    rows each layer is a remat region. `batch` counts sequences of `config.context` tokens.
    """
    ways: list[tuple[str, Callable[..., Any], str | None]] = [
        ("jax.grad", jax.grad, None),
        ("xform.grad", xform.grad, None),
        *[(f"xform.grad, {policy}", xform.grad, policy) for policy in POLICIES],
    ]
    reports = {
        (name, layout): _report(
            dataclasses.replace(config, scan_layers=layout == "scanned", remat=policy),
            batch,
            transform,
        )
        for name, transform, policy in ways
        for layout in ("scanned", "unrolled")
    }
    baseline = "xform.grad, save_everything"

    def by_layout(name: str, read: Callable[[dict[str, Any], dict[str, Any]], int]) -> Any:
        return {
            layout: read(reports[name, layout], reports[baseline, layout])
            for layout in ("scanned", "unrolled")
        }

    return [
        Row(
            name,
            by_layout(name, lambda own, _: int(own["temp_bytes"])),
            by_layout(name, lambda own, base: int(own["flops"] - base["flops"])),
        )
        for name, _, _ in ways
    ]


def _report(config: DecoderConfig, batch: int, transform: Callable[..., Any]) -> dict[str, Any]:
    """Compile the gradient and return its memory report as a dictionary."""
    params, loss = nnx.state(abstract(config)), make_loss(config)

    def gradient(params: nnx.State, tokens: jax.Array) -> nnx.State:
        return transform(loss, has_aux=True)(params, nnx.State({}), tokens)[0]

    tokens = jax.ShapeDtypeStruct((batch, config.context + 1), np.uint8)
    return xform.memory_analysis(gradient, params, tokens).to_dict()


def table(rows: list[Row], title: str) -> Table:
    """Make a table of the rows for a terminal, in MiB and GFLOP."""
    result = Table(title=title, title_justify="left")
    result.add_column("gradient, policy of each layer")
    for layout in ("scanned", "unrolled"):
        result.add_column(f"{layout}\ntemp MiB", justify="right")
        result.add_column("recomputed\nGFLOP", justify="right")
    for row in rows:
        cells = [
            text
            for layout in ("scanned", "unrolled")
            for text in (
                f"{row.temp_bytes[layout] / MIB:.1f}",
                f"{max(row.flops_recomputed[layout], 0) / 1e9:.2f}",
            )
        ]
        result.add_row(row.name, *cells)
    return result
