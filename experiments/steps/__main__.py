"""Does `xform.jit` keep a budget of a whole step? Twelve steps, five budgets, five placements."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import xform
from experiments.report import keep, known, replace, table
from experiments.steps.programs import STEPS, Step
from xform.errors import BudgetInfeasible
from xform.policies import budget

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
MIB = 2**20
# Parts of the bytes that the step takes without a budget.
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6)
# For each placement, the kind of the mesh's axes and how weights are sharded; None: one device.
MESHES: dict[str, tuple[AxisType, str] | None] = {
    "one device": None,
    "data": (AxisType.Auto, "data"),
    "fsdp": (AxisType.Auto, "fsdp"),
    "tensor": (AxisType.Auto, "tensor"),
    "data, explicit": (AxisType.Explicit, "data"),
}


@contextlib.contextmanager
def placed(step: Step, name: str) -> Iterator[list[Any]]:
    """Yield the arguments of a step on one device, or sharded over a mesh."""
    kind = MESHES[name]
    if kind is None:
        yield list(step.args)
        return
    axis, how = kind
    mesh = Mesh(np.array(jax.devices()), ("device",), axis_types=(axis,))

    def put(x: Any, is_batch: bool) -> Any:
        if not isinstance(x, jax.Array):
            return x
        return jax.device_put(x, NamedSharding(mesh, spec(x, is_batch, how, mesh.size)))

    with jax.set_mesh(mesh):
        yield [
            jax.tree.map(lambda x, i=i: put(x, i in step.batches), arg)
            for i, arg in enumerate(step.args)
        ]


def spec(x: Any, is_batch: bool, how: str, devices: int) -> PartitionSpec:
    """How an argument is sharded over the one axis of a mesh."""
    if is_batch and how != "tensor":
        return PartitionSpec("device")
    where = {"fsdp": x.ndim - 2, "tensor": x.ndim - 1}.get(how, -1)
    if is_batch or x.ndim < 2 or where < 0 or x.shape[where] % devices:
        return PartitionSpec()
    return PartitionSpec(*[None] * where, "device")


def measure(name: str, mesh: str) -> dict[str, Any]:
    """Plan and run one step under each budget."""
    step = STEPS[name]()
    with placed(step, mesh) as args, xform.install():
        copies = lambda: jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
        plain = jax.jit(step.run, donate_argnums=step.donated)
        start = time.perf_counter()
        compiled = plain.lower(*args).compile()
        once = time.perf_counter() - start
        stats = compiled.memory_analysis()
        want = plain(*copies())
        first = total(stats)
        found: dict[str, Any] = {"bytes": first, "alias": stats.alias_size_in_bytes, "budgets": {}}
        for part in BUDGETS:
            one = planned(step, args, copies, int(part * first), want)
            one["compilations"] = one.pop("seconds") / once
            if "floor" in one:  # is the floor true?
                again = planned(step, args, copies, one["floor"], want)
                one["floor is kept"] = again.get("bytes", first) <= one["floor"]
            found["budgets"][str(part)] = one
    return found


def planned(step: Step, args: Any, copies: Any, size: int, want: Any) -> dict[str, Any]:
    """Plan for a budget, and run the planned step."""
    fast = xform.jit(step.run, budget(size), donate_argnums=step.donated)
    start = time.perf_counter()
    try:
        stats = fast.lower(*args).compile().memory_analysis()
    except BudgetInfeasible as error:
        return {"floor": error.floor_bytes, "seconds": time.perf_counter() - start}
    # Copies may have other shardings, `P(None)` for `P()`; then the call below plans again.
    seconds, plan = time.perf_counter() - start, fast.plan
    got = fast(*copies())
    return {
        "budget": size,
        "bytes": total(stats),
        "said": plan.compiled_bytes,
        "alias": stats.alias_size_in_bytes,
        "compiles": plan.compiles,
        "recomputed": plan.recompute_flops,
        "difference": difference(got, want),
        "seconds": seconds,
    }


def total(stats: Any) -> int:
    """Return argument, output and temporary bytes on a device, less the donated ones."""
    kinds = (stats.argument_size_in_bytes, stats.output_size_in_bytes, stats.temp_size_in_bytes)
    return sum(kinds) - stats.alias_size_in_bytes


def difference(got: Any, want: Any) -> float:
    """Return the largest difference of two trees of arrays, relative to each array's largest."""
    most = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jax.numpy.issubdtype(b.dtype, jax.dtypes.prng_key):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = np.abs(b).max(initial=0)
        most = max(most, float(np.abs(a - b).max(initial=0) / (scale or 1)))
    return most


def row(key: str, found: dict[str, Any], digits: int = 2) -> list[str]:
    """Return a row of a table: the step, where it runs, its MiB, and what became of each budget."""
    mib = lambda n: f"{n / MIB:.{digits}f}"

    def cell(one: dict[str, Any]) -> str:
        if "floor" in one:
            mark = "" if one["floor is kept"] else ", not kept"
            return f"refused, floor {mib(one['floor'])}{mark}"
        return mib(one["bytes"]) + ("" if one["bytes"] <= one["budget"] else " EXCEEDED")

    return [*key.split(": "), mib(found["bytes"]), *map(cell, found["budgets"].values())]


def tables() -> None:
    """Print the table and the counts."""
    results = {key: found for key, found in known(RESULTS).items() if "budgets" in found}
    rows = [row(key, found) for key, found in results.items()]
    head = ["step", "mesh", "MiB without a budget", *(f"budget {part}" for part in BUDGETS)]
    all_ = [(found, one) for found in results.values() for one in found["budgets"].values()]
    kept = [(found, one) for found, one in all_ if "bytes" in one]
    floors = [one["floor is kept"] for _, one in all_ if "floor" in one]
    lines = [
        f"- {len(kept)} of {len(all_)} budgets were planned; "
        f"{sum(one['bytes'] > one['budget'] for _, one in kept)} of them exceeded.",
        f"- {len(floors)} were refused; {sum(floors)} of these floors are kept if asked for.",
        f"- Donated bytes as without a plan: {sum(f['alias'] == one['alias'] for f, one in kept)}"
        f" of {len(kept)}.",
        f"- Bytes that `plan` says are those of the compiled program: "
        f"{sum(one['said'] == one['bytes'] for _, one in kept)} of {len(kept)}.",
        f"- Largest difference of a result: {max(one['difference'] for _, one in kept):.0e}.",
        "- Wall time of planning, in compilations of the step: "
        f"{statistics.median(one['compilations'] for _, one in all_):.1f} at the median. "
        f"Programs compiled: {statistics.median(one['compiles'] for _, one in kept):.0f} at the "
        f"median, {max(one['compiles'] for _, one in kept)} at most.",
    ]
    stamp = f"Measured with JAX {jax.__version__} on a CPU; 8 devices are forced."
    replace(HERE, "steps", [*lines, "", *table(head, rows), "", stamp])


def main() -> None:
    """Measure what is not known, each step and mesh in a process; then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--one", nargs=2, metavar=("STEP", "MESH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, mesh = options.one
        keep(RESULTS, f"{name}: {mesh}", measure(name, mesh))
        return
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    for name in () if options.tables else STEPS:
        for mesh in MESHES:
            if f"{name}: {mesh}" in known(RESULTS):
                continue
            command = [sys.executable, "-m", "experiments.steps", "--one", name, mesh]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1][:200]
                keep(RESULTS, f"{name}: {mesh}", {"failed": last})
            print(f"{name}, {mesh}: {'failed' if done.returncode else 'done'}", flush=True)
    tables()


if __name__ == "__main__":
    main()
