"""A cache of bounded size."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dict that keeps only the `max_entries` entries whose keys were added last.

    Setting a key again does not make it newer, and reading does not either.

    >>> from xform.storage.bounded_cache import BoundedCache
    >>> cache = BoundedCache(2)
    >>> for i in range(4):
    ...     cache[i] = str(i)
    >>> cache
    {2: '2', 3: '3'}
    """

    def __init__(self, max_entries: int = 256):
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.max_entries:
            del self[next(iter(self))]
