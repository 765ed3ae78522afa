"""How the memory of a training step grows with the length of a sequence that devices share."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import xform
from experiments.report import keep, known, write_table
from models.nets.presets import TRAINED
from models.train.config import OptimConfig
from models.train.mesh import abstract_mesh
from models.train.planned import whole_step
from models.train.text import TextRun

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
GIB, MIB = 2**30, 2**20
# A Llama whose activations outweigh its parameters.
SMALL = {"width": 128, "depth": 4, "heads": 8, "kv_heads": 2, "mlp_width": 384}
LENGTHS = (16_384, 32_768, 65_536, 131_072)
DEVICES = (2, 4, 8)
# Tokens on each device whose hidden values are in memory at once, in large models.
MLP_CHUNK = 16_384
TARGETS = {"cpu": "cpu:{}", "gpu:h100": "gpu:h100:{}"}


@dataclasses.dataclass(frozen=True)
class Large:
    """A step of a large model on absent devices: its length, mesh, target and policies."""

    preset: str
    length: int
    mesh: str
    target: str
    policies: tuple[str, ...] = ("save_nothing", "budget:52GiB")

    @property
    def name(self) -> str:
        """The key of its results."""
        return f"{self.preset}@{self.target}:{self.length}"


LARGE = [
    Large("llama3-8b", 2**20, "context=8", "gpu:h100:8"),
    Large("qwen3-8b", 2**20, "context=8", "gpu:h100:8"),
    Large("llama3-8b", 2**17, "context=16", "tpu:v5p:4x4x1", ("min_cut", "save_nothing")),
]


def step_memory(run: TextRun, target: str) -> Any:
    """Return the compiled memory of a step on each device, from shapes alone."""
    step, *types = whole_step(run, abstract_mesh(run.mesh))
    policy = xform.policies.parse(run.policy)
    if isinstance(policy, xform.policies.Budget):
        step = xform.jit(step, policy, target=target, donate_argnums=0)
        return step.lower(*types).memory_analysis()
    return xform.memory_analysis(step, *types, policy, target=target, donate_argnums=0)


def small(length: int, devices: int, target: str) -> int:
    """Return the temporary bytes of a small step on each of the devices."""
    model: Any = dataclasses.replace(TRAINED["tiny-llama"], context=length, **SMALL)
    run = TextRun(model=model, mesh=f"context={devices}", batch=1)
    return step_memory(run, TARGETS[target].format(devices)).temp_bytes


def large(case: Large, policy: str) -> dict[str, Any]:
    """Return the stored results of a large step with the update in the backward pass."""
    model: Any = dataclasses.replace(
        TRAINED[case.preset],
        context=case.length,
        dtype="bfloat16",
        query_chunk_size=1024,
        mlp_chunk_size=MLP_CHUNK,
    )
    optim = OptimConfig(fused_update=True, clip_norm=math.inf, spike_factor=math.inf)
    run = TextRun(model=model, optim=optim, mesh=case.mesh, batch=1, policy=policy)
    found = step_memory(run, case.target)
    return {"bytes": found.total_bytes, "host": found.host_bytes}


def exponent(xs: Any, ys: Any) -> float:
    """Return the exponent of a power law, by least squares in logarithms."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def scaling(target: str) -> None:
    """Measure the small steps on a target; write the tables and the plot."""
    cells = {(n, DEVICES[-1]) for n in LENGTHS} | {(LENGTHS[-1], d) for d in DEVICES}
    for length, devices in sorted(cells):
        name = f"{target}:{length}:{devices}"
        if name not in known(RESULTS):
            print(name, keep(RESULTS, name, small(length, devices, target))[name], flush=True)
    scaling_table()


def scaling_table() -> None:
    """Write the table of the small steps, with the fitted exponents, and draw them."""
    found, rows = known(RESULTS), []
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    left, right = (axes[0], LENGTHS), (axes[1], DEVICES)
    for target in TARGETS:
        sizes = [f"{target}:{n}:{DEVICES[-1]}" for n in LENGTHS]
        shares = [f"{target}:{LENGTHS[-1]}:{d}" for d in DEVICES]
        if not found.keys() >= {*sizes, *shares}:
            continue
        cells = [target]
        for (ax, xs), names in ((left, sizes), (right, shares)):
            values = [found[name] / MIB for name in names]
            slope = exponent(xs, values)
            ax.loglog(xs, values, "o-", label=f"{target}: {slope:.2f}")
            cells += [*(f"{x:,.1f}" for x in values), f"{slope:.2f}"]
        rows.append(cells)
    for ax, xs in (left, right):
        ax.set_xticks(xs, [f"{x:,}" for x in xs])
        ax.minorticks_off()
        ax.legend(title="exponent", frameon=False)
    axes[0].set(xlabel=f"tokens of a sequence, {DEVICES[-1]} devices", ylabel="temporary MiB each")
    axes[1].set(xlabel=f"devices that share {LENGTHS[-1]:,} tokens")
    figure.savefig(HERE / "scaling.png", dpi=130)
    plt.close(figure)
    head = ["target", *(f"{n:,} tokens" for n in LENGTHS), "exponent",
            *(f"{d} devices" for d in DEVICES), "exponent"]  # fmt: skip
    write_table(HERE, head, rows, "scaling", "temporary MiB on each device")


def models() -> None:
    """Measure the large steps; write their table after each."""
    for case in LARGE:
        for policy in case.policies:
            name = f"{case.name}:{policy}"
            if name not in known(RESULTS):
                print(name, keep(RESULTS, name, large(case, policy))[name], flush=True)
            models_table()


def models_table() -> None:
    """Write the table of the large steps so far."""
    found = known(RESULTS)
    rows = [
        [case.preset, f"{case.length:,}", case.target, case.mesh, policy,
         f"{one['bytes'] / GIB:.1f}", f"{one['host'] / GIB:.1f}"]
        for case in LARGE
        for policy in case.policies
        if (one := found.get(f"{case.name}:{policy}"))
    ]  # fmt: skip
    head = ["model", "tokens", "devices", "mesh", "policy", "GiB on each", "GiB on its host"]
    write_table(HERE, head, rows, "models", "devices that are not here")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=[*TARGETS, "models"])
    for part in parser.parse_args().parts:
        models() if part == "models" else scaling(part)
