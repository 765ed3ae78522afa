"""Compare the report's total with the resident memory of a process that runs the program."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import xform
from experiments.planner.zoo import ZOO
from experiments.report import write_table

HERE = Path(__file__).parent
MIB = 2**20
POLICIES = ("min_cut", "save_everything", "save_nothing")
HEAD = [
    "model",
    "policy",
    "headline MiB",
    "resident growth MiB",
    "growth - headline",
    "within 10% + 100 MB",
]


def resident(pid: str = "self") -> int:
    """Return the resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def watch(pid: int, top: Any, done: Any) -> None:
    """Record the largest resident size of a process."""
    while not done.value:
        top.value = max(top.value, resident(str(pid)))


def measure(name: str, policy: str) -> dict[str, int]:
    """Return the reported total and the growth, in a process that has run nothing before.

    Memory that compiling leaves behind is released first. Another process observes the size.
    """
    loss, args = ZOO[name]()
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    values = jax.tree.map(np.asarray, args)
    step = jax.jit(xform.value_and_grad(loss, policy=getattr(xform.policies, policy)))
    headline = xform.memory_analysis(step, *types).total_bytes
    run = step.lower(*types).compile()
    del args
    jax.clear_caches()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    spawn = multiprocessing.get_context("fork")
    top, done = spawn.Value("q", 0), spawn.Value("b", 0)
    before = resident()
    watcher = spawn.Process(target=watch, args=(multiprocessing.current_process().pid, top, done))
    watcher.start()
    held = jax.tree.map(jax.numpy.array, values)
    for _ in range(3):
        jax.block_until_ready(run(*held))
    done.value = 1
    watcher.join()
    return {"headline": headline, "growth": top.value - before}


def main() -> None:
    """Run every model under every policy in a separate process, and write the table."""
    rows: list[list[str]] = []
    for name in ZOO:
        for policy in POLICIES:
            command = [sys.executable, "-m", "experiments.memory_truth.resident", name, policy]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = json.loads(said.splitlines()[-1])
            headline, growth = found["headline"], found["growth"]
            off = growth - headline
            near = abs(off) <= 0.1 * headline + 1e8
            rows.append([name, policy, f"{headline / MIB:.0f}", f"{growth / MIB:.0f}",
                         f"{off / MIB:+.0f}", "yes" if near else "no"])  # fmt: skip
            print(rows[-1], flush=True)
    write_table(HERE, HEAD, rows, "resident")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
