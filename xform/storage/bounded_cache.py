"""A cache of bounded size."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dict that keeps only the `max_entries` entries that were added last.

    >>> from xform.storage.bounded_cache import BoundedCache
    >>> found = BoundedCache(2)
    >>> for i in range(4):
    ...     found[i] = str(i)
    >>> found
    {2: '2', 3: '3'}
    """

    def __init__(self, max_entries: int = 256):
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.max_entries:
            del self[next(iter(self))]
