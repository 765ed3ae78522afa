"""Windows of bytes: what is read, how it is split, and that the order is a function of the seed."""

import os
from pathlib import Path

import numpy as np
import pytest

from models.data.windows import Windows, load_corpus, train_batches, validation_batches
from models.errors import InputError

TEXT = np.arange(1000, dtype=np.int64).astype(np.uint8)


def batches(count: int, seed: int = 0) -> list[np.ndarray]:
    iterator = train_batches(TEXT, window=10, batch=4, seed=seed)
    return [next(iterator) for _ in range(count)]


def test_windows_cover_the_text_and_share_one_byte() -> None:
    windows = Windows(TEXT, 10)
    assert len(windows) == 99
    assert (windows[0][-1], windows[1][0]) == (10, 10)
    assert all(len(windows[i]) == 11 for i in range(len(windows)))


def test_order_is_a_function_of_the_seed_and_epochs_differ() -> None:
    np.testing.assert_array_equal(batches(60), batches(60))
    assert not np.array_equal(batches(3), batches(3, seed=1))
    starts = np.concatenate(batches(99))[:, 0]
    first, second = starts[:99], starts[99:198]
    np.testing.assert_array_equal(np.sort(first), np.sort(second))
    assert not np.array_equal(first, second)


def test_iterator_state_resumes_exactly() -> None:
    iterator = train_batches(TEXT, window=10, batch=4, seed=3)
    for _ in range(30):
        next(iterator)
    state = iterator.get_state()
    expected = [next(iterator) for _ in range(5)]
    resumed = train_batches(TEXT, window=10, batch=4, seed=3)
    resumed.set_state(state)
    np.testing.assert_array_equal([next(resumed) for _ in range(5)], expected)


def test_validation_has_one_shape_and_spans_the_text() -> None:
    chosen = validation_batches(TEXT, window=10, batch=8, windows=30)
    assert {b.shape for b in chosen} == {(8, 11)}
    assert len(chosen) == 3
    assert [b.shape for b in validation_batches(TEXT[:25], window=10, batch=8, windows=30)] == [
        (2, 11)
    ]


def test_default_corpus_is_the_standard_library() -> None:
    corpus = load_corpus(None, 128)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) > 50_000
    assert b"import" in corpus.train.tobytes()


def test_a_folder_is_read_in_an_order_of_names_alone(tmp_path: Path) -> None:
    names = [f"{i}.txt" for i in range(8)]
    for folder, order in (("one", names), ("two", names[::-1])):
        (tmp_path / folder / "inner").mkdir(parents=True)
        for name in order:
            (tmp_path / folder / "inner" / name).write_text(name * 50)
    one, two = (load_corpus(tmp_path / folder, 8) for folder in ("one", "two"))
    assert one.fingerprint == two.fingerprint


def test_unusable_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("short")
    (tmp_path / "folder").mkdir()
    for name, complaint in {
        "missing": "no such file or folder",
        "empty": "no bytes",
        "folder": "no bytes",
        "short": "has 5 bytes, and windows of 16 need at least 34",
    }.items():
        with pytest.raises(InputError, match=complaint):
            load_corpus(tmp_path / name, 16)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads every file")
def test_unreadable_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x" * 100)
    (tmp_path / "secret").chmod(0)
    with pytest.raises(InputError, match=r"cannot read .*secret: Permission denied"):
        load_corpus(tmp_path / "secret", 16)
