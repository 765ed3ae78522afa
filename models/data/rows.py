"""Rows of tokens for language models: of plain bytes, or of documents one after another."""

from __future__ import annotations

import numpy as np

from models.data.shards import Stream


class Windows:
    """Consecutive windows of plain bytes as a random-access source; neighbours share one byte."""

    def __init__(self, text: np.ndarray, window: int) -> None:
        self._text, self._window = text, window

    def __len__(self) -> int:
        return max(len(self._text) - 1, 0) // self._window

    def __getitem__(self, index: int) -> np.ndarray:
        """Bytes, uint8 `[window + 1]`."""
        start = index * self._window
        return self._text[start : start + self._window + 1]


class Rows:
    """Consecutive windows of documents, packed with no padding; neighbours share one token.

    A token that begins a document within its row is marked: `~token`, which is negative, stands for
    it. A document that does not end in its row goes on in the next, as one of its own: nobody sees
    across rows.
    """

    def __init__(self, stream: Stream, window: int) -> None:
        self._stream, self._window = stream, window

    def __len__(self) -> int:
        return max(len(self._stream) - 1, 0) // self._window

    def __getitem__(self, index: int) -> np.ndarray:
        """Marked tokens, int32 `[window + 1]`."""
        start = index * self._window
        tokens, begins = self._stream.read(start, start + self._window + 1)
        tokens = tokens.astype(np.int32)
        begins[0] = False  # what stands before is in another row
        return np.where(begins, ~tokens, tokens)


def judged(batch: np.ndarray, token_bytes: np.ndarray) -> tuple[int, float]:
    """How many tokens of a batch `[..., window + 1]` are predicted, and their bytes of text.

    The first of a document is not. The mean loss of those tokens, in nats, is
    `loss * tokens / bytes / log(2)` bits per byte.
    """
    targets = batch[..., 1:]
    predicted = targets[targets >= 0]
    return predicted.size, float(token_bytes[predicted].sum())
