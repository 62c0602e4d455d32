"""A mapping of limited size that drops the least recently used entry."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class Recent(dict[Key, Item], Generic[Key, Item]):
    """A cache that holds at most `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def get(self, key: Key, default: Item | None = None) -> Item | None:  # type: ignore[override]
        """Returns an entry and makes it the most recently used one."""
        if key not in self:
            return default
        found = super().pop(key)
        super().__setitem__(key, found)
        return found

    def __setitem__(self, key: Key, item: Item) -> None:
        """Adds or replaces an entry. If there are too many, the least recently used one is dropped."""
        self.pop(key, None)
        super().__setitem__(key, item)
        while len(self) > self.most:
            del self[next(iter(self))]
