"""A cache of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dict that keeps only the `max_entries` entries whose keys were added last.

    Setting a key again does not make it newer, and reading does not either. Every method that adds
    entries keeps the bound.

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

    def setdefault(self, key: Key, default: Any = None) -> Any:
        """Return the value of a key; if it has none, set it to `default` first."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, entries: Mapping[Key, Value] | Iterable[tuple[Key, Value]]
    ) -> None:
        """Set each of these entries, in their order."""
        for key, value in dict(entries).items():
            self[key] = value

    def __ior__(self, entries: Any) -> BoundedCache[Key, Value]:
        self.update(entries)
        return self
