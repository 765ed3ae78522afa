"""A corpus, however it is given: its parts, its order, its bits per byte, and what is refused."""

import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.data import sources
from models.data.corpus import Corpus, load_corpus
from models.data.prepare import prepare
from models.data.rows import Rows
from models.data.shards import Stream, open_prepared
from models.data.sources import weighted
from models.errors import InputError
from tests.models.data.texts import TEXTS, write

LONG = [text * 20 for text in TEXTS]


def load(tmp_path: Path, *data: Any, window: int = 16, **options: Any) -> Corpus:
    return load_corpus([str(d) for d in data], window, vocab=999, work=tmp_path / "work", **options)


def first(corpus: Corpus, count: int, **options: Any) -> np.ndarray:
    iterator = corpus.batches(window=16, batch=4, **options)
    return np.stack([next(iterator)[0] for _ in range(count)])


def test_plain_text_is_bytes_in_memory(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(LONG))
    corpus = load(tmp_path, tmp_path / "text")
    assert (corpus.vocab, corpus.dtype, corpus.tokenizer_json) == (0xF0 + 1, np.uint8, None)
    assert not (tmp_path / "work").exists()
    batch = first(corpus, 1)
    assert (batch.dtype, batch.shape) == (np.uint8, (1, 4, 17))
    assert batch[0, 0].tobytes() in "".join(LONG).encode()
    held = corpus.validation(window=16, batch=8, windows=20)
    assert {b.shape for b in held} == {(8, 17)}
    last = "".join(LONG).encode()[-int(0.05 * len("".join(LONG).encode())) :]
    assert held[0][0].tobytes() == last[:17]


def test_default_corpus_is_the_python_standard_library(tmp_path: Path) -> None:
    corpus = load(tmp_path)
    assert 128 < corpus.vocab <= 256
    assert len(corpus.validation(window=16, batch=1, windows=10)) == 10


@pytest.mark.parametrize("tokenizer", [None, "bpe:300"])
def test_documents_are_prepared_once(
    tokenizer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "jsonl", LONG)
    corpus = load(tmp_path, path, tokenizer=tokenizer)
    assert corpus.dtype == np.int32
    batch = first(corpus, 400)
    assert (batch < 0).any()
    monkeypatch.delattr(sources, "prepare")
    again = load(tmp_path, path, tokenizer=tokenizer)
    assert again.fingerprint == corpus.fingerprint
    np.testing.assert_array_equal(first(again, 400), batch)


def test_bits_per_byte_do_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    """A model that gives every byte 3 bits, whatever the tokens."""
    path = write(tmp_path, "jsonl", LONG)
    for tokenizer in ("bytes", "bpe:300"):
        corpus = load(tmp_path, path, tokenizer=tokenizer)
        batches = corpus.validation(window=16, batch=4, windows=30)
        losses = []
        for batch in batches:
            targets = batch[:, 1:]
            targets = targets[targets >= 0]
            losses.append(3 * math.log(2) * corpus.token_bytes[targets].mean())
        assert math.isclose(corpus.bits_per_byte(losses, batches), 3, rel_tol=1e-12)


def test_several_texts_share_a_tokenizer_and_have_their_weights(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "jsonl", [letter * (99 + i) for i in range(30)])
    corpus = load(tmp_path, f"{tmp_path}/a=3", f"{tmp_path}/b=1")
    flat = first(corpus, 300)[:, :, 0]
    share = np.mean(np.where(flat < 0, ~flat, flat) == ord("a"))
    assert abs(share - 0.75) < 0.01
    held = np.concatenate(corpus.validation(window=16, batch=1, windows=8))[:, 1]
    assert [int((held == ord(x)).sum()) for x in "ab"] == [6, 2]
    words = load(
        tmp_path, tmp_path / "a", tmp_path / "b", tokenizer="bpe:270", window=1
    ).tokenizer_json
    assert b'"aa"' in (words or b"")
    assert b'"bb"' in (words or b"")


