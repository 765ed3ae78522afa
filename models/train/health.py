"""Health reports of a run: statistics of each layer's activations and gradients, and alerts.

They are made every `--health-every` steps, by `xform.diagnosis`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.train.board import Board
from models.train.config import RunConfig
from models.train.display import Display
from models.train.log import Log
from models.train.mesh import types_on
from models.train.planned import one_line
from models.train.state import abstract_state
from models.train.step import compile_step, dropout_key, make_loss
from xform.diagnosis import Diagnosis, HealthStream


def diagnosis(run: RunConfig, mesh: Mesh | None = None) -> Diagnosis:
    """Make the diagnosis of the layers in a run's loss, for one batch of a step."""
    axes = None if mesh is None else mesh.abstract_mesh
    loss, state = make_loss(run.model, mesh=axes), abstract_state(run.model, run.optim, mesh)
    slice_ = jax.tree.map(lambda x: x.update(shape=x.shape[1:]), run.batch_type())
    key = jax.eval_shape(lambda: dropout_key(run.model, run.seed, jnp.zeros((), jnp.int32)))
    scale = state.loss_scale and state.loss_scale.value

    given = state.statistics, types_on(slice_, mesh, axis=0), key, scale
    return Diagnosis(lambda params, given: loss(params, *given), state.params, given, has_aux=True)


class Health:
    """The training step with health readings, and the stream that they go to.

    This step updates the parameters like any other step. It is a second compiled program, which is
    not made without `--health-every`.

    Args:
      run: the settings.
      mesh: the mesh of the state; None for one device.
      path: the file of the stream; None in all processes but the first.
      after: the step that a resumed run begins after; None in a new run.
      log: gets the alerts of each report.
      display: shows each alert.
      board: gets the numbers of each layer; None without `--tensorboard`.
    """

    def __init__(self, run: RunConfig, mesh: Mesh | None, path: Path | None, after: int | None,
                 log: Log, display: Display, board: Board | None = None) -> None:  # fmt: skip
        self._every, self._log = run.health_every, log
        if not self._every:
            return
        measured, batch = diagnosis(run, mesh), types_on(run.batch_type(), mesh, axis=1)
        self._step = compile_step(run.model, run.optim, batch, None, run.seed, mesh, measured)
        with one_line():
            self._stream = HealthStream(
                measured, path, every=self._every, board=board and board.events, after=after,
                on_alert=lambda alert: display.say(f"health: {alert}"),
            )  # fmt: skip

    def due(self, step: int) -> bool:
        """Return whether step number `step` needs readings (the statistics of each layer)."""
        return self._every > 0 and self._stream.due(step)

    def step(self, state: Any, batch: Any) -> Any:
        """Run the step with readings."""
        return self._step(state, batch)

    def write(self, step: int, loss: float, read: Any) -> None:
        """Write the readings `read` of a step.

        The numbers of all layers go to the file, and new alerts to the log and to the display too.
        """
        with one_line():
            alerts = self._stream.write(step, loss, read)
        self._log.write(step=step, health=[dataclasses.asdict(alert) for alert in alerts])
