"""Rows of tokens for language models: documents packed one after another, none of it padding."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from models.data.shards import Stream


class Row(TypedDict):
    """Tokens that are read together, `[window + 1]`, and the document of each: 0, 1, ..., int32."""

    tokens: np.ndarray
    segments: np.ndarray


class Rows:
    """Consecutive windows of documents as a random-access source; neighbours share one token.

    A document that does not end in its row goes on in the next, as one of its own: nobody sees
    across rows. Where the segment changes, the next token is not to be predicted.
    """

    def __init__(self, stream: Stream, window: int) -> None:
        self._stream, self._window = stream, window

    def __len__(self) -> int:
        return max(len(self._stream) - 1, 0) // self._window

    def __getitem__(self, index: int) -> Row:
        start = index * self._window
        tokens, segments = self._stream.read(start, start + self._window + 1)
        return {"tokens": tokens, "segments": segments}


def judged(batch: Row, token_bytes: np.ndarray) -> tuple[int, float]:
    """How many tokens of a batch are predicted, and how many bytes of text they stand for.

    The mean loss of those tokens, in nats, is `loss * tokens / bytes / log(2)` bits per byte.
    """
    within = batch["segments"][..., 1:] == batch["segments"][..., :-1]
    targets = batch["tokens"][..., 1:][within]
    return int(within.sum()), float(token_bytes[targets].sum())
