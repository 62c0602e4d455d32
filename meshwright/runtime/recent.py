"""A mapping of limited size that forgets the entry that was not used for the longest time."""

from __future__ import annotations

from typing import Generic, TypeVar

Key = TypeVar("Key")
Item = TypeVar("Item")


class Recent(dict[Key, Item], Generic[Key, Item]):
    """A cache with room for `most` entries."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def get(self, key: Key, default: Item | None = None) -> Item | None:  # type: ignore[override]
        """An entry, which is the most recent one from now on."""
        if key not in self:
            return default
        found = super().pop(key)
        super().__setitem__(key, found)
        return found

    def __setitem__(self, key: Key, item: Item) -> None:
        """Add an entry, or replace one; beyond the limit the oldest goes."""
        self.pop(key, None)
        super().__setitem__(key, item)
        while len(self) > self.most:
            del self[next(iter(self))]
