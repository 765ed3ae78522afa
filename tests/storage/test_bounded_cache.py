"""A bounded cache stays within its bound, whichever method adds an entry."""

from collections.abc import Callable
from typing import Any

import pytest

from xform.storage.bounded_cache import BoundedCache


def set_each(cache: Any, entries: dict[int, str]) -> None:
    for key, value in entries.items():
        cache[key] = value


def set_defaults(cache: Any, entries: dict[int, str]) -> None:
    assert [cache.setdefault(key, value) for key, value in entries.items()] == [*entries.values()]


def update_in_place(cache: Any, entries: dict[int, str]) -> None:
    same = cache
    cache |= entries
    assert cache is same


@pytest.mark.parametrize(
    "add",
    [
        set_each,
        set_defaults,
        BoundedCache.update,
        lambda cache, entries: cache.update(entries.items()),
        update_in_place,
    ],
)
def test_each_way_to_add_an_entry_keeps_the_bound(add: Callable[[Any, Any], None]) -> None:
    cache: BoundedCache[int, str] = BoundedCache(3)
    add(cache, {key: str(key) for key in range(8)})
    assert cache == {5: "5", 6: "6", 7: "7"}


def test_setdefault_keeps_the_value_and_the_age_of_a_key() -> None:
    cache: BoundedCache[str, int] = BoundedCache(2)
    cache.update({"old": 1, "new": 2})
    assert cache.setdefault("old", 3) == 1
    assert cache.setdefault("old") == 1
    cache["newest"] = 4
    assert cache == {"new": 2, "newest": 4}
