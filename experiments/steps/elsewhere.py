"""Does `xform.jit` keep the budget of a step for devices that are not here?"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

import xform
from experiments.report import keep, known, replace, table
from experiments.steps.__main__ import row, spec
from experiments.steps.programs import STEPS, WIDTH
from xform.errors import BudgetInfeasible
from xform.policies import budget

HERE = Path(__file__).parent
RESULTS = HERE / "elsewhere.json"
NAMES = ("Adam", "two jits inside", "GAN")
# The devices, and how many of them the batch is shared by.
TARGETS = {"gpu:h100": 1, "gpu:h100:8": 8, "tpu:v5e:4x4": 16}
BUDGETS = (1.0, 0.8, 0.6)
# The matrices are as wide as this, and a device has as many times more rows of the batch.
WIDE, ROWS = 512, 32


def types(name: str, devices: int) -> list[Any]:
    """Return the types of a step's arguments, larger than in the programs, on a mesh."""
    step = STEPS[name]()
    mesh = AbstractMesh((devices,), ("device",))

    def place(x: Any, is_batch: bool) -> Any:
        if not isinstance(x, jax.Array):
            return x
        *shape, width = (WIDE if n == WIDTH else n for n in x.shape) if x.ndim else (1,)
        if is_batch:
            shape[-1] *= ROWS * devices
        sized = jax.ShapeDtypeStruct((*shape, width) if x.ndim else (), x.dtype)
        if devices == 1:
            return sized
        return sized.update(sharding=NamedSharding(mesh, spec(sized, is_batch, "data", devices)))

    return [
        jax.tree.map(lambda x, i=i: place(x, i in step.batches), arg)
        for i, arg in enumerate(step.args)
    ]


def measure(name: str, target: str) -> dict[str, Any]:
    """Plan a step for a target under each budget; nothing is run."""
    step, args = STEPS[name](), types(name, TARGETS[target])
    with xform.install():

        def plan(policy: Any) -> dict[str, Any]:
            start = time.perf_counter()
            fast = xform.jit(step.run, policy, target=target, donate_argnums=step.donated)
            try:
                lowered = fast.lower(*args)
            except BudgetInfeasible as error:
                return {"floor": error.floor_bytes}
            found = {
                "bytes": lowered.memory_analysis().total_bytes,
                "said": lowered.plan.compiled_bytes,
                "compiles": lowered.plan.compiles,
            }
            return found | {"seconds": time.perf_counter() - start}

        first = plan(None)["bytes"]
        found: dict[str, Any] = {"bytes": first, "budgets": {}}
        for part in BUDGETS:
            one = plan(budget(size := int(part * first))) | {"budget": size}
            if "floor" in one:  # is the floor true?
                again = plan(budget(one["floor"]))
                one["floor is kept"] = again.get("bytes", first) <= one["floor"]
            found["budgets"][str(part)] = one
    return found


def main() -> None:
    """Measure what is not known, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    options = parser.parse_args()
    for target in () if options.tables else TARGETS:
        for name in NAMES:
            if f"{name}: {target}" not in known(RESULTS):
                keep(RESULTS, f"{name}: {target}", measure(name, target))
                print(f"{name}, {target}: done", flush=True)
    head = ["step", "target", "MiB of the default", *(f"budget {part}" for part in BUDGETS)]
    rows = [row(key, found, digits=1) for key, found in known(RESULTS).items()]
    stamp = f"Measured with JAX {jax.__version__}, by the compilers of the targets."
    replace(HERE, "elsewhere", [*table(head, rows), "", stamp])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
