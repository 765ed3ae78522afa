"""What a run survives: locks, batches of one, its own folder as data, meshes, flipped bits."""

import contextlib
import dataclasses
import gc
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

import xform
from models.errors import InputError
from models.train.checksum import checksum_of, checksums
from models.train.display import Output
from models.train.folder import locked
from models.train.log import Log, read_records
from models.train.loop import train
from models.train.start import Resume
from models.train.state import abstract_state, device_bytes, init_state
from models.train.store import Damaged, Store
from tests.models import examples
from tests.models.micro import MODEL, OPTIM, TEXT, losses, run

SHORT = dataclasses.replace(OPTIM, steps=2)


def quiet(config, wish=None):
    return train(config, Console(file=io.StringIO()), wish)


def test_run_locks_its_folder_before_writing_to_it(tmp_path: Path) -> None:
    config = run(tmp_path)
    with locked(config.out):
        with pytest.raises(InputError, match=r"in use by process \d+: wait for it to end"):
            quiet(config)
        assert [p.name for p in config.out.iterdir()] == ["lock"]
    with locked(config.out):
        pass


def test_one_sequence_at_a_time_and_data_around_the_run(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_bytes(TEXT)
    config = run(tmp_path, batch=1, optim=SHORT, data=(str(tmp_path / "data"),),
                 out=tmp_path / "data/run")  # fmt: skip
    assert quiet(config).step == 2
    longer = dataclasses.replace(config, optim=OPTIM)
    assert quiet(longer, Resume(override=("steps",))).step == 12
    steps = [step for step, loss, _ in losses(config.out) if loss is not None]
    assert steps == [*range(1, 13)]


class Pipe(io.StringIO):
    """An output that is closed after some lines."""

    lines = 25

    def write(self, text: str) -> int:
        self.lines -= text.count("\n")
        if self.lines < 0:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_broken_stdout_pipe_saves_a_checkpoint_and_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write to standard output: Broken pipe; saved"):
        train(run(tmp_path, print_every=1), Output(file=Pipe()))
    logged = [step for step, loss, _ in losses(tmp_path / "run") if loss is not None]
    saved = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert 0 < len(logged) < 12
    assert max(saved) == logged[-1]


def test_there_is_one_record_of_the_first_validation(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log.jsonl"
    log.parent.mkdir()
    log.write_text(json.dumps({"step": 0, "validation_bits_per_byte": 8.0}) + "\n")
    quiet(run(tmp_path, optim=SHORT))
    assert [r["step"] for r in read_records(log)] == [0, 1, 2, 2]
    assert (log.parent / "log.jsonl.set-aside-0").exists()


def test_a_log_that_is_none_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for foreign in ("hello\n", '["step"]\n', '{"step": "one"}\n', '{"loss": 1}\n{"step": 1}\n'):
        path.write_text(foreign)
        with pytest.raises(InputError, match=r"line 1 of .* is not a record of a run"):
            Log(path, after=3)
        assert path.read_text() == foreign
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert read_records(path) == [{"step": 1}, {"step": 2}]


def test_log_changed_since_its_seal_raises_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with contextlib.closing(Log(path, after=None)) as log:
        log.write(step=1, loss=2.5)
        sealed = log.seal()
        log.write(step=2, loss=2.25)
    before = path.read_bytes()
    for changed in (before.replace(b"2.5", b"2.7"), before[:10], b""):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"has changed since step 1 .* move it away"):
            Log(path, after=1, sealed=sealed)
        assert path.read_bytes() == changed
    path.write_bytes(before)
    with contextlib.closing(Log(path, after=1, sealed=sealed)) as log:
        assert log.seal() == sealed
    assert read_records(path) == [{"step": 1, "loss": 2.5}]
    path.unlink()
    Log(path, after=1, sealed=sealed).close()


def test_checksums_are_of_each_bit_in_its_place_wherever_arrays_lie() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(0), (8, 6)))
    sums = {checksums({"x": jnp.asarray(x)})["x"]}
    for place in range(x.size):
        flipped = x.copy()
        flipped.view(np.uint32).reshape(-1)[place] ^= 1 << (place % 32)
        sums.add(checksums({"x": jnp.asarray(flipped)})["x"])
    swapped = x.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    sums.add(checksums({"x": jnp.asarray(swapped)})["x"])
    assert len(sums) == x.size + 2
    mesh = jax.make_mesh((4, 2), ("i", "j"))
    sharded = jax.device_put(x, NamedSharding(mesh, P("i", "j")))
    assert checksums({"x": sharded}) == checksums({"x": jnp.asarray(x)})


