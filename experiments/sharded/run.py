"""Losses on meshes of devices and processes, and bytes of large models on TPUs not here."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import xform
from experiments.report import keep, known, write_table
from experiments.sharded.weigh import GIB, Weighed, weigh
from models.train.log import read_records

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
STEPS = 100
SIZES = ["--width", "64", "--depth", "2", "--heads", "4", "--context", "64", "--batch", "16"]
# Processes, devices of each, and the mesh.
MESHES = [
    (1, 1, ""),
    (1, 8, "data=8"),
    (1, 8, "fsdp=8"),
    (1, 8, "data=2,tensor=4"),
    (1, 8, "data=2,fsdp=2,tensor=2"),
    (2, 2, "fsdp=2,tensor=2"),
    (4, 2, "data=2,fsdp=2,tensor=2"),
]
TARGET = "tpu:v5e:4x4"
# Sequences and tokens of each in a step, and the mesh.
MODELS = {
    "gpt2-1.5b": (64, 1024, "fsdp=16"),
    "llama2-7b": (16, 4096, "fsdp=16"),
}
POLICIES = ("default", "save_nothing", "auto", "budget:14GiB", "budget:12GiB")


def trained(processes: int, devices: int, mesh: str, folder: Path) -> list[float]:
    """The losses of a run in so many processes, of the sources of the standard library."""
    out = folder / f"{processes}-{mesh or 'one'}"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "models", "train", *SIZES, "--out", str(out), "--mesh", mesh,
               "--steps", str(STEPS), "--eval-every", "1000", "--save-every", "1000"]  # fmt: skip
    several = ["--coordinator", f"localhost:{port}", "--processes", str(processes), "--process"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu",
                   "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}  # fmt: skip
    started = [
        subprocess.Popen(
            [*command, *([*several, str(i)] if processes > 1 else [])],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for i in range(processes)
    ]
    if any([process.wait() for process in started]):
        raise RuntimeError(f"a process of {mesh} failed")
    return [r["loss"] for r in read_records(out / "log.jsonl") if "loss" in r]


def plot(losses: dict[str, list[float]]) -> None:
    """The losses of one device, and how far the others are from them."""
    figure, (above, below) = plt.subplots(2, figsize=(7.6, 6), layout="constrained", sharex=True)
    (_, one), *others = losses.items()
    steps = np.arange(1, STEPS + 1)
    above.plot(steps, one, color="#2b6cb0")
    above.set(ylabel="loss, nats per token", title="100 steps on one device ...")
    for name, found in others:
        below.semilogy(steps, np.abs(np.subtract(found, one)).clip(1e-8), label=name, linewidth=1)
    below.axhline(1e-5, color="#a0aec0", linestyle="--", linewidth=0.8)
    below.set(xlabel="step", ylabel="difference", title="... and how far others are from it")
    below.legend(frameon=False, fontsize=8)
    figure.savefig(HERE / "losses.png", dpi=130)
    plt.close(figure)


def losses() -> None:
    """Train on each mesh; write the table and the plot."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[float]] = {}
        for processes, devices, mesh in MESHES:
            name = f"{processes} x {devices}: {mesh or 'one device'}"
            found[name] = trained(processes, devices, mesh, Path(folder))
    keep(RESULTS, "losses", found)
    (_, one), *_ = found.items()
    apart = {name: np.abs(np.subtract(values, one)) for name, values in found.items()}
    head = ["processes x devices: mesh", "loss, step 1", f"loss, step {STEPS}",
            "furthest from one device, 10 steps", f"{STEPS} steps"]  # fmt: skip
    rows = [[name, f"{values[0]:.6f}", f"{values[-1]:.6f}", f"{apart[name][:10].max():.1e}",
             f"{apart[name].max():.1e}"] for name, values in found.items()]  # fmt: skip
    write_table(HERE, head, rows, "losses", "8 devices of one CPU, float32")
    plot(found)


def row(preset: str, policy: str, found: Weighed) -> list[str]:
    """Cells of the table of bytes."""
    batch, context, mesh = MODELS[preset]
    held = f"{found.bytes / GIB:.2f}" if found.bytes else "none fits"
    if found.floor:
        held += f": at least {found.floor / GIB:.2f}"
    again = "" if found.again is None else f"{found.again:.2f}"
    cells = [preset, f"{batch} x {context}", mesh, policy, held, "yes" if found.fits else "no"]
    return [*cells, again, f"{found.seconds:.0f}"]


def weights(only: list[str]) -> None:
    """Weigh each model under each policy, or those named; write the table of all so far."""
    for preset, (batch, context, mesh) in MODELS.items():
        for policy in POLICIES:
            if not only or f"{preset}:{policy}" in only:
                asked = None if policy == "default" else xform.policies.parse(policy, "a policy")
                found = weigh(preset, batch, context, mesh, TARGET, asked)
                print(preset, policy, found, flush=True)
                weighed = known(RESULTS).get("bytes", {})
                keep(RESULTS, "bytes", weighed | {f"{preset}:{policy}": dataclasses.asdict(found)})
    table()


def table() -> None:
    """Write the table of what was weighed so far."""
    head = ["model", "sequences x tokens", "mesh", "policy", "GiB on each device", "fits 15.75",
            "run again, of the forward pass", "seconds"]  # fmt: skip
    weighed = known(RESULTS).get("bytes", {})
    rows = [
        row(preset, policy, Weighed(**weighed[f"{preset}:{policy}"]))
        for preset in MODELS
        for policy in POLICIES
        if f"{preset}:{policy}" in weighed
    ]
    write_table(HERE, head, rows, "bytes", TARGET)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["losses", "bytes"])
    parser.add_argument("--only", default="", help="of bytes: llama2-7b:auto,gpt2-1.5b:default")
    given = parser.parse_args()
    if "losses" in given.parts:
        losses()
    if "bytes" in given.parts:
        weights([name for name in given.only.split(",") if name])
