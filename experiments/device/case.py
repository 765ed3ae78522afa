"""One step: compile it in one process, run it in another one, and read the device's memory there.

`python -m experiments.device.case PART MODEL WAY FOLDER` writes `FOLDER/MODEL, WAY.json`. The
compiler tries kernels on the device, and JAX keeps the memory that this took until the process
ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import pickle
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

import xform
from experiments.device.programs import SIZES, Size, state_and_tokens, step_of
from experiments.turns import first_part, second_part, wait_for

STEPS = 20
# Seconds after which planning compiles no further program.
LIMIT = 100
# Programs that autotune at once.
SLOTS = 4
FULL, MINIMAL = "jax.checkpoint, full", "jax.checkpoint, minimal"
SAVEABLE = {
    FULL: jax.checkpoint_policies.nothing_saveable,
    MINIMAL: jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
# Budgets, as a number between the bytes of FULL (0) and those of MINIMAL (1).
BUDGETS = {
    "xform.jit, bytes of full": 0.0,
    "xform.jit, halfway": 0.5,
    "xform.jit, bytes of minimal": 1.0,
}
WAYS = ["jax.grad", FULL, MINIMAL, "xform.grad", "xform.grad, offload", *BUDGETS]


def same(layer: Any) -> Any:
    """Return a layer as it is: no marks."""
    return layer


def way_of(way: str, size: Size) -> Any:
    """Return the step under `jax.grad` with an author's marks, or under `xform.grad` without."""
    policies = jax.checkpoint_policies
    if way in SAVEABLE:
        mark = lambda layer: jax.checkpoint(layer, policy=SAVEABLE[way])
        return step_of(size, jax.value_and_grad, mark)
    if way == "xform.grad, offload":
        policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
        return step_of(size, lambda loss: xform.value_and_grad(loss, policy=policy), same)
    grads = {"jax.grad": jax.value_and_grad, "xform.grad": xform.value_and_grad}
    return step_of(size, grads[way], same)


def budget_of(model: str, way: str, folder: Path) -> int:
    """Return the bytes of a budget. Wait until the two programs that define it were compiled."""
    low, high = (wait_for(f"{model}, {other}", folder)["promised"] for other in (FULL, MINIMAL))
    return int(low + BUDGETS[way] * (high - low))


def compile_step(model: str, way: str, folder: Path, types: Any) -> tuple[Any, dict[str, Any]]:
    """Return the compiled step, with the bytes that it needs and the seconds that it took."""
    size, found = SIZES[model], {}
    if way in BUDGETS:
        budget = budget_of(model, way, folder)
        step: Any = xform.jit(
            step_of(size, xform.value_and_grad, same),
            xform.policies.budget(budget),
            donate_argnums=0,
            time_limit=LIMIT,
        )
        found["budget"] = budget
    else:
        step = jax.jit(way_of(way, size), donate_argnums=0)
    with contextlib.nullcontext() if way in BUDGETS else alone(way, folder):
        start = time.perf_counter()
        compiled = step.lower(*types).compile()
        found["seconds"] = time.perf_counter() - start
    if way in BUDGETS:
        plan = step.plan
        found |= {
            "compiles": plan.compiles,
            "compiling": plan.compile_seconds,
            "recomputed": plan.recompute_flops,
        }
    stats = compiled.memory_analysis()
    kinds = {
        k: getattr(stats, f"{k}_size_in_bytes") for k in ("argument", "output", "temp", "alias")
    }
    total = kinds["argument"] + kinds["output"] + kinds["temp"] - kinds["alias"]
    found |= kinds | {"promised": total, "host": stats.host_temp_size_in_bytes}
    return compiled, found | {"autotuning": peak()}


@contextlib.contextmanager
def alone(way: str, folder: Path) -> Iterator[None]:
    """Wait until few others compile: autotuning of all at once would fill the device."""
    with open(folder / f"slot{WAYS.index(way) % SLOTS}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def peak() -> int | None:
    """Return the most bytes of the device that this process ever held; None without statistics."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] if stats else None


def run(compiled: Any, size: Size) -> dict[str, Any]:
    """Run the step; return its seconds, the losses and the peak of the device."""
    state, tokens = jax.jit(lambda: state_and_tokens(size))()
    before = peak()
    losses: list[float] = []
    seconds: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, loss = compiled(state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return {
        "step": statistics.median(seconds[2:]),
        "losses": losses,
        "before": before,
        "peak": peak(),
        "device": jax.local_devices()[0].device_kind,
    }


def main(part: str, model: str, way: str, folder: Path) -> None:
    """Do one part of the measurement: "compile", or "run" what was compiled."""
    name, size = f"{model}, {way}", SIZES[model]
    file = folder / f"{name}.executable"
    if part == "run":
        run_it = lambda: run(deserialize_and_load(*pickle.loads(file.read_bytes())), size)
        return second_part(name, folder, run_it)

    def compile_it() -> tuple[None, dict[str, Any]]:
        types = jax.eval_shape(lambda: state_and_tokens(size))
        compiled, found = compile_step(model, way, folder, types)
        file.write_bytes(pickle.dumps(serialize(compiled)))
        return None, found

    first_part(name, folder, compile_it)


if __name__ == "__main__":
    main(*sys.argv[1:4], Path(sys.argv[4]))