def test_a_state_is_restored_onto_other_devices_without_being_gathered(tmp_path: Path) -> None:
    state = init_state(MODEL, OPTIM, seed=0)
    mesh = jax.make_mesh((8,), ("fsdp",))

    def sharded(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axis = next((i for i, n in enumerate(x.shape) if n % 8 == 0), None)
        spec = P() if axis is None else P(*[None] * axis, "fsdp")
        return x.update(sharding=NamedSharding(mesh, spec))

    like = jax.tree.map(sharded, abstract_state(MODEL, OPTIM))
    with contextlib.closing(Store(tmp_path / "checkpoints")) as store:
        store.save(1, state, {})
        store.wait()
        spread = store.restore(1, like)
        store.save(2, spread, {})
        store.wait()
        back = store.restore(2, abstract_state(MODEL, OPTIM))
    placed = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert all(jax.tree.leaves(jax.tree.map(placed, spread, like)))
    assert device_bytes(spread) < device_bytes(state) / 4
    chex.assert_trees_all_equal(jax.device_get(spread), jax.device_get(state))
    chex.assert_trees_all_equal(back, state)


def test_changed_checkpoint_metadata_raises_damaged(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path / "checkpoints")) as store:
        store.save(1, init_state(MODEL, OPTIM, seed=0), {"data_state": {"next_index": 8}})
        store.wait()
        assert store.meta(1)["data_state"] == {"next_index": 8}
        (file,) = (tmp_path / "checkpoints" / "1" / "meta").glob("metadata")
        file.write_text(file.read_text().replace('"next_index": 8', '"next_index": 9'))
        with pytest.raises(Damaged, match="not what was saved"):
            store.meta(1)


def cut(content: bytes, _: random.Random) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes, rng: random.Random) -> bytes:
    place, changed = rng.randrange(len(content)), bytearray(content)
    changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("gru", "state/array_metadatas/*"),
        *[pytest.param(name, "**/*", marks=pytest.mark.slow) for name in ("gru", "resnet")],
    ],
)
@pytest.mark.timeout(900)
def test_damage_in_any_file_changes_nothing(
    tmp_path: Path, name: str, files: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state is what was saved, or it is refused, and nothing is said beside that."""
    beside: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", beside.append)
    optim, rng = dataclasses.replace(OPTIM, ema_decay=0.5), random.Random(0)
    model, folder, refused = examples.MODELS[name], tmp_path / "checkpoints", 0
    state, meta = init_state(model, optim, seed=0), {"data_state": {"next_index": 8}}
    like = abstract_state(model, optim)
    with contextlib.closing(Store(folder)) as store:
        store.save(1, state, meta)
    there = [path for path in (folder / "1").glob(files) if path.is_file() and path.stat().st_size]
    assert there
    for path in there:
        for change in (cut, flipped, flipped):
            content = path.read_bytes()
            path.write_bytes(change(content, rng))
            with contextlib.closing(Store(folder)) as store:
                try:
                    found = store.meta(1)["data_state"], store.restore(1, like)
                except Damaged:
                    refused += 1
                else:
                    chex.assert_trees_all_equal(found, (meta["data_state"], state))
            path.write_bytes(content)
    gc.collect()
    assert refused
    assert beside == []


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    state = init_state(MODEL, OPTIM, seed=0)
    with contextlib.closing(Store(tmp_path / "checkpoints", keep=1, keep_best=1)) as store:
        for step, bits in enumerate((5.0, 3.0, 4.0, None, 6.0)):
            store.save(step, state, {}, bits)
        store.wait()
        assert store.steps() == [1, 4]


def test_a_plan_that_was_changed_is_not_followed(tmp_path: Path) -> None:
    quiet(run(tmp_path, optim=SHORT))
    path = tmp_path / "run" / "plan.json"
    plan = json.loads(path.read_text())
    path.write_text(json.dumps({**plan, "saved_bytes": plan["saved_bytes"] + 1}))
    with pytest.raises(InputError, match="not the plan with which the run was started"):
        quiet(run(tmp_path, optim=SHORT), Resume())
    assert quiet(run(tmp_path, optim=SHORT), Resume(override=("policy",))).step == 2
    saved = xform.Plan.load(path)
    assert checksum_of(saved.to_dict()) == checksum_of(plan)
