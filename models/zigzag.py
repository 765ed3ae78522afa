"""Sequences that several devices share: blocks in an order that gives each the same work.

A causal model does more work for later tokens. So a sequence is cut into 2n blocks, and device i of
n gets the blocks i and 2n - 1 - i.
"""

from __future__ import annotations

import numpy as np


def zigzag_order(devices: int) -> list[int]:
    """Return the number of each of the 2n blocks, in the order of the devices that hold them."""
    return [block for i in range(devices) for block in (i, 2 * devices - 1 - i)]


def zigzag_blocks(row: np.ndarray, devices: int) -> np.ndarray:
    """Cut tokens `[T + 1]` into blocks `[2n, T / 2n + 1]` in zigzag order.

    Neighbouring blocks share one token, the last target of one and the first input of the other.
    T must be a multiple of 2n. With one device the row is returned as it is.
    """
    if devices == 1:
        return row
    size = (len(row) - 1) // (2 * devices)
    return np.stack([row[i * size : (i + 1) * size + 1] for i in zigzag_order(devices)])
