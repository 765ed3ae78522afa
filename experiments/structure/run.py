"""Count the functions of xform that run for one call, and the modules that a reader meets.

python -m experiments.structure.run NAME     # count, under a name such as "before"
python -m experiments.structure.run --write  # the table of all counts
"""

from __future__ import annotations

import ast
import collections
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

import xform
from experiments.report import keep, known, write_table

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ROOT / "xform"
RESULTS = HERE / "results.json"
LAYERS, WIDTH, ROWS = 12, 128, 1024


def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A scan of twelve layers."""
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)


def step(ws: jax.Array, state: Any, x: jax.Array) -> tuple[jax.Array, Any, jax.Array]:
    """A step of Adam."""
    value, gradient = xform.value_and_grad(loss)(ws, x)
    updates, state = optax.adam(1e-3).update(gradient, state)
    return ws + updates, state, value


def called(run: Callable[[], object]) -> set[CodeType]:
    """Return the functions of xform that run, in all threads but those that run already."""
    found: set[CodeType] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    ours = {code for code in found if Path(code.co_filename).is_relative_to(SOURCES)}
    return {code for code in ours if not code.co_name.startswith("<")}  # no lambdas, no loops


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls by name. Imports are over before anything is counted."""
    ws = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH
    x, state = jnp.ones((ROWS, WIDTH)), optax.adam(1e-3).init(ws)
    return {
        "jax.jit(xform.grad(loss)).lower": lambda: jax.jit(xform.grad(loss)).lower(ws, x),
        'xform.jit(step, "budget:14MiB")': lambda: xform.jit(step, "budget:14MiB")(ws, state, x),
        "str(xform.memory_analysis(jax.grad(loss)))": lambda: str(
            xform.memory_analysis(jax.grad(loss), ws, x)
        ),
    }


def functions_and_files(name: str) -> list[int]:
    """Return how many functions and files run for a call, which has run once before."""
    calls()[name]()
    jax.clear_caches()
    codes = called(calls()[name])
    return [len(codes), len({code.co_filename for code in codes})]


def modules() -> dict[str, int]:
    """Count lines, modules, modules with one importer, and modules that share a basename."""
    paths = sorted(SOURCES.rglob("*.py"))
    importers = collections.defaultdict[str, set[Path]](set)
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                here = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                here = {alias.name for alias in node.names}
            else:
                continue
            for name in here & names.keys():
                importers[name].add(path)
    inits = [path for path in paths if path.name.startswith("__")]
    stems = collections.Counter(path.stem for path in paths if path not in inits)
    return {
        "lines": sum(len(path.read_text().splitlines()) for path in paths),
        "modules": len(paths),
        "modules with one importer": sum(len(found) == 1 for found in importers.values()),
        "modules that share a basename": sum(n for n in stems.values() if n > 1),
    }


def count(name: str) -> None:
    """Count everything, each call in a process of its own, and keep the counts under a name."""
    found: dict[str, Any] = {}
    for call in calls():
        command = [sys.executable, "-m", __spec__.name if __spec__ else "", "--call", call]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[call] = list(map(int, out.split()[-2:]))
    keep(RESULTS, name, found | modules())


def main() -> None:
    """Count under the given name, then print the table."""
    if sys.argv[1:2] == ["--call"]:
        print(*functions_and_files(sys.argv[2]))
        return
    if sys.argv[1:]:
        count(sys.argv[1])
    results = known(RESULTS)
    text = lambda n: f"{n[0]} in {n[1]}" if isinstance(n, list) else f"{n:,}"
    rows = [[what, *(text(found[what]) for found in results.values())]
            for what in next(iter(results.values()))]  # fmt: skip
    write_table(HERE, ["", *results], rows)


if __name__ == "__main__":
    main()
