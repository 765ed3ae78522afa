"""Plan which values the backward pass saves, from `--policy`, and compile the step with the plan.

A policy is a rule for the choice, such as a memory budget. A plan is the choice for one program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

import xform
from models.errors import InputError
from models.train.config import RunConfig
from models.train.device import capacity
from models.train.mesh import types_on
from models.train.state import TrainState, abstract_state, device_bytes
from models.train.step import check_donation, make_step
from xform.errors import BudgetInfeasible, OtherProgram, XformError

# Number of rows of a plan that are printed. Its file has all of them.
ROWS = 12


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A compiled step, with the plan of its backward pass.

    Attributes:
      plan: which values are saved for the backward pass, and which are recomputed.
      step: the compiled program.
      total_bytes: peak memory of the whole step on each device, according to the compiler.
      host_bytes: bytes of the state in host memory, for each device.
    """

    plan: xform.Plan
    step: jax.stages.Compiled
    total_bytes: int
    host_bytes: int = 0

    def __str__(self) -> str:
        *table, peak, work = str(self.plan).splitlines()
        shown = table[: 2 + ROWS]
        if left := len(table) - len(shown):
            shown.append(f"... and {left} smaller values")
        step = f"the whole step, on each device: {mebibytes(self.total_bytes)} compiled"
        if self.host_bytes:
            step += f", and {mebibytes(self.host_bytes)} of optimizer state in host memory"
        return "\n".join([*shown, peak, work, step])

    def save(self, path: Path) -> None:
        """Write the plan to a file, which a resumed run reads."""
        try:
            self.plan.save(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None


def mebibytes(n: float) -> str:
    """Format a number of bytes in MiB."""
    return f"{n / 2**20:,.1f} MiB"


def policy_of(text: str) -> Any:
    """Return the policy that `--policy` names."""
    with one_line():
        return xform.policies.parse(text, f"--policy {text}")


def load_plan(path: Path) -> xform.Plan:
    """Load a plan from a file."""
    with one_line():
        try:
            return xform.Plan.load(path)
        except OSError as error:
            raise InputError(f"cannot read the plan {path}: {error.strerror}") from None


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Return a context that turns xform's errors, except `BudgetInfeasible`, into `InputError`s."""
    try:
        yield
    except BudgetInfeasible:
        raise
    except XformError as error:
        parts = f"{error.request}: {error.problem}; {error.remedy}"
        raise InputError(" ".join(parts.split())) from None


def whole_step(
    run: RunConfig, mesh: Mesh | AbstractMesh | None = None
) -> tuple[Callable[..., Any], TrainState, Any]:
    """Return the step of a run as a function of state, batch and policy, and the argument types.

    The policy decides which values the backward pass saves. The types are the types of the state
    and of the batch.
    """
    axes = None if mesh is None else mesh.abstract_mesh

    def step(state: TrainState, batch: Any, policy: Any = None) -> Any:
        return make_step(run.model, run.optim, policy, run.seed, axes)(state, batch)

    state = abstract_state(run.model, run.optim, mesh)
    return step, state, types_on(run.batch_type(), mesh, axis=1)


def lowered_step(run: RunConfig, policy: Any, mesh: Mesh | AbstractMesh | None = None,
                 target: str | None = None) -> Any:  # fmt: skip
    """Plan the training step with `xform.jit`. Nothing is allocated.

    A budget of the peak bounds the compiled memory of the whole step on each device.

    Returns:
      The lowered step, with its `plan`.

    Raises:
      InputError: no plan fits, or the plan that is the policy was made for another step.
    """
    step, *types = whole_step(run, mesh)
    planned = xform.jit(step, policy, target=target, donate_argnums=0)
    with one_line():
        try:
            return planned.lower(*types)
        except BudgetInfeasible as error:
            raise InputError(f"--policy {run.policy}: {_infeasible(run, policy, error)}") from None
        except OtherProgram:
            raise InputError(
                f"{policy!r} was made for another model, batch or version of JAX: use another"
                " --policy"
            ) from None


def _infeasible(run: RunConfig, policy: xform.policies.Budget, error: BudgetInfeasible) -> str:
    """Return a text: the smallest budget that was found and can be kept, and a remedy."""
    kind, what = "saved", "the fewest bytes of saved values"
    if policy.of == "peak":
        kind, what = "budget", "the lowest peak of a step"
    enough = f"{-(-error.floor_bytes // 2**10)}KiB"  # rounded up
    more = "" if run.policy == "auto" else f"use --policy {kind}:{enough}, or "
    size = mebibytes(error.floor_bytes)
    return f"{what} that was found is {size}: {more}lower {run.smaller()}"


def plan_step(run: RunConfig, policy: Any, mesh: Mesh | None = None) -> PlannedStep:
    """Plan the gradient in a training step, and compile the step with the plan.

    A budget of the peak, and `auto`, bound the compiled memory of the whole step on each device.

    Raises:
      InputError: no plan fits, or the step needs more than the memory of the device.
    """
    _, state, batch = whole_step(run, mesh)
    most = capacity()
    if (least := device_bytes((state, batch))) > most:
        raise _too_large(run, least, "the state with one batch")
    if isinstance(policy, xform.policies.Fit):
        policy = policy.within(most, "this device")
    lowered = lowered_step(run, policy, mesh)
    compiled = lowered.compile()
    check_donation(compiled, state)
    plan = policy if isinstance(policy, xform.Plan) else plan_of(lowered)
    total = lowered.memory_analysis().total_bytes
    if total > most:
        raise _too_large(run, total, "the step")
    return PlannedStep(plan, compiled, total, device_bytes(state, offloaded=True))


def plan_of(lowered: Any) -> xform.Plan:
    """Return the plan of the one derivative that a step takes."""
    (plan,) = lowered.plan
    return plan


def _too_large(run: RunConfig, n: int, what: str) -> InputError:
    return InputError(
        f"not enough memory: {what} needs {mebibytes(n)}, and the device has"
        f" {mebibytes(capacity())}: lower {run.smaller()} (--largest-batch finds the largest one),"
        " or use --policy auto"
    )
