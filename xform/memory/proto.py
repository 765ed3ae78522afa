"""Read the wire format of protocol buffers in plain Python.

A message is a sequence of fields. A field is a tag (a varint of field number and wire type), then a
varint, 4 or 8 bytes, or a length and that many bytes. The format does not say what these bytes are
(text, packed numbers, another message); the caller knows. A nested message stays a slice of the
file until it is read. So fields that are never read, such as the literals of constants, cost
nothing.
Source: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Corrupt(ValueError):
    """Raised for bytes that are not a valid message."""


class Message:
    """One message of a protocol buffer. The methods return the values of a field, by its number.

    Args:
      data: the bytes of the message, without its length.

    Raises:
      Corrupt: a field reaches beyond the end, or has an unknown wire type. The methods raise it if
        the values of a field have another kind.

    Cost: about a microsecond for each field of this message; nested messages are not read.

    >>> from xform.memory.proto import Message
    >>> m = Message(bytes([8, 150, 1, 18, 2, 104, 105]))
    >>> m.number(1), m.text(2), m.number(3)
    (150, 'hi', 0)
    """

    __slots__ = ("_fields",)

    def __init__(self, data: bytes | memoryview):
        self._fields = _split(memoryview(data))

    def number(self, field: int, default: int = 0) -> int:
        """Return the value of a signed integer, boolean or enumeration; if repeated, the last."""
        values = self._fields.get(field)
        if values is None:
            return default
        if not isinstance(values[-1], int):
            raise Corrupt(f"field {field} is not a number")
        return _signed(values[-1])

    def numbers(self, field: int) -> list[int]:
        """Return the values of a repeated integer, packed or not."""
        values: list[int] = []
        for value in self._fields.get(field, ()):
            values.extend([_signed(value)] if isinstance(value, int) else _packed(value))
        return values

    def text(self, field: int) -> str:
        """Return the value of a string, the last one if it is repeated; "" if it is absent."""
        values = self._bytes(field)
        return str(values[-1], "utf-8", "replace") if values else ""

    def texts(self, field: int) -> list[str]:
        """Return the values of a repeated string."""
        return [str(value, "utf-8", "replace") for value in self._bytes(field)]

    def raw(self, field: int) -> bytes:
        """Return the bytes of a field, such as of a nested message; empty if it is absent."""
        values = self._bytes(field)
        return bytes(values[-1]) if values else b""

    def message(self, field: int) -> Message:
        """Return a nested message; an empty message if it is absent."""
        values = self._bytes(field)
        return Message(values[-1] if values else b"")

    def messages(self, field: int) -> Iterator[Message]:
        """Return the values of a repeated message, each read when the iterator reaches it."""
        return map(Message, self._bytes(field))

    def __contains__(self, field: int) -> bool:
        return field in self._fields

    def _bytes(self, field: int) -> list[Any]:
        """Return the values of a field that are bytes, or raise `Corrupt` for numbers."""
        values = self._fields.get(field, [])
        if any(isinstance(value, int) for value in values):
            raise Corrupt(f"field {field} is a number, not bytes")
        return values


def _split(data: memoryview) -> dict[int, list[Any]]:
    """Return the values of each field of a message, by its number.

    Values of one byte, which are the most frequent, are read without a call of `_varint`.
    """
    fields: dict[int, list[Any]] = {}
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _varint(data, at - 1)
            wire_type = tag & 7
            if wire_type == 0:  # a varint
                value: Any = data[at]
                at += 1
                if value > 127:
                    value, at = _varint(data, at - 1)
            elif wire_type == 2:  # a length and that many bytes
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _varint(data, at - 1)
                value = data[at : at + size]
                at += size
            elif wire_type in (1, 5):  # eight or four bytes
                size = 8 if wire_type == 1 else 4
                value = int.from_bytes(data[at : at + size], "little")
                at += size
            else:
                raise Corrupt(f"wire type {wire_type} at byte {at}")
            if at > end or tag < 8:
                raise Corrupt(f"a field ends at byte {at} of {end}" if tag > 7 else "field 0")
            fields.setdefault(tag >> 3, []).append(value)
    except IndexError:
        raise Corrupt(f"the message ends in the middle of a number, at byte {end}") from None
    return fields


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint that starts at byte `at`, and the byte after it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise Corrupt(f"a number of more than ten bytes at byte {at}")


def _packed(data: memoryview) -> Iterator[int]:
    """Yield the signed integers in the bytes of a packed field."""
    at = 0
    try:
        while at < len(data):
            value, at = _varint(data, at)
            yield _signed(value)
    except IndexError:
        raise Corrupt("packed numbers end in the middle of one") from None


def _signed(value: int) -> int:
    """Return an unsigned 64-bit number as a signed one (two's complement)."""
    return value - (1 << 64) if value >> 63 else value