def test_weights_order_and_text_are_in_the_fingerprint(tmp_path: Path) -> None:
    a, b = (write(tmp_path, form, LONG) for form in ("jsonl", "parquet"))
    wishes = [(f"{a}=1", f"{b}=1"), (f"{a}=2", f"{b}=1"), (f"{a}",)]
    prints = [load(tmp_path, *wish).fingerprint for wish in wishes]
    assert len(set(prints)) == 3


def test_prepared_folders_are_taken_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", LONG)
    prepare(path, tmp_path / "out", tokenizer="bpe:300")
    corpus = load(tmp_path, tmp_path / "out")
    assert not (tmp_path / "work").exists()
    assert corpus.vocab == len(open_prepared(tmp_path / "out").token_bytes) > 256
    both = load(tmp_path, f"{tmp_path}/out=0.5", f"{path}=0.5")
    assert both.tokenizer_json == corpus.tokenizer_json
    with pytest.raises(InputError, match="--tokenizer bytes: a prepared folder has its own"):
        load(tmp_path, tmp_path / "out", tokenizer="bytes")
    prepare(path, tmp_path / "other", tokenizer="bpe:301")
    with pytest.raises(InputError, match=r"other and .*out have different tokenizers"):
        load(tmp_path, tmp_path / "out", tmp_path / "other")


@pytest.mark.parametrize(
    ("given", "expected"),
    [("a", ("a", 1.0)), ("a=0.7", ("a", 0.7)), ("a=b", ("a=b", 1.0)), ("a=b=2", ("a=b", 2.0))],
)
def test_a_weight_is_a_number_behind_a_path(given: str, expected: tuple[str, float]) -> None:
    assert weighted(given) == (Path(expected[0]), expected[1])


def test_a_file_may_be_named_so(tmp_path: Path) -> None:
    (tmp_path / "a=2").touch()
    assert weighted(f"{tmp_path}/a=2") == (tmp_path / "a=2", 1.0)


@pytest.mark.parametrize("given", ["", "=1", "a\0b", "a=0", "a=-1", "a=nan", "a=inf"])
def test_invalid_paths_and_nonpositive_or_nonfinite_weights_raise(given: str) -> None:
    with pytest.raises(InputError, match=r"(is not a path|the weight must be a number above 0)"):
        weighted(given)


def test_unusable_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    (tmp_path / "folder").mkdir()
    few = write(tmp_path, "jsonl", ["some words", "and more"])
    for name, complaint in {
        "missing": "no such file or folder",
        "empty": "is empty: name files",
        "folder": "is empty: name files",
        "short": "has 5 bytes, and a window of 16 needs at least 34",
        few.name: "too few tokens in its train part for a window of 16: add text, or lower",
    }.items():
        with pytest.raises(InputError, match=complaint):
            load(tmp_path, tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_unreadable_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 100)
    (tmp_path / "secret").chmod(0)
    with pytest.raises(InputError, match=r"cannot read .*secret: Permission denied"):
        load(tmp_path, tmp_path / "secret")


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", LONG)
    load(tmp_path, path)
    (shard,) = (tmp_path / "work").glob("*/train-00000.tokens.npy")
    with shard.open("r+b") as file:
        file.seek(500)
        file.write(b"\xff\xff")
    with pytest.raises(InputError, match=r"train-00000.tokens.npy is damaged"):
        load(tmp_path, path)


def test_an_epoch_holds_every_row_once(tmp_path: Path) -> None:
    corpus = load(tmp_path, write(tmp_path, "jsonl", LONG))
    (place,) = (tmp_path / "work").iterdir()
    rows = Rows(Stream(open_prepared(place).parts["train"]), 16)
    expected = Counter(rows[i].tobytes() for i in range(len(rows)))
    epoch = first(corpus, len(rows) // 4).reshape(-1, 17)
    found = Counter(row.tobytes() for row in epoch)
    assert found <= expected
    assert 4 * (len(rows) // 4) == found.total() > 100
