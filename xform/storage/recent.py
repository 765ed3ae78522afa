"""A cache of bounded size."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Recent(dict[Key, Value]):
    """A dict that keeps only the `most` entries that were added last.

    >>> from xform.storage.recent import Recent
    >>> found = Recent(2)
    >>> for i in range(4):
    ...     found[i] = str(i)
    >>> found
    {2: '2', 3: '3'}
    """

    def __init__(self, most: int = 256):
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        if len(self) > self.most:
            del self[next(iter(self))]
