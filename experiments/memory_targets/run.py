"""Reports, policies and batches on absent devices: three tables and a page."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.planner.zoo import cnn
from experiments.report import keep, known, write_table
from models.train import step
from xform.memory.report import MemoryReport

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
GIB = 2**30
GPT2 = {"preset": "gpt2-124m", "batch": 8}
POLICIES = {
    "save_everything": xform.policies.save_everything,
    "min_cut": None,
    "save_dots": xform.policies.save_dots,
    "save_nothing": xform.policies.save_nothing,
}
BUDGETS = (0.8, 0.65, 0.5)

Rows = list[list[str]]


def gpt2(target: str, **options: Any) -> MemoryReport:
    """Report a training step of GPT-2 124M with AdamW and a donated state."""
    return xform.memory_analysis(step.train_step, *step.inputs(**GPT2), target=target, **options)


def llama(target: str, batch: int = 4) -> MemoryReport:
    """Report Llama-2 7B, sharded over the target's devices, with each layer recomputed."""
    mesh = "fsdp=4,tensor=4" if target.startswith("tpu") else "fsdp=2,tensor=4"
    args = step.inputs(preset="llama2-7b", batch=batch, mesh=mesh)
    return xform.memory_analysis(step.train_step, *args, target=target,
                                 policy=xform.policies.save_nothing)  # fmt: skip


def convolutions(target: str) -> MemoryReport:
    """Report the loss and gradient of a residual network of convolutions."""
    loss, args = cnn()
    return xform.memory_analysis(xform.value_and_grad(loss), *args, target=target)


PROGRAMS: dict[str, tuple[Callable[[str], MemoryReport], Sequence[str]]] = {
    "GPT-2 124M, batch 8": (gpt2, ("cpu", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "gpu:h100")),
    "CNN": (convolutions, ("cpu", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "gpu:h100")),
    "Llama-2 7B, batch 4": (llama, ("cpu:8", "tpu:v5e:4x4", "tpu:v5p:2x2x4", "gpu:h100:8")),
    "Llama-2 7B, batch 16": (functools.partial(llama, batch=16), ("tpu:v5e:4x4", "tpu:v5p:2x2x4")),
}


def reports(targets: Iterable[str]) -> None:
    """Write how much memory each program takes on each target."""
    head = ["program", "target", "GiB on each device", "temp GiB", "capacity GiB",
            "replayed / temp", "with a line", "step, estimated", "seconds, all"]  # fmt: skip
    for name, (analyze, places) in PROGRAMS.items():
        for target in places:
            if not target.startswith(tuple(targets)):
                continue
            start = time.perf_counter()
            report = analyze(target)
            lined = sum(r.bytes for r in report if r.where) / max(report.total_bytes, 1)
            seconds = time.perf_counter() - start
            if name.startswith("GPT-2") and target == "tpu:v5e:1x1":
                report.save_html(HERE / "gpt2.html")
                report.plot(HERE / "gpt2.png")
            made = report.assignment  # a refused program has no assignment
            row = [name, target, gib(report.total_bytes),
                   gib(report.temp_bytes if made else None), gib(report.capacity_bytes),
                   replayed(report), f"{lined:.1%}" if made else "",
                   milliseconds(report.seconds),
                   f"{seconds:.0f}"]  # fmt: skip
            tabulate("reports", head, f"{name}, {target}", [row])


def policies(targets: Iterable[str]) -> None:
    """Write the transformer under stock policies, the default, and budgets, on each target."""
    head = ["target", "policy", "GiB on the device", "TFLOP a step", "step, estimated"]
    train_step = xform.jit(step.train_step.__wrapped__, static_argnums=0, donate_argnums=1)
    compare = functools.partial(xform.compare, train_step, *step.inputs(**GPT2))
    for target in ("cpu", "tpu:v5e:1x1", "gpu:h100"):
        if not target.startswith(tuple(targets)):
            continue
        found = list(compare(policies=POLICIES, targets=[target]))
        tabulate("policies", head, target, weighed(found))
        sizes = {e.policy: e.report.total_bytes for e in found if e.report is not None}
        least, most = sizes["save_nothing"], sizes["min_cut"]
        asked = {f"budget {gib(n)}": xform.policies.budget(n)
                 for n in (int(least + (most - least) * part) for part in BUDGETS)}  # fmt: skip
        found += compare(policies=asked, targets=[target])
        tabulate("policies", head, target, weighed(found))


def weighed(entries: Sequence[Any]) -> Rows:
    """Return a row for each policy on a target.

    Work is omitted if it is less than for any other policy: that plan has a loop of unknown length,
    whose body was counted once.
    """
    least = min(e.report.flops for e in entries if e.policy in POLICIES)
    rows: Rows = []
    for entry in entries:
        r = entry.report
        counted = r if r and r.flops >= least else None
        rows.append([entry.target, entry.policy, gib(r.total_bytes) if r else "refused",
                     f"{counted.flops / 1e12:.2f}" if counted else "",
                     milliseconds(counted.seconds if counted else None)])  # fmt: skip
    return rows


def batches(targets: Iterable[str]) -> None:
    """Write the largest batch of the tiny transformer's step."""
    head = ["target", "largest batch", "GiB on the device", "capacity GiB", "GiB of the next",
            "compilations"]  # fmt: skip
    for target in ("tpu:v5e:1x1", "gpu:l4", "gpu:h100"):
        if not target.startswith(tuple(targets)):
            continue
        config, state, tokens = step.inputs(preset="tiny", batch=512)
        run = functools.partial(xform.memory.max_batch, step.train_step, config, state, tokens)
        found = run(target=target, batch_axis=1)
        after = found.over.total_bytes if isinstance(found.over, MemoryReport) else None
        sizes = found.fits.total_bytes, found.fits.capacity_bytes, after
        cells = [gib(n, 3) for n in sizes]
        size = f"{found.size}" + ("" if found.over is not None else ", not shown to be the last")
        tabulate("batches", head, target, [[target, size, *cells, str(found.compiles)]])


def tabulate(name: str, head: list[str], part: str, rows: Rows) -> None:
    """Store a part of a table with the measurements so far, and write the table of all parts."""
    parts = known(RESULTS).get(name, {}) | {part: rows}
    keep(RESULTS, name, parts)
    write_table(HERE, head, [row for rows in parts.values() for row in rows], name)


def gib(n: int | None, digits: int = 2) -> str:
    return "" if n is None else f"{n / GIB:.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds else ""


def replayed(report: MemoryReport) -> str:
    """Return the replayed peak of temporary bytes relative to the compiler's, as text."""
    made = report.assignment
    if made is None or not report.temp_bytes:
        return ""
    return f"{(made.temp_bytes - made.fragmentation_bytes) / report.temp_bytes:.4f}"


def main() -> None:
    """Write the named tables, for targets whose names have the given prefix (default: all)."""
    parts = {"reports": reports, "policies": policies, "batches": batches}
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", default=list(parts), help=", ".join(parts))
    parser.add_argument("--targets", default="cpu,tpu,gpu", help="beginnings of names")
    options = parser.parse_args()
    for name in options.tables:
        parts[name](options.targets.split(","))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
