"""From what `--policy` says to a Plan, and to the compiled step whose backward pass follows it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import xform
from models.errors import InputError
from models.train.config import RunConfig
from models.train.device import capacity
from models.train.mesh import batch_sharding
from models.train.precision import rounded
from models.train.state import TrainState, abstract_state, device_bytes
from models.train.step import compile_step, dropout_key, make_loss
from xform.errors import BudgetInfeasible, OtherProgram, XformError

# How often a step is compiled for a budget; how much of what it is over by is taken off.
COMPILES, FURTHER = 5, 1.05
# Lines of a plan that are printed; its file has all.
ROWS = 12


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A compiled step, with the plan of its backward pass.

    Attributes:
      plan: what is kept for the backward pass, and what is run again.
      step: the program.
      predicted_bytes: of the whole step on each device: the plan's, and what is around it; None on
        a mesh where no compiler was asked, since a plan alone does not know what of it is where.
      total_bytes: the same, as the compiler says.
    """

    plan: xform.Plan
    step: jax.stages.Compiled
    predicted_bytes: int | None
    total_bytes: int

    def __str__(self) -> str:
        *table, peak, work = str(self.plan).splitlines()
        shown = table[: 2 + ROWS]
        if left := len(table) - len(shown):
            shown.append(f"... {left} smaller ones")
        step = f"{mebibytes(self.total_bytes)} compiled"
        if self.predicted_bytes is None:
            step = f"the whole step, on each device: {step}"
        else:
            error = self.predicted_bytes / self.total_bytes - 1
            predicted = f"{mebibytes(self.predicted_bytes)} predicted"
            step = f"the whole step: {predicted}, {step} ({error:+.1%})"
        return "\n".join([*shown, peak, work, step])

    def save(self, path: Path) -> None:
        """Write the plan, to be read again when the run goes on."""
        try:
            self.plan.save(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None


def mebibytes(n: float) -> str:
    """Bytes for people."""
    return f"{n / 2**20:,.1f} MiB"


def policy_of(text: str) -> Any:
    """The policy that `--policy` names: `default`, `plan:FILE`, or what xform calls it."""
    kind, _, rest = text.partition(":")
    with one_line():
        if kind == "plan":
            return load_plan(Path(rest))
        return xform.policies.parse("min_cut" if text == "default" else text, f"--policy {text}")


def load_plan(path: Path) -> xform.Plan:
    """A plan from a file."""
    with one_line():
        try:
            return xform.Plan.load(path)
        except OSError as error:
            raise InputError(f"cannot read the plan {path}: {error.strerror}") from None


@contextlib.contextmanager
def one_line() -> Iterator[None]:
    """Turn an error of xform into an `InputError`."""
    try:
        yield
    except BudgetInfeasible:
        raise
    except XformError as error:
        parts = f"{error.asked}: {error.blocked}; {error.remedy}"
        raise InputError(" ".join(parts.split())) from None


def bytes_around(run: RunConfig, state: TrainState) -> int:
    """What a step holds on each device besides its gradient, and the parameters that this is of.

    The masters of rounded parameters, the optimizer, a sum of gradients.
    """
    params, masters = device_bytes(state.params), run.optim.weights != "float32"
    return device_bytes(state) + params * (int(run.accumulate > 1) - int(not masters))


def plan_step(run: RunConfig, policy: Any, mesh: Mesh | None = None) -> PlannedStep:
    """Plan the gradient, and compile the step by it.

    A budget of the peak, and `auto`, bound the whole step, as the compiler says: what it is over by
    is taken off the budget of the gradient, until the step fits. For that on a `mesh` the
    gradient is compiled too, since only a compiler knows what of it is on each device.

    Raises:
      InputError: no plan fits, or the step is over the memory of the device.
    """
    state = abstract_state(run.model, run.optim, mesh)
    tokens = run.tokens_type()
    around_mesh = None if mesh is None else mesh.abstract_mesh
    if mesh is not None:
        tokens = tokens.update(sharding=batch_sharding(mesh, run.batch, axis=1))
    most = capacity()
    if (least := device_bytes((state, tokens))) > most:
        raise _too_large(least, "parameters, optimizer and one batch alone")
    around = bytes_around(run, state)
    bound = None
    if isinstance(policy, xform.policies.Fit):
        bound = most
    elif isinstance(policy, xform.policies.Budget) and policy.of == "peak":
        bound = policy.bytes

    def made(policy: Any) -> PlannedStep:
        with one_line():
            plan = policy
            if not isinstance(plan, xform.Plan):
                slice_ = jax.ShapeDtypeStruct(tokens.shape[1:], tokens.dtype)
                if mesh is not None:
                    slice_ = slice_.update(sharding=batch_sharding(mesh, run.batch, axis=0))
                key = jax.eval_shape(lambda: dropout_key(run.model, run.seed, jnp.int32(0)))
                loss = make_loss(run.model, mesh=around_mesh)
                params, scale = rounded(state.params, run.optim), state.loss_scale
                plan = xform.plan(loss, params, slice_, key, scale and scale.value, policy=policy,
                                  verify=mesh is not None and bound is not None)  # fmt: skip
            try:
                step = compile_step(run.model, run.optim, tokens, plan, run.seed, mesh)
            except OtherProgram:
                raise InputError(
                    f"{plan!r} is of another model, batch or version of JAX: give another --policy"
                ) from None
        memory: Any = step.memory_analysis()
        total = memory.argument_size_in_bytes + memory.output_size_in_bytes
        total += memory.temp_size_in_bytes - memory.alias_size_in_bytes
        gradient = plan.predicted_bytes if mesh is None else plan.compiled_bytes
        return PlannedStep(plan, step, None if gradient is None else gradient + around, total)

    def fitted(bound: int) -> PlannedStep:
        outside = around
        found = None
        for _ in range(COMPILES):
            try:
                budget = xform.policies.budget(max(0, bound - outside))
                found = made(dataclasses.replace(budget, regions=policy.regions))
            except BudgetInfeasible as error:
                raise InputError(
                    f"--policy {run.policy}: the lowest peak of a step that was found is"
                    f" {mebibytes(error.floor_bytes + outside)}: raise the budget, or lower --batch"
                    " or --context"
                ) from None
            if found.total_bytes <= bound:
                return found
            outside += math.ceil(FURTHER * (found.total_bytes - bound))
        assert found is not None
        raise InputError(
            f"--policy {run.policy}: the step takes {mebibytes(found.total_bytes)}, with"
            f" {found.plan.policy} for its gradient, and {mebibytes(bound)} were given: raise the"
            " budget, or lower --batch"
        )

    if bound is not None:
        return fitted(bound)
    found = made(policy)
    if found.total_bytes > most:
        raise _too_large(found.total_bytes, "the step")
    return found


def _too_large(n: int, what: str) -> InputError:
    return InputError(
        f"{what} takes {mebibytes(n)}, and the device has {mebibytes(capacity())}: lower --batch or"
        " --context (--fit finds the largest), or give --policy auto"
    )
