"""How many bytes does a plan take under the compiler flags that trainers run with?"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import xform
from experiments.production import programs
from experiments.production.copies import Fetch, described, fetches
from experiments.production.flags import GPU, GPU_PARTS, TPU, TPU_PARTS, Flags
from experiments.production.programs import Wrap
from experiments.production.scheduled import scheduled
from experiments.report import keep, known, write_table
from xform.memory import buffers
from xform.steering.settings import Steering

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
TARGETS = {"tpu:v5p:2x2x2": TPU, "gpu:h100:8": GPU}
# Rows whose flags are also measured in parts.
PARTS = {
    "tpu:v5p:2x2x2, unrolled, xform, offload": TPU_PARTS,
    "gpu:h100:8, scanned, xform, offload": GPU_PARTS,
}
# A folder for the compiled modules, for looking at them; "" for none.
MODULES = os.environ.get("PRODUCTION_MODULES", "")
LAYERS = {"scanned": True, "unrolled": False}
# Values that the budget may save, relative to those of the default plan.
PART = 0.5
HOST = "device", "pinned_host"


def _regions(policy: Any) -> Wrap:
    return lambda layer: jax.checkpoint(layer, policy=policy)


def _alone(layer: Callable[..., Any]) -> Callable[..., Any]:
    return layer


def _xform(policy: Any) -> Callable[..., Any]:
    return functools.partial(xform.value_and_grad, policy=policy)


def budget_plan(target: str, scanned: bool) -> xform.Plan:
    """Return the plan that may save `PART` of the bytes that the default plan saves."""
    params, _, tokens = programs.types(scanned)
    plan = functools.partial(xform.plan, programs.loss, params, tokens, target=target, verify=False)
    default = plan(policy=xform.policies.min_cut)
    return plan(policy=xform.policies.budget(int(PART * default.saved_bytes), of="saved"))


def variant(name: str, target: str, scanned: bool) -> tuple[Callable[..., Any], Wrap]:
    """Return the transform of the loss, and the remat regions of its layers."""
    policies = jax.checkpoint_policies
    if name == "jax, full":
        return jax.value_and_grad, _regions(policies.nothing_saveable)
    if name == "jax, offload":
        return jax.value_and_grad, _regions(policies.offload_dot_with_no_batch_dims(*HOST))
    if name == "xform, default":
        return _xform(None), _alone
    if name == "xform, tied":
        return _xform(None), programs.tied
    if name == "xform, offload":
        return _xform(xform.policies.offload_dots_with_no_batch_dims(*HOST)), _alone
    return _xform(budget_plan(target, scanned)), _alone


VARIANTS = (
    "jax, full",
    "xform, default",
    "xform, no waits",
    "xform, tied",
    "jax, offload",
    "xform, offload",
    "xform, budget",
)


# Variants of the default on one of the targets, for unrolled layers.
ONLY = {"xform, no waits": "gpu:h100:8", "xform, tied": "tpu:v5p:2x2x2"}


def measure(target: str, layers: str, name: str, flags: Flags) -> dict[str, Any]:
    """Compile a step for a target; nothing is run."""
    scanned = LAYERS[layers]
    if name == "xform, no waits":
        with Steering(gradients_first=False).used():
            return measure(target, layers, "xform, default", flags)
    step = functools.partial(programs.step, *variant(name, target, scanned))
    fast = jax.jit(step, donate_argnums=(0, 1), compiler_options=flags)
    module, seconds = scheduled(fast, programs.types(scanned), target)
    if MODULES:
        (Path(MODULES) / f"{target}, {layers}, {name}, {bool(flags)}.pb").write_bytes(module)
    return analyzed(module) | {"seconds": seconds}


def analyzed(module: bytes) -> dict[str, Any]:
    """Return the bytes of a scheduled program, and its copies back from the host."""
    found = buffers.read(module)
    copies = [dataclasses.asdict(fetch) for fetch in fetches(found.module)]
    return {
        "bytes": found.total_bytes,
        "temp": found.temp_bytes,
        "host": sum(a.bytes for a in found.allocations if a.space == buffers.HOST),
        "fetches": copies,
    }


def cells(only: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, target, layers and variant of each row that contains `only`."""
    for target in TARGETS:
        for name in VARIANTS:
            if ONLY.get(name, target) != target:
                continue
            for layers in ("unrolled",) if name in ONLY else LAYERS:
                if only in (key := f"{target}, {layers}, {name}"):
                    yield key, target, layers, name


def bytes_table() -> None:
    """Write the table of the bytes without and with the flags."""
    head = ["devices", "layers", "plan", "GiB without flags", "with flags", "with / without",
            "seconds to the schedule, without", "with"]  # fmt: skip
    rows: list[list[str]] = []
    for key, target, layers, name in cells(""):
        found = known(RESULTS).get(key, {})
        if {"without", "with"} <= found.keys():
            before, after = found["without"], found["with"]
            sizes = [f"{one['bytes'] / 2**30:.3f}" for one in (before, after)]
            seconds = [f"{one['seconds']:.0f}" for one in (before, after)]
            ratio = f"{after['bytes'] / before['bytes']:.3f}"
            rows.append([target, layers, name, *sizes, ratio, *seconds])
    write_table(HERE, head, rows, "bytes", "devices that are not here")


def copies_table() -> None:
    """Write the table of the copies back from the host."""
    head = ["devices", "layers", "plan", "GiB on the host, of each", "copies back, without flags",
            "with flags"]  # fmt: skip
    rows: list[list[str]] = []
    for key, target, layers, name in cells(""):
        found = known(RESULTS).get(key, {})
        if {"without", "with"} <= found.keys() and found["without"]["host"]:
            texts = [
                described([Fetch(**one) for one in found[when]["fetches"]])
                for when in ("without", "with")
            ]
            host = f"{found['without']['host'] / 2**30:.2f}"
            rows.append([target, layers, name, host, *texts])
    write_table(HERE, head, rows, "copies", "devices that are not here")


def parts_table() -> None:
    """Write the table of the rows whose flags are measured in parts."""
    rows: list[list[str]] = []
    for key, parts in PARTS.items():
        found = known(RESULTS).get(key, {})
        for when in ("without", "with", *parts):
            if when in found:
                ratio = f"{found[when]['bytes'] / found['without']['bytes']:.3f}"
                copies = described([Fetch(**one) for one in found[when]["fetches"]])
                size = f"{found[when]['bytes'] / 2**30:.3f}"
                rows.append([key, when, size, ratio, copies])
    head = ["devices, layers, plan", "flags", "GiB", "of the bytes without flags", "copies back"]
    write_table(HERE, head, rows, "parts", "devices that are not here")


def main() -> None:
    """Measure what is not known, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows that contain this text")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for key, target, layers, name in () if options.tables else cells(options.only):
        parts = PARTS.get(key, {})
        for when, flags in {"without": {}, "with": TARGETS[target], **parts}.items():
            if when not in known(RESULTS).get(key, {}):
                found = measure(target, layers, name, flags)
                keep(RESULTS, key, known(RESULTS).get(key, {}) | {when: found})
                print(f"{key}, {when}: {found['bytes']}, {found['seconds']:.0f} s", flush=True)
    bytes_table()
    copies_table()
    parts_table()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
