"""Bytes and FLOPs of well-known models' gradients: by jax.grad, by default, in half the bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
from flax import nnx

import xform
from experiments.report import keep, write_table
from models.nets.gpt2 import GPT2Config
from models.nets.llama import LlamaConfig
from models.nets.ode import ODEConfig
from models.nets.presets import PRESETS, abstract, parameter_count
from models.nets.recurrent import RecurrentConfig
from models.nets.unet import UNetConfig

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MIB = 2**20
HEAD = ["model", "parameters", "jax.grad: temp MiB", "GFLOP", "default: temp MiB", "GFLOP again",
        "half the bytes, MiB", "all MiB", "temp MiB", "GFLOP again"]  # fmt: skip
SIZES: dict[str, Any] = {"vocab": 8192, "context": 512, "width": 256, "depth": 8, "heads": 8}
LLAMA: dict[str, Any] = {**SIZES, "kv_heads": 2, "mlp_width": 704}
MIXTRAL: dict[str, Any] = {**LLAMA, "depth": 4, "mlp_width": 256, "experts": 8}

Case = tuple[Callable[..., jax.Array], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return an array as its shape alone."""
    return jax.ShapeDtypeStruct(shape, dtype)


def case(config: Any, loss: Callable[..., jax.Array], *batch: Any) -> Case:
    """Return a loss of a model's parameters, its other state and a batch; all are shapes."""
    graphdef, params, rest = nnx.split(abstract(config), nnx.Param, ...)

    def run(params: Any, rest: Any, *batch: Any) -> jax.Array:
        return loss(nnx.merge(graphdef, params, rest, copy=True), *batch)

    return run, (params, rest, *batch)


def text(config: Any, rows: int = 4) -> Case:
    """Return the loss of the next token."""
    tokens = array(rows, config.context + 1, dtype=jnp.int32)
    return case(config, lambda model, tokens: model.loss(tokens, balance=0.01), tokens)


def classes(config: Any, *images: int) -> Case:
    """Return the cross-entropy of classes, for images or for each pixel."""

    def loss(model: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), labels).mean()

    labels = images[:3] if isinstance(config, UNetConfig) else images[:1]
    return case(config, loss, array(*images), array(*labels, dtype=jnp.int32))


def series(config: Any, *shape: int) -> Case:
    """Return the mean square of the output."""
    return case(config, lambda model, x: jnp.mean(model(x) ** 2), array(*shape))


CASES: dict[str, Callable[[], tuple[Any, Case]]] = {
    "GPT-2, 8 layers of 256": lambda: (c := GPT2Config(**SIZES), text(c)),
    "the same, unrolled": lambda: (c := GPT2Config(**SIZES, scan_layers=False), text(c)),
    "Llama, 8 layers of 256": lambda: (c := LlamaConfig(**LLAMA), text(c)),
    "Mixtral, 4 layers of 256": lambda: (c := LlamaConfig(**MIXTRAL), text(c, 1)),
    "ViT-S": lambda: (c := PRESETS["vit-s"], classes(c, 8, 224, 224, 3)),
    "ResNet-50": lambda: (c := PRESETS["resnet50"], classes(c, 16, 64, 64, 3)),
    "ResNet-20": lambda: (c := PRESETS["resnet20"], classes(c, 128, 32, 32, 3)),
    "U-Net, 16 to 256": lambda: (
        c := UNetConfig(3, (16, 32, 64, 128, 256), 2),
        classes(c, 8, 128, 128, 3),
    ),
    "LSTM, 1000 steps": lambda: (c := RecurrentConfig("lstm", 64, 128), series(c, 32, 1000, 64)),
    "GRU, 1000 steps": lambda: (c := RecurrentConfig("gru", 64, 128), series(c, 32, 1000, 64)),
    "neural ODE, 200 steps": lambda: (c := ODEConfig(64, 256, 200), series(c, 256, 64)),
}


def compiled(gradient: Callable[..., Any], args: Any) -> dict[str, float]:
    """Return MiB of all and of temporary values, from the compiler. Nothing runs."""
    report = xform.memory_analysis(gradient, *args)
    return {"all": report.total_bytes / MIB, "temp": report.temp_bytes / MIB}


def planned(loss: Any, args: Any, policy: Any) -> dict[str, float]:
    """Return the same for a plan, and the GFLOP that it recomputes."""
    plan = xform.plan(loss, *args, policy=policy)
    gradient = xform.value_and_grad(loss, policy=plan)
    return compiled(gradient, args) | {"again": plan.recompute_flops / 1e9}


def measure(name: str) -> dict[str, Any]:
    """Measure a model three times; the budget is half of all bytes, or the fewest of any plan."""
    config, (loss, args) = CASES[name]()
    usual = jax.value_and_grad(loss)
    whole = xform.memory_analysis(usual, *args)
    budget = whole.total_bytes // 2
    found: dict[str, Any] = {"asked": budget / MIB, "floor": False}
    found["held"] = (whole.argument_bytes + whole.output_bytes) / MIB
    if found["held"] < found["asked"]:
        try:
            found |= planned(loss, args, xform.policies.budget(budget))
        except xform.errors.BudgetInfeasible as error:
            found |= planned(loss, args, xform.policies.budget(error.floor_bytes)) | {"floor": True}
    return {
        "parameters": parameter_count(abstract(config)),
        "jax": compiled(usual, args) | {"gflop": whole.flops / 1e9},
        "default": planned(loss, args, None),
        "half": found,
    }


def cells(name: str, found: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    usual, default, half = found["jax"], found["default"], found["half"]
    numbers = [usual["temp"], usual["gflop"], default["temp"], default["again"], half["asked"]]
    if "all" in half:
        numbers += [half["temp"], half["again"]]
        last = [f"{half['all']:.1f}" + (", the floor" if half["floor"] else "")]
    else:
        last = [f"{half['held']:.1f} of arguments and gradients alone", "", ""]
    texts = [f"{number:.1f}" for number in numbers]
    return [name, f"{found['parameters'] / 1e6:.2f} M", *texts[:5], *last, *texts[5:]]


def draw(results: dict[str, Any]) -> None:
    """Draw the temporary bytes of each model, relative to jax.grad."""
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(results) + 1.2), layout="constrained")
    styles = {"default": ("xform's default", "#2b6cb0"), "half": ("half the bytes", "#dd6b20")}
    for i, (way, (label, color)) in enumerate(styles.items()):
        parts = [found[way].get("temp", 0) / found["jax"]["temp"] for found in results.values()]
        axes.barh([y + 0.4 * i for y in range(len(parts))], parts, 0.38, label=label, color=color)
    axes.axvline(1, color="#718096", linewidth=1)
    axes.set_yticks([y + 0.2 for y in range(len(results))], list(results))
    axes.invert_yaxis()
    axes.set_xlabel("temporary bytes / those under jax.grad")
    axes.legend(frameon=False)
    figure.savefig(HERE / "models.png", dpi=130)


def main() -> None:
    """Measure the named models, or all; the table and the plot show all measurements so far."""
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", default=list(CASES), help=", ".join(CASES))
    for name in parser.parse_args().models:
        results = keep(RESULTS, name, measure(name))
        results = {name: results[name] for name in CASES if name in results}
        write_table(HERE, HEAD, [cells(*item) for item in results.items()])
        draw(results)


if __name__ == "__main__":
    main()
