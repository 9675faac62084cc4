"""Kept items: the output of recent responses, for requests that name an item by its id in place of sending it back."""

from __future__ import annotations

import sys
from collections import OrderedDict

from neper.server.bodies.response_items import InputItem

# Bytes of an item's objects, besides its text.
_OVERHEAD = 1024


class KeptItems:
    """Items by their id, in memory. The oldest ones are dropped first.

    Args:
        max_bytes: most bytes of all items; 0 = nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._items: OrderedDict[str, tuple[InputItem, int]] = OrderedDict()

    def keep(self, item_id: str, item: InputItem, text: str) -> None:
        """Keep an item, whose size is about that of its text."""
        size = sys.getsizeof(text) + _OVERHEAD
        if size > self._max_bytes:
            return
        self._items[item_id] = item, size
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._items.popitem(last=False)
            self.num_bytes -= dropped

    def get(self, item_id: str) -> InputItem | None:
        item, _ = self._items.get(item_id, (None, 0))
        return item
