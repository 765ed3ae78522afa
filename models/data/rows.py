"""Rows of tokens for language models, from plain bytes or from packed documents.

A row is `window + 1` consecutive tokens: the first `window` are the model's input, and the last
`window` are its targets.
"""

from __future__ import annotations

import numpy as np

from models.data.shards import Stream


class Windows:
    """A random-access source of consecutive windows of plain bytes. Neighbours share one byte."""

    def __init__(self, text: np.ndarray, window: int) -> None:
        self._text, self._window = text, window

    def __len__(self) -> int:
        return max(len(self._text) - 1, 0) // self._window

    def __getitem__(self, index: int) -> np.ndarray:
        """Return bytes, uint8 `[window + 1]`."""
        start = index * self._window
        return self._text[start : start + self._window + 1]


class Rows:
    """A random-access source of consecutive windows of packed documents, without padding.

    Neighbours share one token. The first token of a document is stored as `~token`, which is
    negative, unless it is the first of its row. A document that does not end in its row continues
    in the next row as a separate document: attention never crosses rows.
    """

    def __init__(self, stream: Stream, window: int) -> None:
        self._stream, self._window = stream, window

    def __len__(self) -> int:
        return max(len(self._stream) - 1, 0) // self._window

    def __getitem__(self, index: int) -> np.ndarray:
        """Return tokens, int32 `[window + 1]`, with negative marks."""
        start = index * self._window
        tokens, begins = self._stream.read(start, start + self._window + 1)
        tokens = tokens.astype(np.int32)
        begins[0] = False  # a row always begins a document
        return np.where(begins, ~tokens, tokens)


def count_targets(batch: np.ndarray, token_bytes: np.ndarray) -> tuple[int, float]:
    """Count the predicted tokens of a batch `[..., window + 1]`, and their bytes of text.

    The first token of a document is not predicted. A mean loss per predicted token, in nats,
    corresponds to `loss * tokens / bytes / log(2)` bits per byte.
    """
    targets = batch[..., 1:]
    predicted = targets[targets >= 0]
    return predicted.size, float(token_bytes[predicted].sum())
