"""The initial state of a run, from its seed or from a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from models.errors import InputError
from models.settings import leaves, nearest
from models.train.checksum import leaves_by_path
from models.train.config import RunConfig
from models.train.kinds import read_config
from models.train.state import TrainState, abstract_state, init_state
from models.train.store import Damaged, Meta, Store

# For each changed setting by name: `[old value, new value]`.
Changes = dict[str, list[Any]]


@dataclasses.dataclass(frozen=True)
class Start:
    """The first state of this training.

    Attributes:
      state: the training state.
      meta: the metadata saved with it; None for a new run.
      changes: the settings that the user overrides, as `[old value, new value]`.
    """

    state: TrainState
    meta: Meta | None = None
    changes: Changes = dataclasses.field(default_factory=Changes)

    @property
    def step(self) -> int:
        """Number of steps done."""
        return 0 if self.meta is None else self.meta["step"]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Initial parameters of a new run, and the name of their source."""

    name: str
    params: nnx.State


@dataclasses.dataclass(frozen=True)
class Resume:
    """A request to resume a run.

    Attributes:
      step: the step of the checkpoint; None for the last one.
      override: names of settings that may have other values than in the checkpoint.
    """

    step: int | None = None
    override: Collection[str] = ()


def refuse_another(run: RunConfig, store: Store) -> None:
    """Raise an `InputError` if the folder of a new run already holds a run."""
    if steps := store.steps():
        raise InputError(
            f"{run.out} holds a run saved at step {steps[-1]}: continue it with --resume,"
            " or choose another --out"
        )


def begin(run: RunConfig, origin: Origin | None = None, mesh: Mesh | None = None) -> Start:
    """Make the first state of a run, from its seed or with the parameters of `origin`."""
    state = init_state(run.model, run.optim, run.seed, mesh)
    if origin is None:
        return Start(state)
    if _shapes(origin.params) != _shapes(state.params):
        raise InputError(
            f"the flags make another model than that in {origin.name}: leave out flags that change"
            " its sizes"
        )
    where = jax.tree.map(lambda x: x.sharding, state.params)
    params = jax.device_put(origin.params, where)
    average = state.average and jax.tree.map(
        lambda new, old: jax.device_put(jnp.copy(new), old.sharding),
        nnx.merge_state(params, state.statistics),
        state.average,
    )
    return Start(dataclasses.replace(state, params=params, average=average))


def restore_start(run: RunConfig, resume: Resume, fingerprint: str, store: Store, console: Console,
                  mesh: Mesh | None = None) -> Start:  # fmt: skip
    """Load the state of a checkpoint. The mesh may differ from the one before.

    Later checkpoints are renamed. `fingerprint` is the fingerprint of the data.

    Raises:
      InputError: there is no such checkpoint, it is damaged or of another run, or a setting has
        changed that may not change or is not overridden.
    """
    steps = store.steps()
    if not steps:
        raise InputError(
            f"no checkpoint to resume from in {run.out}: leave out --resume to start a new run"
        )
    step = steps[-1] if resume.step is None else resume.step
    if step not in steps:
        raise InputError(f"no checkpoint of step {step} in {run.out}, which has {steps}")
    like = abstract_state(run.model, run.optim, mesh)
    try:
        meta = store.meta(step)
        changes = changed_settings(run, resume, fingerprint, meta, like)
        state = store.restore(step, like)
    except Damaged as error:
        intact = next((s for s in reversed(steps) if s < step and _intact(store, s, like)), None)
        remedy = (
            "no older checkpoint is intact"
            if intact is None
            else f"step {intact} is intact: continue from it with --resume-step {intact}"
        )
        raise InputError(f"checkpoint {step} in {run.out} is damaged ({error}); {remedy}") from None
    for place in store.set_aside_after(step):
        console.print(f"renamed a later checkpoint to {place}")
    return Start(state, meta, changes)


def changed_settings(run: RunConfig, resume: Resume, fingerprint: str, meta: Meta, like: TrainState
                     ) -> Changes:  # fmt: skip
    """Return the settings that differ from a checkpoint's settings, if all of them may differ.

    Args:
      run: the settings now.
      resume: names the settings that may differ.
      fingerprint: the fingerprint of the data now.
      meta: the metadata of the checkpoint.
      like: the state of the run as types. The checkpoint must have the same arrays.

    Raises:
      InputError: a setting or the data may not differ, or the state has other arrays.
    """
    before = read_config(meta["config"], "the checkpoint")
    saved = {leaf.name: leaf for leaf in leaves(before)}
    if unknown := [name for name in resume.override if name not in saved]:
        raise InputError(
            f"--override {unknown[0]}: there is no such setting{nearest(unknown[0], saved)}"
        )
    differing = [
        leaf
        for leaf in leaves(run)
        if leaf.about.change != "free" and saved[leaf.name].value != leaf.value
    ]
    others = [
        f"{leaf.name} {saved[leaf.name].value} is now {leaf.value}"
        for leaf in differing
        if leaf.about.change == "never"
    ]
    if meta["data"] != fingerprint:
        others.append(f"data {meta['data']} is now {fingerprint}")
    if others:
        raise InputError(
            f"the checkpoint in {run.out} is of another run: {', '.join(others)}; undo these"
            " changes, or choose another --out"
        )
    not_named = [leaf for leaf in differing if leaf.name not in resume.override]
    if not_named:
        texts = [f"{x.name} was {saved[x.name].value}, not {x.value}" for x in not_named]
        names = ",".join(x.name for x in not_named)
        raise InputError(f"the run in {run.out} has other settings: {', '.join(texts)}; leave them"
                         f" unchanged, or give --override {names}")  # fmt: skip
    if differing and _shapes(abstract_state(before.model, before.optim)) != _shapes(like):
        names = " and ".join(leaf.name for leaf in differing)
        raise InputError(f"{names} cannot change, because the checkpoints in {run.out} would have"
                         " other arrays: leave it unchanged, or start a new run")  # fmt: skip
    return {leaf.name: [saved[leaf.name].value, leaf.value] for leaf in differing}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each array in a tree, by its path."""
    return {name: leaf.shape for name, leaf in leaves_by_path(tree).items()}


def _intact(store: Store, step: int, like: TrainState) -> bool:
    """Return whether a checkpoint can be read."""
    try:
        store.restore(step, like)
    except Damaged:
        return False
    return True
