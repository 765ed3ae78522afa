"""Losses on meshes of devices and processes; bytes of large models on absent chips."""

from __future__ import annotations

import argparse
import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import xform
from experiments.report import keep, known, write_table
from experiments.sharded.weigh import GIB, Case, Weighed, most_of, waiting, weigh
from models.train.log import read_records
from xform.memory.capacity import LargestBatch

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
    (1, 8, "context=8"),
    (1, 8, "context=4,fsdp=2"),
    (1, 8, "context=2,tensor=2,data=2"),
    (2, 2, "fsdp=2,tensor=2"),
    (2, 4, "context=4,fsdp=2"),
    (4, 2, "data=2,fsdp=2,tensor=2"),
]
# Sequences of a step and their tokens, over all devices; and budgets of each device.
CASES = [
    Case("gpt2-1.5b", 64, 1024, "fsdp=16", "tpu:v5e:4x4", ("7GiB", "4.5GiB")),
    Case("gpt2-1.5b", 64, 1024, "fsdp=16", "tpu:v5p:2x2x4", ("6GiB", "4.5GiB")),
    Case("gpt2-1.5b", 64, 1024, "fsdp=8", "gpu:h100:8", ("14GiB", "12GiB")),
    Case("llama2-7b", 16, 4096, "fsdp=16", "tpu:v5e:4x4", ("14GiB", "12GiB")),
    Case("llama2-7b", 16, 4096, "fsdp=16", "tpu:v5p:2x2x4", ("14GiB", "12GiB")),
    Case("llama2-7b", 16, 4096, "fsdp=8", "gpu:h100:8", ("24GiB", "18GiB", "14GiB", "12GiB")),
    Case("llama2-70b", 512, 4096, "fsdp=64,tensor=8", "tpu:v5p:8x8x8", ("90GiB", "60GiB")),
]
# The same and GPT-2 124M on one H100, with the update after and within the backward pass.
UPDATES = [
    dataclasses.replace(case, budgets=(), update=update)
    for case in (Case("gpt2-124m", 8, 1024, "", "gpu:h100"), *CASES)
    if case.target in ("gpu:h100", "gpu:h100:8", "tpu:v5e:4x4")
    for update in ("separate", "fused")
]
# The same, with the optimizer's state on the hosts.
OFFLOADED = [
    dataclasses.replace(case, budgets=(), offload=True)
    for case in CASES
    if case.target in ("tpu:v5e:4x4", "gpu:h100:8")
]


