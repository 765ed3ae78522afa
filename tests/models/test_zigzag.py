"""Blocks in zigzag order hold a row, and its documents are found across them."""

import jax.numpy as jnp
import numpy as np
import pytest

from models.nets.presets import build
from models.nets.segments import unpacked
from models.zigzag import zigzag_blocks, zigzag_order
from tests.models.micro import MODEL

ROW = np.arange(100, 125).astype(np.int32)  # 24 tokens and the last target


def test_each_device_has_an_early_and_a_late_block() -> None:
    assert zigzag_order(1) == [0, 1]
    assert zigzag_order(3) == [0, 5, 1, 4, 2, 3]
    order = np.array(zigzag_order(4)).reshape(4, 2)
    assert (order.sum(1) == 7).all()


def test_blocks_hold_the_row() -> None:
    blocks = zigzag_blocks(ROW, 2)
    assert blocks.tolist() == [[*range(a, a + 7)] for a in (100, 118, 106, 112)]
    assert zigzag_blocks(ROW, 1) is ROW


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("begins", [[], [1], [6, 7, 12, 23], [3, 24]])
def test_documents_are_those_of_the_row(devices: int, begins: list[int]) -> None:
    row = ROW.copy()
    row[begins] = ~row[begins]
    order = zigzag_order(devices)
    tokens, wanted = unpacked(jnp.asarray(row)[None])
    blocks, found = unpacked(jnp.asarray(zigzag_blocks(row, devices))[None])
    assert found.keys() == wanted.keys() == {"segments", "positions", "weights"}
    for name, x in wanted.items():
        in_order = np.asarray(x).reshape(2 * devices, -1)[order].reshape(1, -1)
        np.testing.assert_array_equal(found[name], in_order, name)
    np.testing.assert_array_equal(blocks[0], zigzag_blocks(np.asarray(tokens[0]), devices))


def test_positions_of_bytes() -> None:
    _, options = unpacked(jnp.asarray(zigzag_blocks(ROW.astype(np.uint8), 2))[None])
    assert options.keys() == {"positions"}
    assert options["positions"].tolist() == [[*range(6), *range(18, 24), *range(6, 18)]]


def test_blocks_for_other_devices_are_refused() -> None:
    blocks = jnp.zeros((1, 4, 5), jnp.int32)
    with pytest.raises(ValueError, match=r"in 4 blocks are for 2 devices .* has 1"):
        build(MODEL).loss(blocks)
