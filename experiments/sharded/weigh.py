"""Bytes on each device of a training step on a mesh of TPUs that are not here, by shapes alone."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

import xform
from models.nets.presets import TRAINED
from models.train.config import RunConfig
from models.train.fit import bytes_around
from models.train.mesh import abstract_mesh, batch_sharding
from models.train.state import abstract_state
from models.train.step import make_loss, train_step
from xform.errors import BudgetInfeasible

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Weighed:
    """What a compiler says of a step on each device.

    Attributes:
      bytes: at its peak; None if no plan fits.
      fits: whether the device has so many.
      again: FLOPs run again, in parts of the forward pass's; None where no plan was made.
      seconds: to plan and to compile.
      floor: the lowest peak that was found, where no plan fits.
    """

    bytes: int | None
    fits: bool
    again: float | None
    seconds: float
    floor: int | None = None


def weigh(preset: str, batch: int, context: int, mesh: str, target: str, policy: Any) -> Weighed:
    """Plan the gradient of a model in bfloat16 for a target, and compile a step by it.

    A budget is of the whole step: what is around the gradient, the optimizer's state, is taken off.
    """
    start, devices = time.perf_counter(), abstract_mesh(mesh)
    config: Any = dataclasses.replace(TRAINED[preset], context=context, dtype="bfloat16")
    if hasattr(config, "dropout"):
        config = dataclasses.replace(config, dropout=0.0)
    run = RunConfig(model=config, batch=batch)
    state = abstract_state(config, run.optim, devices)
    tokens = jax.ShapeDtypeStruct((1, batch, context + 1), jnp.uint8)
    tokens = tokens.update(sharding=batch_sharding(devices, batch, axis=1))
    again = None
    if isinstance(policy, xform.policies.Budget | xform.policies.Fit):
        around = bytes_around(run, state)
        if isinstance(policy, xform.policies.Fit):
            policy = xform.policies.fit(reserve=around)
        else:
            policy = xform.policies.budget(policy.bytes - around)
        slice_ = jax.ShapeDtypeStruct(tokens.shape[1:], jnp.uint8)
        slice_ = slice_.update(sharding=batch_sharding(devices, batch, axis=0))
        loss = make_loss(config, mesh=devices)
        try:
            # As within a step that is compiled for a mesh that is not here.
            with jax.sharding.use_abstract_mesh(devices):
                policy = xform.plan(loss, state.params, slice_, policy=policy, target=target)
        except BudgetInfeasible as error:
            return Weighed(None, False, None, time.perf_counter() - start,
                           error.floor_bytes + around)  # fmt: skip
        again = policy.recompute_flops / policy.forward_flops
    one = xform.fits(train_step, config, state, tokens, policy=policy, target=target)
    return Weighed(one.total_bytes, bool(one.fits), again, time.perf_counter() - start)


if __name__ == "__main__":
    preset, batch, context, mesh, target, text = sys.argv[1:]
    asked = None if text == "default" else xform.policies.parse(text, "policy")
    print(weigh(preset, int(batch), int(context), mesh, target, asked))
