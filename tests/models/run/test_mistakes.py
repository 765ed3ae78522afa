"""What stands in the way of a run is named: the file, the kind of data, the option that exists."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orbax.checkpoint as ocp
import pytest

from models.data.arrays import mapped
from models.data.corpus import load_corpus
from models.errors import InputError
from models.run.train import configured, parser
from models.settings import to_toml
from models.train.folder import LOCK, locked
from models.train.kinds import of_preset
from models.train.store import Damaged, Store


def test_a_disk_that_is_full_at_the_start_names_the_file(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    with pytest.raises(InputError, match=f"cannot write {tmp_path / LOCK}"), locked(tmp_path):
        pass


def test_resume_uses_the_given_folder_over_the_out_in_its_config(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    text = to_toml(of_preset("tiny")).replace('"runs/tiny"', f'"{elsewhere}"')
    assert str(elsewhere) in text
    (here / "config.toml").write_text(text)
    run = configured({"out": str(here), "config": None}, resuming=True)
    assert run.out == here


def test_resume_without_out_uses_the_default_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = of_preset("tiny").out
    out.mkdir(parents=True)
    text = to_toml(of_preset("tiny")).replace(f'"{out}"', '"elsewhere"')
    (out / "config.toml").write_text(text)
    assert configured({"config": None}, resuming=True).out == out


@pytest.mark.parametrize("name", ["a.png", "a.JPG", "a.webp", "a.bmp", "a.ppm", "a.npy", "a.npz"])
@pytest.mark.parametrize("tokenizer", [None, "bpe:300"])
def test_pictures_and_arrays_are_no_text(name: str, tokenizer: str | None, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / name).write_bytes(bytes(range(256)) * 40)
    for given in (data, data / name):
        with pytest.raises(InputError, match=rf"{name} is not text: name text files"):
            load_corpus([str(given)], 8, vocab=512, tokenizer=tokenizer, work=tmp_path / "work")


def test_pickles_are_refused_without_an_option_of_numpys(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, None], dtype=object), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps([1, 2]))
    for name in ("objects.npy", "pickle.npy"):
        with pytest.raises(InputError, match="Python objects") as caught:
            mapped(tmp_path / name)
        assert "allow_pickle" not in str(caught.value)


SAID = [
    (ValueError('Error reading "zarr" array in kvstore "ocdbt" [source locations="x.cc"]'),
     "its arrays cannot be read"),
    (ValueError("Error reading local file /a: No space left on device [os_error_code='28']"),
     "No space left on device"),
    (OSError(5, "Input/output error"), "Input/output error"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said"), SAID)
def test_damaged_checkpoint_errors_omit_storage_library_details(
    error: Exception, said: str
) -> None:
    def restore(*_: object, **__: object) -> None:
        raise error

    store = object.__new__(Store)
    store._manager = SimpleNamespace(restore=restore)
    with pytest.raises(Damaged) as caught:
        store._read(1, state=ocp.args.PyTreeRestore())
    assert str(caught.value) == said


NEAR = {"--kv-headz": ": did you mean --kv-heads?", "--ouT": ": did you mean --out?"}


@pytest.mark.parametrize("given", ["--bogus", "--zzz", *NEAR])
def test_a_flag_is_guessed_only_if_one_is_near(given: str) -> None:
    with pytest.raises(InputError) as caught:
        parser().parse([given])
    assert str(caught.value) == f"unknown argument {given!r}{NEAR.get(given, '')}"
