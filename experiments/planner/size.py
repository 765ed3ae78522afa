"""How long planning takes: flat programs, a large loop body, many layers, and those on a budget."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import scipy  # its parts are imported when they are first used
from jax import lax

import xform
from experiments.bench_step.run import transformer
from experiments.planner.optimum import joint_of
from experiments.report import write_table
from xform.interpret.joint import Joint, analyze
from xform.planner.costs.outcome import recompute_flops, saved_bytes
from xform.planner.cuts import blocks
from xform.planner.cuts.fit import propose_by_prices
from xform.planner.decide import best_of_proposals, schedule
from xform.policies import MinCut
from xform.program.ir import trace

HERE = Path(__file__).parent
HEAD = ["program", "equations of the joint", "CPU seconds: trace", "analyze and plan", "all", "GB"]
BLOCKS = ["layers, part of what min_cut saves", "forward equations", "blocks",
          "CPU seconds: blocks", "prices", "of the budget saved",
          "work again, to that by prices"]  # fmt: skip


def chain(n: int) -> Callable[[jax.Array], jax.Array]:
    """So many elementwise operations in a row."""

    def f(x: jax.Array) -> jax.Array:
        for _ in range(n // 2):
            x = lax.mul(lax.sin(x), 1.01)
        return jnp.sum(x)

    return f


def body(n: int) -> Callable[[jax.Array], jax.Array]:
    """A loop with so many operations in its body."""
    return lambda x: jnp.sum(lax.scan(lambda x, _: (chain(n)(x) + x, None), x, None, length=4)[0])


def layers(n: int) -> Callable[[jax.Array], jax.Array]:
    """So many equal layers, one after the other."""

    def f(x: jax.Array) -> jax.Array:
        for _ in range(n):
            x = x + jnp.tanh(jax.nn.silu(x @ x) @ x) * jax.nn.softmax(x @ x)
        return jnp.sum(x)

    return f


CASES = {
    "a chain, 100,000 equations in its joint": lambda: (chain(40_000), jnp.ones(4)),
    "a loop body of 10,000": lambda: (body(10_000), jnp.ones(4)),
    "12 layers": lambda: (layers(12), jnp.ones((8, 8))),
    "96 layers": lambda: (layers(96), jnp.ones((8, 8))),
}


def count(joint: Joint) -> int:
    """Equations of a joint, and of those within its nodes."""
    inner = {j for e in joint.forward if "node" in e.params for j in e.params["node"].joints}
    return len(joint.forward) + len(joint.backward) + sum(map(count, inner))


def one(name: str) -> None:
    """Measure one case, and print its row."""
    f, x = CASES[name]()
    scipy.sparse.csgraph.maximum_flow(scipy.sparse.csr_array((2, 2), dtype="int32"), 0, 1)
    start = time.process_time()
    prog = trace(lambda x: [f(x)], x)
    traced = time.process_time()
    joint = analyze(prog, (True,))
    schedule(joint, xform.policies.min_cut, backend="cpu")
    end = time.process_time()
    # Not `ru_maxrss`, which a process takes over from the one that started it.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    memory = int(peak) / 2**20
    cells = [f"{count(joint):,}", f"{traced - start:.2f}", f"{end - traced:.2f}",
             f"{end - start:.2f}", f"{memory:.2f}"]  # fmt: skip
    print("|".join([name, *cells]))


def budgets(depth: int, part: float) -> list[str]:
    """A row on unrolled transformer layers with a part of what a minimum cut saves as budget."""
    loss, args = transformer(False, None, depth=depth)
    joint = joint_of(loss, args)
    make = lambda how: schedule(joint, how, backend="cpu")
    most, least = make(MinCut()), make(MinCut(0.0, 0.0))
    n = int(part * saved_bytes(most))
    start = time.process_time()
    chosen = blocks.decide_by_blocks(most, n)
    assert chosen is not None
    made = make(chosen)
    solved = time.process_time()
    priced = best_of_proposals(joint, propose_by_prices(least, n), "cpu")
    end = time.process_time()
    work = recompute_flops(made) / recompute_flops(priced)
    classes = blocks.equal_blocks(most)
    return [f"{depth} layers, {part:.0%}", f"{len(joint.forward):,}",
            f"{sum(map(len, classes))} in {len(classes)} classes", f"{solved - start:.2f}",
            f"{end - solved:.2f}", f"{saved_bytes(made) / n:.3f}", f"{work:.3f}"]  # fmt: skip


def lowered() -> float:
    """Trace + lower of 48 unrolled transformer layers, as a multiple of `jax.grad`'s."""
    loss, args = transformer(False, None, depth=48)
    seconds: list[float] = []
    for transform in (jax.value_and_grad, xform.value_and_grad):
        start = time.perf_counter()
        jax.jit(lambda *a, t=transform: t(loss)(*a)).lower(*args)
        seconds.append(time.perf_counter() - start)
    return seconds[1] / seconds[0]


def main() -> None:
    """Measure each case in a process of its own, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one")
    parser.add_argument("--budgets", action="store_true", help="that table alone")
    options = parser.parse_args()
    if options.one:
        one(options.one)
        return
    rows = [budgets(96, part) for part in (0.8, 0.4, 0.1)]
    write_table(HERE, BLOCKS, rows, "blocks")
    if options.budgets:
        return
    rows = []
    for name in CASES:
        command = [sys.executable, "-m", "experiments.planner.size", "--one", name]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        rows.append(out.strip().splitlines()[-1].split("|"))
        print(rows[-1], flush=True)
    ratio = f"{lowered():.2f} of jax.grad's"
    rows.append(["48 unrolled transformer layers, trace and lower", "", "", "", ratio, ""])
    write_table(HERE, HEAD, rows, "size")


if __name__ == "__main__":
    main()
