"""Rows hold each token once, and mark where documents begin."""

import numpy as np
import pytest

from models.data.rows import Rows, Windows, count_targets
from models.data.shards import Shard, Stream

LENGTHS = [[3, 1, 7], [1], [20, 2, 2]]  # of documents, by shard


def stream() -> tuple[Stream, list[int]]:
    """Return tokens that count up, and the document of each."""
    shards, owners, at, number = [], [], 0, 0
    for lengths in LENGTHS:
        shards.append(Shard(np.arange(at, at + sum(lengths)), np.cumsum(lengths)))
        at += sum(lengths)
        for length in lengths:
            owners += [number] * length
            number += 1
    return Stream(shards), owners


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 35])
def test_rows_are_the_stream_with_marks_where_documents_begin(window: int) -> None:
    some, owners = stream()
    rows = Rows(some, window)
    assert len(some) == len(owners) == 36
    assert len(rows) == 35 // window
    for i in range(len(rows)):
        start, stop = i * window, i * window + window + 1
        expected = [
            ~t if t > start and owners[t] != owners[t - 1] else t for t in range(start, stop)
        ]
        assert rows[i].tolist() == expected
        assert rows[i].dtype == np.int32


def test_of_too_few_tokens_there_is_no_row() -> None:
    some, _ = stream()
    assert len(Rows(some, 36)) == 0
    assert len(Rows(Stream([]), 4)) == 0


def test_targets_are_within_documents() -> None:
    some, owners = stream()
    sizes = np.random.default_rng(0).integers(0, 9, 36).astype(float)
    batch = np.stack([Rows(some, 7)[i] for i in range(5)])
    pairs = [t for t in range(1, 36) if owners[t] == owners[t - 1]]
    assert count_targets(batch, sizes) == (len(pairs), sum(sizes[t] for t in pairs))


def test_windows_cover_the_text_and_share_one_byte() -> None:
    text = np.arange(1000).astype(np.uint8)
    windows = Windows(text, 10)
    assert len(windows) == 99
    assert (windows[0][-1], windows[1][0]) == (10, 10)
    assert all(len(windows[i]) == 11 for i in range(len(windows)))
    assert count_targets(windows[3], np.ones(256)) == (10, 10.0)
