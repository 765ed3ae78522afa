"""The step and the loop: donation, accumulation, traces, resuming, interrupts, damage."""

import contextlib
import dataclasses
import io
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from experiments.resume.killed import arrays, records
from models.errors import InputError
from models.nets.decoder import DecoderConfig
from models.train.checksum import all_finite
from models.train.config import RunConfig
from models.train.log import read_records
from models.train.loop import Outcome, train
from models.train.optim import OptimConfig
from models.train.start import Resume
from models.train.state import TrainState, abstract_state, init_state
from models.train.step import check_donation, compile_step, make_step
from models.train.store import Store
from tests.models import examples
from tests.models.micro import MODEL, OPTIM, losses, run


def quiet(config: RunConfig) -> Outcome:
    return train(config, Console(file=io.StringIO()))


def resumed(config: RunConfig, step: int | None = None, override: tuple[str, ...] = ()) -> Outcome:
    return train(config, Console(file=io.StringIO()), Resume(step, override))


def batch(accumulate: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    flat = rng.integers(0, 256, (8, MODEL.context + 1), dtype=np.uint8)
    return flat.reshape(accumulate, size, -1)


# A run of each kind in a folder, with some settings changed.
Run = Callable[..., RunConfig]


def of_examples(name: str, **more: Any) -> Run:
    """Runs of as many steps, in which more is a function of seed and step, or gathered."""
    optim = dataclasses.replace(OPTIM, ema_decay=0.5, learning_rate=1e-2)
    base = {"optim": optim, "validate_every": 6, "save_every": 4, **more}
    return lambda folder, **changes: examples.run(
        folder, examples.MODELS[name], **{**base, **changes}
    )


RUNS: dict[str, Run] = {
    "text": run,
    "resnet": of_examples("resnet", augment=True, accumulate=2),
    "unet": of_examples("unet", augment=True),
    "gru": of_examples("gru"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("resnet", "unet", "gru")]
of_text = pytest.mark.parametrize("kind", ["text"], indirect=True)


@pytest.fixture(scope="module", params=["text", *SLOW])
def kind(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


@pytest.fixture(scope="module")
def whole(kind: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was left alone."""
    folder = tmp_path_factory.mktemp("whole")
    quiet(kind(folder))
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    return tmp_path


def same(folder: Path, other: Path) -> None:
    """All that two runs log but times, and all arrays of their last checkpoints."""
    assert records(folder / "run") == records(other / "run")
    assert arrays(folder / "run") == arrays(other / "run")


def test_the_state_is_donated_to_the_step() -> None:
    state = init_state(MODEL, OPTIM, seed=0)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    compiled = compile_step(MODEL, OPTIM, jax.typeof(batch(2, 4)[:1]))
    assert held <= compiled.memory_analysis().alias_size_in_bytes <= 1.01 * held + 1024
    compiled(state, batch(2, 4)[:1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_a_step_that_reuses_too_little_is_refused() -> None:
    state = abstract_state(MODEL, OPTIM)
    compiled = jax.jit(lambda state: state.step + 1, donate_argnums=0).lower(state).compile()
    with pytest.raises(RuntimeError, match="bytes of its donated state"):
        check_donation(compiled, state)


def test_accumulation_equals_one_big_batch_and_a_step_is_traced_once() -> None:
    state = init_state(MODEL, OPTIM, seed=0)
    results = {}
    for accumulate, size in ((1, 8), (4, 2)):
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(make_step(MODEL, OPTIM), n=1))
        step(state, batch(accumulate, size))
        results[accumulate] = step(state, batch(accumulate, size))
    (one, one_metrics), (summed, summed_metrics) = results[1], results[4]
    chex.assert_trees_all_close(summed_metrics, one_metrics, rtol=1e-5)
    # Adam divides by the gradient's size, so that the smallest ones decide the tolerance.
    chex.assert_trees_all_close(summed.params, one.params, rtol=1e-3, atol=2e-5)


@of_text
def test_training_learns_and_logs_every_step(whole: Path) -> None:
    records = losses(whole / "run")
    assert [step for step, loss, _ in records if loss is not None] == list(range(1, 13))
    judged = [bits for _, _, bits in records if bits is not None]
    assert len(judged) == 3
    assert judged[-1] < judged[0] - 0.3


@pytest.mark.parametrize("background_saves", [True, False], ids=["background", "waiting"])
def test_resuming_repeats_every_bit(
    kind: Run, whole: Path, copied: Path, background_saves: bool
) -> None:
    # As after a kill between step 8 and step 12: the log is ahead of the checkpoint.
    shutil.rmtree(copied / "run" / "checkpoints" / "12")
    outcome = resumed(kind(copied, background_saves=background_saves))
    assert outcome.step == 12
    same(copied, whole)


def test_a_time_limit_saves_and_can_be_resumed(kind: Run, whole: Path, tmp_path: Path) -> None:
    assert quiet(kind(tmp_path, max_seconds=0)).step == 1
    resumed(kind(tmp_path))
    # The validation where it stopped is the one record that the other run has not.
    found = records(tmp_path / "run")
    assert found.pop(2).keys() > {"step"}
    assert found == records(whole / "run")


def test_an_interrupt_saves_and_can_be_resumed(
    kind: Run, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kind(tmp_path)
    original = type(config).batches

    def interrupting(*args: object, **settings: object) -> Iterator[np.ndarray]:
        iterator = original(*args, **settings)
        take = iterator.__next__

        class Interrupting:
            count = 0

            def __next__(self) -> np.ndarray:
                self.count += 1
                if self.count == 6:
                    os.kill(os.getpid(), signal.SIGINT)
                return take()

            def get_state(self) -> dict[str, int]:
                return iterator.get_state()

        return Interrupting()

    monkeypatch.setattr(type(config), "batches", interrupting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        outcome = quiet(config)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.step, outcome.signal) == (6, signal.SIGINT)
    monkeypatch.undo()
    resumed(config)
    same(tmp_path, whole)


def test_a_run_is_not_overwritten(kind: Run, copied: Path) -> None:
    with pytest.raises(InputError, match="saved at step 12: continue it with --resume"):
        quiet(kind(copied))
    with pytest.raises(InputError, match="no checkpoint to resume from"):
        resumed(kind(copied, out=copied / "other"))
    with pytest.raises(InputError, match="no checkpoint of step 7"):
        resumed(kind(copied), step=7)


def test_resuming_with_changed_settings_raises_unless_overridden(kind: Run, copied: Path) -> None:
    optim = dataclasses.replace(kind(copied).optim, steps=13, clip_norm=0.5)
    with pytest.raises(
        InputError, match=r"clip_norm was 1.0, not 0.5; .* --override steps,clip_norm"
    ):
        resumed(kind(copied, optim=optim))
    with pytest.raises(InputError, match="of another run: seed 0 is now 1"):
        resumed(kind(copied, seed=1), override=("seed",))
    resumed(kind(copied, optim=optim), override=("steps", "clip_norm"))
    changed = {"step": 12, "override": {"steps": [12, 13], "clip_norm": [1.0, 0.5]}}
    assert changed in read_records(copied / "run" / "log.jsonl")


@of_text
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": dataclasses.replace(MODEL, heads=2)}, "heads 4 is now 2"),
        ({"model": dataclasses.replace(MODEL, scan_layers=False)}, "scan_layers True is now False"),
        ({"batch": 8}, "batch 4 is now 8"),
        ({"seed": 1}, "seed 0 is now 1"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    copied: Path, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InputError, match=f"of another run: {complaint}"):
        resumed(run(copied, **changes))
    assert sorted(p.name for p in (copied / "run" / "checkpoints").iterdir()) == ["12", "4", "8"]


@of_text
@pytest.mark.parametrize(("name", "value"), [("optimizer", "lion"), ("ema_decay", 0.9)])
def test_a_setting_that_keeps_other_arrays_is_refused(copied: Path, name: str, value: Any) -> None:
    config = run(copied, optim=dataclasses.replace(OPTIM, **{name: value}))
    with pytest.raises(InputError, match=f"{name} cannot change, because the checkpoints"):
        resumed(config, override=(name,))
    assert sorted(p.name for p in (copied / "run" / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_other_data_is_refused(kind: Run, copied: Path) -> None:
    config = kind(copied)
    (path,) = map(Path, config.data)
    file = path / "images.npy" if path.is_dir() else path
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InputError, match="of another run: data"):
        resumed(config)


def test_a_log_that_was_changed_is_refused(kind: Run, copied: Path) -> None:
    log = copied / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"step": 9', b'"step": 8'))
    with pytest.raises(InputError, match="has changed since step 12 was saved"):
        resumed(kind(copied))
    log.unlink()
    resumed(kind(copied))


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, Path.unlink])
def test_a_damaged_checkpoint_points_to_an_intact_one(
    kind: Run, copied: Path, damage: Callable[[Path], None]
) -> None:
    checkpoints = copied / "run" / "checkpoints"
    for file in (checkpoints / "12" / "state").rglob("d/*"):  # of what describes it, see test_trust
        damage(file)
    with pytest.raises(
        InputError, match=r"damaged .*; step 8 is intact.* --resume-step 8"
    ) as raised:
        resumed(kind(copied))
    assert "\n" not in str(raised.value)

    resumed(kind(copied), step=8)
    names = sorted(p.name for p in checkpoints.iterdir())
    assert names == ["12", "12.set-aside-0", "4", "8"]


def test_steps_that_are_not_finite_change_nothing_and_then_stop_the_run(tmp_path: Path) -> None:
    optim = OptimConfig(steps=12, warmup_steps=0, learning_rate=1e30, max_skips=2)
    with pytest.raises(InputError, match=r"3 steps in a row were skipped.*lower --learning-rate"):
        quiet(run(tmp_path, optim=optim, save_every=1))
    records = read_records(tmp_path / "run" / "log.jsonl")
    assert [r["skipped"] for r in records if "skipped" in r] == [0, 1, 1, 1]
    finite = [None not in (r["loss"], r["grad_norm"]) for r in records if "skipped" in r]
    assert finite == [True, False, False, False]
    # What was saved is of finite numbers: the run goes on from it.
    optim = dataclasses.replace(optim, steps=3, max_skips=20)
    outcome = resumed(run(tmp_path, optim=optim), 1, override=("steps", "max_skips"))
    assert all_finite(outcome.state.params)
    assert int(outcome.state.skipped) == 2


def test_a_spike_is_skipped_and_counted() -> None:
    optim = dataclasses.replace(OPTIM, spike_factor=2.0)
    step = jax.jit(make_step(MODEL, optim))
    state, _ = step(init_state(MODEL, optim, seed=0), batch(1, 8))
    low = dataclasses.replace(state, usual_norm=state.usual_norm / 3)
    kept, metrics = step(low, batch(1, 8))
    assert metrics["skipped"] == 1
    assert (int(kept.step), int(kept.skipped), int(kept.skipped_in_row)) == (2, 1, 1)
    chex.assert_trees_all_equal(kept.params, state.params)
    chex.assert_trees_all_equal(kept.opt_state, state.opt_state)
    moved, metrics = step(state, batch(1, 8))
    assert metrics["skipped"] == 0
    assert not np.array_equal(*(jax.tree.leaves(s.params)[0] for s in (moved, state)))


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    state = init_state(MODEL, OPTIM, seed=0)
    broken = dataclasses.replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    with contextlib.closing(Store(tmp_path / "checkpoints")) as store:
        store.save(1, state, {})
        with pytest.raises(InputError, match=r"after step 2 are not finite.*step 1 is intact"):
            store.save(2, broken, {})
        store.wait()
        assert store.steps() == [1]


def test_dropout_is_a_function_of_seed_and_step() -> None:
    model = dataclasses.replace(MODEL, dropout=0.5)
    state = init_state(model, OPTIM, seed=0)
    later = dataclasses.replace(state, step=state.step + 1)

    def loss(state: TrainState, model: DecoderConfig = model, seed: int = 0) -> float:
        step = jax.jit(make_step(model, OPTIM, seed=seed))
        return float(step(state, batch(2, 4))[1]["loss"])

    assert loss(state) == loss(state)
    assert len({loss(state), loss(later), loss(state, seed=1), loss(state, model=MODEL)}) == 4
    assert loss(state, model=MODEL) == loss(later, model=MODEL)
