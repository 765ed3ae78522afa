"""Rows hold each token once, and say which document it is of."""

from typing import Any

import numpy as np
import pytest

from models.data.rows import Rows, judged
from models.data.shards import Shard, Stream

LENGTHS = [[3, 1, 7], [1], [20, 2, 2]]  # of documents, by shard


def stream() -> tuple[Stream, list[int]]:
    """Tokens that count up, and the document of each."""
    shards, owners, at, number = [], [], 0, 0
    for lengths in LENGTHS:
        shards.append(Shard(np.arange(at, at + sum(lengths)), np.cumsum(lengths)))
        at += sum(lengths)
        for length in lengths:
            owners += [number] * length
            number += 1
    return Stream(shards), owners


def renumbered(owners: list[int]) -> list[int]:
    """0 for the first, and so on, one token after another."""
    seen: list[int] = []
    return [seen.index(o) if o in seen else (seen.append(o), len(seen) - 1)[1] for o in owners]


@pytest.mark.parametrize("window", [1, 2, 5, 11, 12, 35])
def test_rows_are_the_stream_and_segments_its_documents(window: int) -> None:
    some, owners = stream()
    rows = Rows(some, window)
    assert len(some) == len(owners) == 36
    assert len(rows) == 35 // window
    for i in range(len(rows)):
        span = slice(i * window, i * window + window + 1)
        row = rows[i]
        np.testing.assert_array_equal(row["tokens"], np.arange(36)[span])
        assert row["segments"].tolist() == renumbered(owners[span])
        assert row["segments"].dtype == np.int32


def test_of_too_few_tokens_there_is_no_row() -> None:
    some, _ = stream()
    assert len(Rows(some, 36)) == 0
    assert len(Rows(Stream([]), 4)) == 0


def test_what_is_judged_is_within_documents() -> None:
    some, owners = stream()
    sizes = np.random.default_rng(0).integers(0, 9, 36).astype(float)
    rows = [Rows(some, 7)[i] for i in range(5)]
    batch: Any = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "segments")}
    pairs = [t for t in range(1, 36) if owners[t] == owners[t - 1]]
    assert judged(batch, sizes) == (len(pairs), sum(sizes[t] for t in pairs))
