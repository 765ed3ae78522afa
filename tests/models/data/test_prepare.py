"""A prepared folder is whole or absent, is the same each time, and damage to it is seen."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import prepare as module
from models.data.files import files_of
from models.data.prepare import prepare
from models.data.shards import Stream, is_prepared, open_prepared
from models.data.split import split
from models.data.tokenizer import Bytes, parse_tokenizer
from models.errors import InputError
from tests.models.data.texts import TEXTS, write


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path, "jsonl")


@pytest.mark.parametrize("shard", [50, 2**20])
def test_documents_come_back_from_their_tokens(shard: int, source: Path, tmp_path: Path) -> None:
    counts = prepare(
        source, tmp_path / "out", tokenizer="bpe:300", shard_tokens=shard, validation_share=0.2
    )
    data = open_prepared(tmp_path / "out")
    assert (len(data.parts["train"]) > 3) == (shard == 50)
    assert data.tokenizer_json is not None
    words = parse_tokenizer(data.tokenizer_json, "there")
    read: dict[str, list[str]] = {"train": [], "validation": []}
    for part, shards in data.parts.items():
        for one in shards:
            assert one.tokens.dtype == np.uint16
            for tokens in np.split(one.tokens, one.ends[:-1]):
                assert tokens[-1] == words.end == data.end
                read[part].append(words.decode([*map(int, tokens)]).decode())
                assert data.token_bytes[tokens].sum() == len(read[part][-1].encode())
    assert sorted(read["train"] + read["validation"]) == sorted(TEXTS)
    for part, count in counts.items():
        stream = Stream(data.parts[part])
        assert (count.documents, count.tokens) == (len(read[part]), len(stream))
        assert count.bytes == sum(len(text.encode()) for text in read[part])


def test_preparing_again_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(source, tmp_path / name, tokenizer="bpe:300", shard_tokens=100)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    prints = [open_prepared(tmp_path / name).fingerprint for name in ("one", "two")]
    prepare(source, tmp_path / "three", tokenizer="bpe:301", shard_tokens=100)
    assert prints[0] == prints[1] != open_prepared(tmp_path / "three").fingerprint


def test_the_tokenizer_has_not_seen_validation(source: Path, tmp_path: Path) -> None:
    seen: list[bytes] = []

    def trained(_: str, some: Any) -> Any:
        seen.extend(document.content for document in some)
        return Bytes()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "tokenizer_of", trained)
        prepare(source, tmp_path / "out", tokenizer="bpe:300", validation_share=0.3)
    held = {d.content for part, d in split(module.documents(source), 0.3) if part == "validation"}
    assert held
    assert held.isdisjoint(seen)
    assert len(seen) > 5


@pytest.mark.parametrize(
    "flip", ["train-00000.tokens", "train-00001.ends", "token_bytes", "tokenizer", "manifest"]
)
def test_a_bit_that_flips_anywhere_is_seen(flip: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(source, out, tokenizer="bpe:300", shard_tokens=100)
    (path,) = out.glob(flip + "*")
    whole = path.read_bytes()
    for at in np.random.default_rng(0).integers(len(whole), size=20):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        if flip == "manifest" and _says_the_same(whole, bytes(damaged)):
            continue
        with pytest.raises(InputError, match=rf"{path.name} is damaged: its content has changed"):
            open_prepared(out)
    path.write_bytes(whole[:-3])
    with pytest.raises(InputError, match=f"{path.name} is damaged"):
        open_prepared(out)
    path.unlink()
    with pytest.raises(InputError, match=f"no such file or folder: .*{path.name}"):
        open_prepared(out)


def _says_the_same(one: bytes, other: bytes) -> bool:
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def test_failed_preparation_leaves_no_files(source: Path, tmp_path: Path) -> None:
    with source.open("a") as file:
        file.write("{\n")
    with pytest.raises(InputError, match=r"data.jsonl:41 is not valid JSON"):
        prepare(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
    assert not is_prepared(tmp_path / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from models.data import prepare as module

module.write_manifest = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
module.prepare(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_kill_leaves_nothing_of_that_name(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(tmp_path / "out")]
    killed = subprocess.run(command, cwd=Path(__file__).parents[3], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    prepare(source, tmp_path / "out")
    open_prepared(tmp_path / "out")
    # A folder of a hidden name is left, and is no text.
    assert len(files_of(tmp_path, without=tmp_path / "out")) == 1


def test_preparing_into_an_existing_folder_raises_and_keeps_its_files(
    source: Path, tmp_path: Path
) -> None:
    prepare(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(InputError, match="out already exists: choose another folder, or remove"):
        prepare(source, tmp_path / "out", tokenizer="bpe:300")
    assert contents(tmp_path / "out") == before
    with pytest.raises(InputError, match=r"cannot write .*: File exists"):
        prepare(source, source / "out")


@pytest.mark.parametrize(("tokenizer", "harm"), [("bytes", False), ("bpe:300", True)])
def test_another_command_may_be_first(
    tokenizer: str, harm: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has prepared the same has done no harm; another one is in the way."""
    out = tmp_path / "out"
    written = module._write

    def first(*args: Any) -> Any:
        monkeypatch.undo()
        prepare(source, out, tokenizer=tokenizer)
        return written(*args)

    monkeypatch.setattr(module, "_write", first)
    if harm:
        with pytest.raises(InputError, match=r"cannot write .*: Directory not empty"):
            prepare(source, out)
    else:
        prepare(source, out)
    assert (open_prepared(out).tokenizer_json is not None) == harm
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    for name, texts in (("empty", []), ("one", ["a"])):
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, "jsonl", texts)
        with pytest.raises(
            InputError, match=r"data.jsonl has no text for its (train|validation) part"
        ):
            prepare(path, tmp_path / "out")
