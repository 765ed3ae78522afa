"""Health reports of a run: statistics of each layer's activations and gradients.

They are made every `--health-every` steps, by `xform.diagnosis`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.train.config import RunConfig
from models.train.display import Display
from models.train.log import Log
from models.train.mesh import types_on
from models.train.state import abstract_state
from models.train.step import compile_step, dropout_key, make_loss
from xform.diagnosis import Diagnosis


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
    """The training step with health readings, and the files that they go to.

    This step updates the parameters like any other step. It is a second compiled program, which is
    not made without `--health-every`.
    """

    def __init__(self, run: RunConfig, mesh: Mesh | None, file: Log, log: Log, display: Display
                 ) -> None:  # fmt: skip
        self._every, self._file, self._log, self._display = run.health_every, file, log, display
        if not self._every:
            return
        self._diagnosis, batch = diagnosis(run, mesh), types_on(run.batch_type(), mesh, axis=1)
        self._step = compile_step(
            run.model, run.optim, batch, None, run.seed, mesh, self._diagnosis
        )

    def due(self, step: int) -> bool:
        """Return whether step number `step` needs readings (the statistics of each layer)."""
        return self._every > 0 and step % self._every == 0

    def step(self, state: Any, batch: Any) -> Any:
        """Run the step with readings."""
        return self._step(state, batch)

    def write(self, step: int, loss: float, read: Any) -> None:
        """Write the readings `read` of a step.

        All layers go to the file. Layers at fault also go to the log and to the display.
        """
        report = self._diagnosis.report([loss], read)
        self._file.write(step=step, loss=loss, rows=report.to_dict()["rows"])
        faults = [{"layer": row.title, "verdict": row.verdict} for row in report.findings]
        self._log.write(step=step, health=faults)
        self._display.say(f"step {step}: health of the {report.summary()}")
