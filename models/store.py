"""Training states on disk: Orbax writes them, and nothing is read that is not what was written."""

from __future__ import annotations

import logging
import re
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from models.errors import InputError
from models.step import TrainState

Meta = dict[str, Any]


class Damaged(Exception):
    """A saved step cannot be read back as it was written."""


class Store:
    """The last few states of one run, each in a folder that appears only when it is complete.

    With a state goes a JSON dictionary, `meta`: what the state belongs to and where the data was.
    """

    def __init__(
        self, folder: Path, *, keep: int = 3, background: bool = True, read_only: bool = False
    ) -> None:
        self.folder = folder.resolve()
        self._restore_hook = _say_errors_once()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
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

    def save(self, step: int, state: TrainState, meta: Meta) -> None:
        """Write a state; with `background` the writing goes on after the return.

        Raises:
          InputError: this write, or the one before it, did not succeed (a full disk, say).
        """
        # A copy, since the next training step reuses the state's memory while this is written.
        leaves = {name: np.array(leaf) for name, leaf in _named(state).items()}
        meta = {**meta, "step": step, "checksum": _checksum(leaves)}
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), meta=ocp.args.JsonSave(meta))
        self._write(lambda: self._manager.save(step, args=args))

    def wait(self) -> None:
        """Return when all that was saved is on disk; raises as `save` does."""
        self._write(self._manager.wait_until_finished)

    def _write(self, call: Callable[[], Any]) -> None:
        _, failure = _attempt(call)
        if failure is not None:
            intact = max(self.steps(), default=None)
            kept = "no step was saved" if intact is None else f"step {intact} is intact"
            raise InputError(f"saving to {self.folder} failed, {kept}: {failure}")

    def _read(self, step: int, **args: Any) -> Any:
        composite = ocp.args.Composite(**args)
        result, failure = _attempt(lambda: self._manager.restore(step, args=composite))
        if failure is not None:
            raise Damaged(failure)
        return result

    def meta(self, step: int) -> Meta:
        """The dictionary saved with `step`; raises `Damaged`."""
        meta = self._read(step, meta=ocp.args.JsonRestore())["meta"]
        if not isinstance(meta, dict) or "checksum" not in meta:
            raise Damaged("it was not written by this program")
        return meta

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state saved at `step`, with the structure and shapes of `like`; raises `Damaged`."""
        checksum = self.meta(step)["checksum"]
        leaves: dict[str, np.ndarray] = {}
        # One array at a time: of several that fail at once, Orbax raises the first, and the
        # interpreter reports the others when it ends.
        for name, leaf in _named(like).items():
            item = {name: np.zeros(leaf.shape, leaf.dtype)}
            args = ocp.args.PyTreeRestore(item=item, partial_restore=True)
            leaves |= self._read(step, state=args)["state"]
        if _checksum(leaves) != checksum:
            raise Damaged("its values are not those that were saved")
        # A copy, since a step cannot reuse memory that belongs to NumPy.
        arrays = [jnp.array(leaf, copy=True) for leaf in leaves.values()]
        return jax.tree.unflatten(jax.tree.structure(like), arrays)

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename every saved step later than `step`, so that a run from there can save again."""
        renamed = []
        for later in [s for s in self.steps() if s > step]:
            folder = self.folder / str(later)
            places = (Path(f"{folder}.set-aside-{i}") for i in range(1_000_000))
            place = next(place for place in places if not place.exists())
            renamed.append(folder.rename(place))
        self._manager.reload()
        return renamed

    def close(self) -> None:
        """Stop the background threads; what they did not finish is not saved."""
        _attempt(self._manager.close)
        self._restore_hook()


def _named(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def _checksum(leaves: dict[str, Any]) -> int:
    # The format's own checksums cover its index but not the arrays: a flipped bit is read back
    # without complaint.
    total = 0
    for name in sorted(leaves):
        total = zlib.crc32(np.ascontiguousarray(leaves[name]).view(np.uint8).data, total)
    return total


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """The result of `call`, or in one line why there is none."""
    try:
        return call(), None
    # Orbax and TensorStore raise ValueError, OSError, KeyError, RuntimeError and Exception itself.
    except Exception as error:
        return None, _line(error)


def _line(error: BaseException) -> str:
    text = str(error.args[0] if error.args else error).strip() or type(error).__name__
    system = re.search(r"([^:\n]+) \[os_error_code", text)
    if system:
        return system[1].strip()
    return text.splitlines()[0][:200]


def _say_errors_once() -> Callable[[], None]:
    """Silence what is said beside the exception that a failed write raises.

    Orbax logs each error, and TensorStore reports those after the first to an event loop that
    the first has closed, which reaches the interpreter as unraisable. Returns the way back.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    def restore() -> None:
        sys.unraisablehook = before

    sys.unraisablehook = hook
    return restore
