"""The training loop, with logs and checkpoints. It can be stopped and resumed at any step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding
from rich.console import Console

from models.data.batches import share_of
from models.errors import InputError
from models.settings import to_toml
from models.train import folder
from models.train.board import Board, check_writer
from models.train.checksum import checksum_of
from models.train.config import RunConfig, Validation
from models.train.display import Display
from models.train.gradient import check_fused
from models.train.health import Health
from models.train.kinds import read_config
from models.train.log import Log
from models.train.mesh import (
    any_process,
    batch_sharding,
    ended_with_others,
    make_mesh,
    on_devices,
    sizes,
)
from models.train.planned import PlannedStep, load_plan, plan_step, policy_of
from models.train.profile import Profiler, steps_of
from models.train.report import Reporter
from models.train.start import Origin, Resume, Start, begin, refuse_another, restore_start
from models.train.state import TrainState
from models.train.step import make_evaluate
from models.train.stop import Stop
from models.train.store import Store


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a run: its state, its last step, and the number of the signal that stopped it."""

    state: TrainState
    step: int
    signal: int | None = None


def train(
    run: RunConfig,
    console: Console,
    resume: Resume | None = None,
    origin: Origin | None = None,
) -> Outcome:
    """Train for `run.optim.steps` steps, or until a time limit or a signal.

    The state is saved before training ends. Only a kill loses the steps since the last checkpoint.

    Args:
      run: the settings.
      console: where progress is printed.
      resume: which checkpoint to resume from; None for a new run, whose folder must not hold a run.
      origin: initial parameters of a new run; None to draw them from the seed.

    Raises:
      InputError: data, folder or checkpoint cannot be used, or training cannot continue.
    """
    started = time.perf_counter()
    if run.tensorboard:
        check_writer()
    steps_of(run.profile_steps)  # raises for a mistake before anything is created
    check_fused(run.model, run.optim, run.accumulate)
    mesh, first = make_mesh(run.mesh, run.optim.offload_optimizer), jax.process_index() == 0
    data = run.load()
    if resume is not None and not (run.out / folder.CHECKPOINTS).is_dir():
        raise InputError(
            f"no checkpoint to resume from in {run.out}: leave out --resume to start a new run"
        )
    with _locked_folder(run), _store(run) as store, contextlib.ExitStack() as opened:
        if resume is None:
            refuse_another(run, store)
            planned = plan_step(run, policy_of(run.policy), mesh)
            start = begin(run, origin, mesh)
        else:
            start = restore_start(run, resume, data.fingerprint, store, console, mesh)
            planned = plan_step(run, _policy(run, resume, start), mesh)
        display = Display(console, first=start.step, total=run.optim.steps, every=run.print_every)
        display.say(str(planned))
        if first:
            folder.write_whole(run.out / folder.CONFIG, to_toml(run))
            planned.save(run.out / folder.PLAN)
            for name, text in run.beside(data).items():
                folder.write_whole(run.out / name, text)
        after = None if start.meta is None else start.step
        sealed = None if start.meta is None else start.meta.get("log")
        path = run.out / folder.LOG if first else None
        log = opened.enter_context(contextlib.closing(Log(path, after=after, sealed=sealed)))
        board = Board(run.out / folder.BOARD, after=after) if first and run.tensorboard else None
        if board is not None:
            log.add_writer(board)
        path = run.out / folder.HEALTH if first and run.health_every else None
        if path is not None and after is None and path.exists():
            folder.set_aside(path)
        with display, Stop(display.say) as stop:
            if origin is not None:
                log.write(step=0, **{"from": origin.name})
            if start.changes:
                log.write(step=start.step, override=start.changes)
            health = Health(run, mesh, path, after, log, display, board)
            out_of_time = lambda: time.perf_counter() - started > run.max_seconds
            loop = _Loop(run, data, start, planned, store, log, display, mesh, health)
            stopped = lambda: stop.signal is not None or display.failure is not None
            with ended_with_others():
                loop.go(lambda: any_process(stopped()), lambda: any_process(out_of_time()))
        if display.failure is not None:
            raise InputError(
                f"cannot write to standard output: {display.failure}; saved step {loop.step} in"
                f" {run.out}"
            )
        return Outcome(loop.state, loop.step, stop.signal)


@contextlib.contextmanager
def _locked_folder(run: RunConfig) -> Iterator[None]:
    """Lock the folder of the run in the first process."""
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0:
            with ended_with_others():
                stack.enter_context(folder.locked(run.out))
        yield


@contextlib.contextmanager
def _store(run: RunConfig) -> Iterator[Store]:
    """Open the checkpoints of the run."""
    store = Store(run.out / folder.CHECKPOINTS, keep=run.keep_newest, keep_best=run.keep_best,
                  background=run.background_saves, metric=run.metric)  # fmt: skip
    with contextlib.closing(store):
        yield store


