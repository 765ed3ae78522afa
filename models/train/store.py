"""Checkpoints of training states, written by Orbax and verified by checksums when read."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from models.errors import InputError
from models.train.checksum import all_finite, checksum_of, checksums, leaves_by_path
from models.train.folder import set_aside
from models.train.host import to_device
from models.train.state import TrainState

Meta = dict[str, Any]


class Damaged(Exception):
    """A checkpoint cannot be read, or its content has changed."""


class Store:
    """The checkpoints of a run, each in a folder that appears only when it is complete.

    A checkpoint has a state and a JSON dictionary `meta`, with the run's settings and the position
    in the data. The newest `keep` checkpoints are kept, and the `keep_best` ones with the lowest
    `metric` of their validation.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, keep_best: int = 1, background: bool = True,
        read_only: bool = False, metric: str = "validation_loss",
    ) -> None:  # fmt: skip
        self.folder, self._metric = folder.resolve(), metric
        _silence_libraries()
        best = BestN(
            get_metric_fn=lambda metrics: metrics[metric],
            reverse=True,
            n=keep_best,
            keep_checkpoints_without_metrics=False,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy([LatestN(keep), best]),
            enable_async_checkpointing=background,
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
        )
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot use {folder} for checkpoints: {_one_line(error)}") from error

    def steps(self) -> list[int]:
        """Return the saved steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, meta: Meta, metric: float | None = None) -> None:
        """Write a state. With `background` the writing continues after the return.

        `metric` is the metric of its validation, if there was one.

        Raises:
          InputError: the state is not finite, or this write or the one before it failed, for
            example because the disk is full.
        """
        if not all_finite((state.params, state.statistics, state.average)):
            raise InputError(
                f"the parameters after step {step} are not finite, and were not saved;"
                f" {self._intact()}: lower --learning-rate"
            )
        leaves = leaves_by_path(state)
        meta = {**meta, "step": step, "checksums": checksums(leaves)}
        if jax.default_backend() == "cpu":
            # The next step reuses the memory of the state while it is still being written.
            leaves = _copied(leaves)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave({"meta": meta, "checksum": checksum_of(meta)}),
        )
        metrics = None if metric is None else {self._metric: metric}
        self._write(lambda: self._manager.save(step, args=args, metrics=metrics))

    def wait(self) -> None:
        """Wait until all saved states are on disk. Raises as `save` does."""
        self._write(self._manager.wait_until_finished)

    def _write(self, call: Callable[[], Any]) -> None:
        _, failure = _attempt(call)
        if failure is not None:
            raise InputError(f"saving to {self.folder} failed, {self._intact()}: {failure}")

    def _intact(self) -> str:
        saved = max(self.steps(), default=None)
        return "no step was saved" if saved is None else f"step {saved} is intact"

    def _read(self, step: int, **args: Any) -> Any:
        composite = ocp.args.Composite(**args)
        try:
            return self._manager.restore(step, args=composite)
        # These libraries raise many types, as in `_attempt`. Their messages about damage name
        # their own files and codecs, so only messages of the operating system are shown.
        except Exception as error:
            what = " and ".join(_NAMES[name] for name in args)
            raise Damaged(_system(error) or f"{what} cannot be read") from None

    def meta(self, step: int) -> Meta:
        """Read the dictionary saved with `step`. Raises `Damaged`."""
        saved = self._read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(saved, dict) or not {"meta", "checksum"} <= saved.keys():
            raise Damaged("it was not written by this program")
        if checksum_of(saved["meta"]) != saved["checksum"]:
            raise Damaged("its metadata is not what was saved")
        return saved["meta"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Read the state saved at `step`, with the structure, shapes and shardings of `like`.

        Each device reads only its part of each array. Raises `Damaged`.
        """
        sums = self.meta(step)["checksums"]
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        types = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)
            for name, x in leaves_by_path(like).items()
        }
        if types.keys() != sums.keys():
            raise Damaged("it has other arrays than this model and optimizer")
        leaves: dict[str, jax.Array] = {}
        # Read one array at a time. If several fail together, Orbax raises the first error, and
        # Python reports the others when it exits.
        for name, type_ in types.items():
            args = ocp.args.PyTreeRestore(
                item={name: type_},
                restore_args={name: ocp.ArrayRestoreArgs(sharding=type_.sharding)},
                partial_restore=True,
            )
            leaves |= self._read(step, state=args)["state"]
        if any(leaves[n].shape != t.shape or leaves[n].dtype != t.dtype for n, t in types.items()):
            raise Damaged("its arrays have other shapes than the model's")
        if checksums(leaves) != sums:
            raise Damaged("its values are not what was saved")
        # Copy: a step can only reuse memory that JAX allocated.
        leaves = _copied(leaves)
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in types])

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename every checkpoint later than `step`, so that a run resumed there can save again.

        The first process renames, and the others wait. Return the new names.
        """
        renamed: list[Path] = []
        if jax.process_index() == 0:
            later = [s for s in self.steps() if s > step]
            renamed = [set_aside(self.folder / str(s)) for s in later]
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("later checkpoints are set aside")
        self._manager.reload()
        return renamed

    def close(self) -> None:
        """Stop the background threads. Unfinished checkpoints are not saved."""
        _attempt(self._manager.close)


@jax.jit
def _copied(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    copy = lambda x: jax.device_put(jnp.copy(to_device(x)), jax.typeof(x).memory_space)
    return jax.tree.map(copy, leaves)


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result of `call` and None, or None and a one-line reason why it failed."""
    try:
        return call(), None
    # Orbax and TensorStore raise ValueError, OSError, KeyError, RuntimeError and plain Exceptions.
    except Exception as error:
        return None, _one_line(error)


_NAMES = {"state": "its arrays", "meta": "its metadata"}


def _one_line(error: BaseException) -> str:
    return _system(error) or _message(error).splitlines()[0][:200]


def _message(error: BaseException) -> str:
    return str(error.args[0] if error.args else error).strip() or type(error).__name__


def _system(error: BaseException) -> str:
    """Return the operating system's message for an error, or "" for another kind of error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    found = re.search(r"([^:\n]+) \[os_error_code", _message(error))
    return found[1].strip() if found else ""


def _silence_libraries() -> None:
    """Silence messages that accompany the exception of a failed read or write.

    Orbax logs each error that it raises. Tasks of TensorStore that were still running raise
    unraisable exceptions at any later time, so this is never undone.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _DropTensorStore):
        sys.unraisablehook = _DropTensorStore(sys.unraisablehook)


@dataclasses.dataclass(frozen=True)
class _DropTensorStore:
    """A hook for unraisable exceptions that drops TensorStore's and passes on all others.

    TensorStore's come from an event loop that the first error closed, and from cancelled reads.
    """

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        given_up = inspect.iscoroutine(unraisable.object)
        if not given_up and str(unraisable.exc_value) != "Event loop is closed":
            self.before(unraisable)
