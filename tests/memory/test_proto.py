"""The wire format, on bytes made by hand."""

import pytest

from xform.memory.proto import Corrupt, Message


def test_numbers() -> None:
    m = Message(bytes([8, 150, 1, 8, 3, 16, *[255] * 9, 1]))
    assert m.number(1) == 3
    assert m.numbers(1) == [150, 3]
    assert m.number(2) == -1
    assert m.number(9, 7) == 7
    assert 1 in m
    assert 9 not in m


def test_packed_and_not() -> None:
    assert Message(bytes([10, 3, 1, 150, 1, 8, 5])).numbers(1) == [1, 150, 5]


def test_fixed_sizes() -> None:
    m = Message(bytes([9, *range(8), 21, 1, 0, 0, 0]))
    assert m.number(1) == int.from_bytes(bytes(range(8)), "little")
    assert m.number(2) == 1


def test_text_and_messages() -> None:
    inner = bytes([8, 1, 18, 2, 104, 105])
    m = Message(bytes([10, len(inner), *inner, 10, 2, 8, 2]))
    assert [i.number(1) for i in m.messages(1)] == [1, 2]
    assert next(m.messages(1)).text(2) == "hi"
    assert m.message(1).number(1) == 2
    assert m.message(5).text(1) == ""
    assert m.texts(7) == []


def test_field_numbers_and_lengths_of_many_bytes() -> None:
    assert Message(bytes([130, 1, 200, 1, *b"x" * 200])).text(16) == "x" * 200


def test_malformed_fields_that_are_not_requested_are_skipped() -> None:
    assert Message(bytes([10, 2, 255, 255, 16, 4])).number(2) == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([10, 5, 1], "a field ends at byte 7 of 3"),
        ([8], "ends in the middle of a number"),
        ([8, 255], "ends in the middle of a number"),
        ([8, *[255] * 11], "more than ten bytes"),
        ([15], "wire type 7"),
        ([0, 1], "field 0"),
        ([9, 1, 2], "a field ends"),
    ],
)
def test_corrupt(data: list[int], says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        Message(bytes(data))


def test_wrong_kinds() -> None:
    m = Message(bytes([8, 1, 18, 1, 255]))
    with pytest.raises(Corrupt, match="field 1 is a number"):
        m.message(1)
    with pytest.raises(Corrupt, match="field 2 is not a number"):
        m.number(2)
    with pytest.raises(Corrupt, match="packed numbers end"):
        m.numbers(2)