def trained(processes: int, devices: int, mesh: str, folder: Path) -> list[float]:
    """Return the losses of a run in this many processes, on the standard library's sources."""
    out = folder / f"{processes}-{mesh or 'one'}"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "models", "train", *SIZES, "--out", str(out), "--mesh", mesh,
               "--steps", str(STEPS), "--validate-every", "1000",
               "--save-every", "1000"]  # fmt: skip
    several = [
        "--coordinator-address",
        f"localhost:{port}",
        "--num-processes",
        str(processes),
        "--process-id",
    ]
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
    """Plot the losses on one device, and the differences of the others from them."""
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
    """Train on each mesh."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[float]] = {}
        for processes, devices, mesh in MESHES:
            name = f"{processes} x {devices}: {mesh or 'one device'}"
            found[name] = trained(processes, devices, mesh, Path(folder))
    keep(RESULTS, "losses", found)
    losses_table()


def losses_table() -> None:
    """Write the table and the plot of the losses that were measured last."""
    found: dict[str, list[float]] = known(RESULTS)["losses"]
    (_, one), *_ = found.items()
    apart = {name: np.abs(np.subtract(values, one)) for name, values in found.items()}
    head = ["processes x devices: mesh", "loss, step 1", f"loss, step {STEPS}",
            "furthest from one device, 10 steps", f"{STEPS} steps"]  # fmt: skip
    rows = [[name, f"{values[0]:.6f}", f"{values[-1]:.6f}", f"{apart[name][:10].max():.1e}",
             f"{apart[name].max():.1e}"] for name, values in found.items()]  # fmt: skip
    write_table(HERE, head, rows, "losses", "8 devices of one CPU, float32")
    plot(found)


def row(case: Case, policy: str, found: Weighed) -> list[str]:
    """Return the cells of the table of bytes."""
    held = f"{found.bytes / GIB:.2f}" if found.bytes else "none fits"
    if found.floor:
        held += f": at least {found.floor / GIB:.2f}"
    again = "" if found.again is None else f"{found.again:.2f}"
    sent = "" if found.collective is None else f"{found.collective / GIB:.1f}"
    step = "" if found.step is None else f"{found.step:.2f}"
    size = f"{case.batch} x {case.context}"
    fits = "yes" if found.fits else "no"
    return [case.preset, size, case.target, case.mesh, policy, held, fits, again, sent, step]


def named(cases: Sequence[Case]) -> Iterator[tuple[str, Case, str]]:
    """Yield each case under each of its policies, with the key of its results."""
    for case in cases:
        for policy in case.policies:
            yield f"{case.name}:{policy}", case, policy


def measure(part: str, only: list[str]) -> None:
    """Measure the selected cases of a part under each policy; write its table after each."""
    cases, measured, table = PARTS[part]
    for name, case, policy in named(cases):
        if not only or name in only:
            found = measured(case, xform.policies.parse(policy))
            print(name, found, flush=True)
            keep(RESULTS, part, known(RESULTS).get(part, {}) | {name: found})
            table()


def weighed(case: Case, policy: Any) -> dict[str, Any]:
    """Return the stored results of a compiled step."""
    return dataclasses.asdict(weigh(case, policy))


def offload_table() -> None:
    """Write the table of bytes on the host."""
    head = ["model", "devices", "policy", "GiB on each, without", "with", "fits",
            "GiB on the host, of each", "GiB to the host and back in a step"]  # fmt: skip
    results = known(RESULTS)
    rows: list[list[str]] = []
    for name, case, policy in named(OFFLOADED):
        if name not in results.get("offload", {}):
            continue
        before, after = (Weighed(**results[key][name]) for key in ("bytes", "offload"))
        fits = "yes" if after.fits else "no"
        moved = 2 * waiting(case) / GIB
        host = "" if after.host is None else f"{after.host / GIB:.2f}"
        held = [f"{(one.bytes or 0) / GIB:.2f}" for one in (before, after)]
        rows.append([case.preset, case.target, policy, *held, fits, host, f"{moved:.2f}"])
    write_table(HERE, head, rows, "offload", "devices that are not here")


def update_table() -> None:
    """Write the table of the update within the backward pass."""
    head = ["model", "sequences x tokens", "devices", "mesh", "update", "policy", "GiB on each",
            "fits", "GiB of gradients at the peak", "the largest of these, MiB"]  # fmt: skip
    found = known(RESULTS).get("update", {})
    rows: list[list[str]] = []
    for name, case, policy in named(UPDATES):
        if name not in found:
            continue
        one = Weighed(**found[name])
        size = f"{case.batch} x {case.context}"
        total = f"{(one.bytes or 0) / GIB:.2f}"
        gradient = "" if one.gradient is None else f"{one.gradient / GIB:.2f}"
        largest = "" if one.largest_gradient is None else f"{one.largest_gradient / 2**20:.0f}"
        rows.append([case.preset, size, case.target, case.mesh, case.update, policy, total,
                     "yes" if one.fits else "no", gradient, largest])  # fmt: skip
    write_table(HERE, head, rows, "update", "devices that are not here")


def bytes_table() -> None:
    """Write the table of all compiled steps so far."""
    head = ["model", "sequences x tokens", "devices", "mesh", "policy", "GiB on each", "fits",
            "run again, of the forward pass", "GiB sent, of each", "step, s, roofline"]  # fmt: skip
    found = known(RESULTS).get("bytes", {})
    rows = [
        row(case, policy, Weighed(**found[name]))
        for name, case, policy in named(CASES)
        if name in found
    ]
    write_table(HERE, head, rows, "bytes", "devices that are not here")


def largest(case: Case, policy: Any) -> dict[str, Any] | None:
    """Return the stored results of the largest batch of a case."""
    found = most_of(case, policy)
    return found and batch_of(*found)


def batch_of(found: LargestBatch, policy: Any) -> dict[str, Any]:
    """Return the stored results of a largest batch."""
    value = {"batch": found.size, "bytes": found.fits.total_bytes,
             "proven": found.over is not None, "compilations": found.compiles}  # fmt: skip
    if isinstance(policy, xform.Plan):
        value["again"] = policy.recompute_flops / policy.forward_flops
    return value


def largest_table() -> None:
    """Write the table of the largest batches so far."""
    head = ["model", "tokens", "devices", "mesh", "policy", "largest batch", "GiB on each",
            "the next does not fit", "run again, of the forward pass"]  # fmt: skip
    found = known(RESULTS).get("largest", {})
    rows = [
        [case.preset, str(case.context), case.target, case.mesh, policy, str(one["batch"]),
         f"{one['bytes'] / GIB:.2f}", "yes" if one["proven"] else "not tried",
         f"{one['again']:.2f}" if "again" in one else ""]
        for name, case, policy in named(CASES)
        if (one := found.get(name))
    ]  # fmt: skip
    write_table(HERE, head, rows, "largest", "devices that are not here")


# For each part: its cases, the function that measures a case, and the one that writes its table.
PARTS: dict[str, tuple[Sequence[Case], Callable[[Case, Any], Any], Callable[[], None]]] = {
    "bytes": (CASES, weighed, bytes_table),
    "update": (UPDATES, weighed, update_table),
    "offload": (OFFLOADED, weighed, offload_table),
    "largest": (CASES, largest, largest_table),
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["losses", "bytes"])
    parser.add_argument(
        "--only", default="", help="of all parts but losses: gpt2-1.5b@gpu:h100:8:min_cut,..."
    )
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if "losses" in given.parts:
        losses()
    for part in PARTS:
        if part in given.parts:
            measure(part, only)
