"""Training states on disk: Orbax writes them, and nothing is read that is not what was written."""

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
from models.train.checksum import all_finite, checksum_of, checksums, named
from models.train.folder import set_aside
from models.train.host import brought
from models.train.state import TrainState

Meta = dict[str, Any]


class Damaged(Exception):
    """A saved step cannot be read back as it was written."""


class Store:
    """The last few states of one run, each in a folder that appears only when it is complete.

    With a state goes a JSON dictionary, `meta`: what the state belongs to and where the data was.
    Besides the newest `keep`, those of the `keep_best` lowest validations, by `metric`, stay.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, keep_best: int = 1, background: bool = True,
        read_only: bool = False, metric: str = "validation_loss",
    ) -> None:  # fmt: skip
        self.folder, self._metric = folder.resolve(), metric
        _say_errors_once()
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
            raise InputError(f"cannot use {folder} for checkpoints: {_line(error)}") from error

    def steps(self) -> list[int]:
        """The saved steps, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, meta: Meta, judged: float | None = None) -> None:
        """Write a state; with `background` the writing goes on after the return.

        `judged` is its validation, if there was one.

        Raises:
          InputError: the state is not finite, or this write, or the one before it, did not succeed
            (a full disk, say).
        """
        if not all_finite((state.params, state.statistics, state.average)):
            raise InputError(
                f"the parameters after step {step} are not finite, and were not saved;"
                f" {self._intact()}: lower --learning-rate"
            )
        leaves = named(state)
        meta = {**meta, "step": step, "checksums": checksums(leaves)}
        if jax.default_backend() == "cpu":
            # The next step reuses the state's memory while this is written from it.
            leaves = _copied(leaves)
        args = ocp.args.Composite(
            state=ocp.args.PyTreeSave(leaves),
            meta=ocp.args.JsonSave({"meta": meta, "checksum": checksum_of(meta)}),
        )
        metrics = None if judged is None else {self._metric: judged}
        self._write(lambda: self._manager.save(step, args=args, metrics=metrics))

    def wait(self) -> None:
        """Return when all that was saved is on disk; raises as `save` does."""
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
        # As for `_attempt`. What these libraries say of damage is about their own files and codecs.
        except Exception as error:
            what = " and ".join(_CALLED[name] for name in args)
            raise Damaged(_system(error) or f"{what} cannot be read") from None

    def meta(self, step: int) -> Meta:
        """The dictionary saved with `step`; raises `Damaged`."""
        saved = self._read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(saved, dict) or not {"meta", "checksum"} <= saved.keys():
            raise Damaged("it was not written by this program")
        if checksum_of(saved["meta"]) != saved["checksum"]:
            raise Damaged("what it says of itself is not what was saved")
        return saved["meta"]

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state saved at `step`, as `like`: its structure, shapes, and shardings if it has any.

        Each array goes to the devices that hold it, and nowhere else. Raises `Damaged`.
        """
        sums = self.meta(step)["checksums"]
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        types = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)
            for name, x in named(like).items()
        }
        if types.keys() != sums.keys():
            raise Damaged("it holds other arrays than this model and optimizer have")
        leaves: dict[str, jax.Array] = {}
        # One array at a time: of several that fail at once, Orbax raises the first, and the
        # interpreter reports the others when it ends.
        for name, type_ in types.items():
            args = ocp.args.PyTreeRestore(
                item={name: type_},
                restore_args={name: ocp.ArrayRestoreArgs(sharding=type_.sharding)},
                partial_restore=True,
            )
            leaves |= self._read(step, state=args)["state"]
        if any(leaves[n].shape != t.shape or leaves[n].dtype != t.dtype for n, t in types.items()):
            raise Damaged("its arrays are not of the shapes that were saved")
        if checksums(leaves) != sums:
            raise Damaged("its values are not those that were saved")
        # A copy, since a step cannot reuse memory that is not JAX's.
        leaves = _copied(leaves)
        return jax.tree.unflatten(jax.tree.structure(like), [leaves[n] for n in types])

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename every saved step later than `step`, so that a run from there can save again.

        Of several processes the first one does, and the others wait.
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
        """Stop the background threads; what they did not finish is not saved."""
        _attempt(self._manager.close)


@jax.jit
def _copied(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
    again = lambda x: jax.device_put(jnp.copy(brought(x)), jax.typeof(x).memory_space)
    return jax.tree.map(again, leaves)


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `call`, or in one line why there is none."""
    try:
        return call(), None
    # Orbax and TensorStore raise ValueError, OSError, KeyError, RuntimeError and Exception itself.
    except Exception as error:
        return None, _line(error)


_CALLED = {"state": "its arrays", "meta": "what it says of itself"}


def _line(error: BaseException) -> str:
    return _system(error) or _said(error).splitlines()[0][:200]


def _said(error: BaseException) -> str:
    return str(error.args[0] if error.args else error).strip() or type(error).__name__


def _system(error: BaseException) -> str:
    """Return what the operating system says of an error, or nothing if it is another error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    found = re.search(r"([^:\n]+) \[os_error_code", _said(error))
    return found[1].strip() if found else ""


def _say_errors_once() -> None:
    """Silence what is said beside the exception that a failed write or read raises.

    Orbax logs each error, and what TensorStore was still about reaches the interpreter as
    unraisable: at any later time, so this stays.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if not isinstance(sys.unraisablehook, _OthersAlone):
        sys.unraisablehook = _OthersAlone(sys.unraisablehook)


@dataclasses.dataclass(frozen=True)
class _OthersAlone:
    """A hook of unraisable exceptions that passes on those that are not TensorStore's.

    Those are of an event loop that the first error has closed, and of reads that were given up.
    """

    before: Callable[[Any], Any]

    def __call__(self, unraisable: Any) -> None:
        given_up = inspect.iscoroutine(unraisable.object)
        if not given_up and str(unraisable.exc_value) != "Event loop is closed":
            self.before(unraisable)