def _policy(run: RunConfig, resume: Resume, start: Start) -> Any:
    """Return the plan of the resumed run, or the policy if a setting that affects it changed."""
    assert start.meta is not None
    before = read_config(start.meta["config"], "the checkpoint")
    settings = {"policy", "remat", "dtype", "weight_dtype", "query_chunk_size", "mlp_chunk_size",
                "fused_update"}  # fmt: skip
    decides = settings & {*resume.override, *start.changes}
    elsewhere = before.optim.offload_optimizer != run.optim.offload_optimizer
    if decides or elsewhere or sizes(before.mesh) != sizes(run.mesh):
        return policy_of(run.policy)
    path = run.out / folder.PLAN
    plan = load_plan(path)
    if checksum_of(plan.to_dict()) != start.meta["plan"]:
        raise InputError(
            f"{path} is not the plan with which the run was started: make a new one with --override"
            " policy"
        )
    return plan


class _Loop:
    """A run in progress, with its `state` after `step` steps."""

    def __init__(self, run: RunConfig, data: Any, start: Start, planned: PlannedStep,
                 store: Store, log: Log, display: Display, mesh: Mesh | None,
                 health: Health) -> None:  # fmt: skip
        self.state, self.step = start.state, start.step
        self._run, self._planned, self._health = run, planned, health
        self._store, self._log, self._display = store, log, display
        self._is_new = start.meta is None
        self._batches = _Batches(run, data, mesh, start.meta and start.meta["data_state"])
        self._evaluate = _evaluation(run, data, mesh)
        self._reporter = Reporter(run, planned, log, display)
        self._meta = {"config": to_toml(run), "data": data.fingerprint,
                      "plan": checksum_of(planned.plan.to_dict())}  # fmt: skip
        self._profiler = Profiler(steps_of(run.profile_steps), run.out / folder.PROFILE)
        self._validated: tuple[int, float] | None = None

    def go(self, stopped: Callable[[], bool], out_of_time: Callable[[], bool]) -> None:
        """Train to the end of the run, or until a function returns True, and save the state.

        A run that is out of time is also validated before it is saved.
        """
        run, saved, out_of_time_now = self._run, self.step, False
        if self._is_new:
            self._validate()
        while self.step < run.optim.steps and not stopped() and not out_of_time_now:
            with self._profiler.step(self.step + 1):
                has_health = self._health.due(self.step + 1)
                run_step = self._health.step if has_health else self._planned.step
                self.state, metrics = run_step(self.state, self._batches.next())
            self.step += 1
            readings = metrics.pop("health", None)
            self._reporter.push(self.step, metrics)
            if has_health:
                self._reporter.flush()
                self._health.write(self.step, float(metrics["loss"]), readings)
                self._reporter.restart_clock()
            self._profiler.done(self.step, self.state)
            out_of_time_now = out_of_time()
            last = self.step == run.optim.steps or out_of_time_now
            if last or self.step % run.validate_every == 0:
                self._validate()
            if last or self.step % run.save_every == 0:
                self._save()
                saved = self.step
        self._profiler.close()
        if saved != self.step or self.step == 0:
            self._save()
        self._store.wait()

    def _validate(self) -> None:
        self._reporter.flush()
        result = self._evaluate(self.state)
        self._validated = self.step, result.numbers[self._run.metric]
        self._log.write(step=self.step, **result.numbers)
        self._display.say(f"step {self.step}: validation {result.text}")
        self._reporter.restart_clock()

    def _save(self) -> None:
        self._reporter.flush()
        meta = {**self._meta, "data_state": self._batches.state(), "log": self._log.seal()}
        metric = self._validated[1] if self._validated and self._validated[0] == self.step else None
        self._store.save(self.step, self.state, meta, metric)
        self._reporter.restart_clock()


class _Batches:
    """An iterator over the batches of steps, whose state is saved in checkpoints."""

    def __init__(self, run: RunConfig, data: Any, mesh: Mesh | None,
                 state: dict[str, Any] | None) -> None:  # fmt: skip
        here = SingleDeviceSharding(jax.devices()[0])
        sharding = here if mesh is None else batch_sharding(mesh, run.batch, axis=1)
        self._iterator = run.batches(data, share_of(sharding, run.batch), sharding)
        if state is not None:
            self._iterator.set_state(state)

    def next(self) -> Any:
        return next(self._iterator)

    def state(self) -> dict[str, Any]:
        return self._iterator.get_state()


def _evaluation(run: RunConfig, data: Any, mesh: Mesh | None) -> Callable[[TrainState], Validation]:
    """Return a function that validates a state on the validation part of the data."""
    batches = run.validation(data)
    device_batches = [on_devices(batch, mesh, axis=0) for batch in batches]
    evaluate = make_evaluate(run.model, None if mesh is None else mesh.abstract_mesh)

    def validate(state: TrainState) -> Validation:
        results = [evaluate(state.result, batch) for batch in device_batches]
        numbers = [{name: float(value) for name, value in one.items()} for one in results]
        return run.validation_result(data, numbers, batches)

    return validate
