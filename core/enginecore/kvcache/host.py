"""The books of the host tier: which block lies in which slot of host memory, least recently used first.

A slot is free, being filled (claimed, not yet ready), ready, or ready and held by a copy that reads it. Only ready
slots that nobody holds are evicted. The bytes are the mover's; nothing here knows them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class HostTier:
    """`num_slots` slots, numbered from 0. Used by the engine's thread only."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.evictions = 0
        #: Told of blocks that have come (True) and were evicted (False).
        self.on_change: Callable[[bytes, bool], None] | None = None
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        self._filling: dict[bytes, int] = {}
        self._held: dict[int, int] = {}
        self._is_ready = [False] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def slot(self, block_hash: bytes) -> int | None:
        """The slot of a block that is ready."""
        return self._ready.get(block_hash)

    def knows(self, block_hash: bytes) -> bool:
        """Whether the block is ready or on its way."""
        return block_hash in self._ready or block_hash in self._filling

    def touch(self, block_hash: bytes) -> None:
        """The block was asked for, here or on the device."""
        if block_hash in self._ready:
            self._ready.move_to_end(block_hash)

    def claim(self, block_hash: bytes) -> int | None:
        """A slot to fill with a block that `knows` does not know; None when every slot is in use."""
        slot = self._free.pop() if self._free else self._evict()
        if slot is not None:
            self._filling[block_hash] = slot
        return slot

    def _evict(self) -> int | None:
        for block_hash, slot in self._ready.items():
            if slot not in self._held:
                del self._ready[block_hash]
                self._is_ready[slot] = False
                self.evictions += 1
                if self.on_change is not None:
                    self.on_change(block_hash, False)
                return slot
        return None

    def settle(self, block_hash: bytes, slot: int, filled: bool) -> bool:
        """The copy into `slot` has ended; whether the block can be found from now on. Not if `clear` came between."""
        known = self._filling.get(block_hash) == slot
        if known:
            del self._filling[block_hash]
        if known and filled:
            self._ready[block_hash] = slot
            self._is_ready[slot] = True
            if self.on_change is not None:
                self.on_change(block_hash, True)
            return True
        self._free.append(slot)
        return False

    def hold(self, slot: int) -> None:
        """Keep a ready slot from being evicted until `unhold`."""
        self._held[slot] = self._held.get(slot, 0) + 1

    def unhold(self, slot: int) -> None:
        count = self._held.pop(slot) - 1
        if count:
            self._held[slot] = count
        elif not self._is_ready[slot]:
            self._free.append(slot)  # it was cleared while it was held

    def clear(self) -> int:
        """Forget every block; returns how many. Slots that copies use come back when those end."""
        count = len(self._ready)
        for slot in self._ready.values():
            self._is_ready[slot] = False
            if slot not in self._held:
                self._free.append(slot)
        self._ready.clear()
        self._filling.clear()
        return count

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken. For tests."""
        ready, free = set(self._ready.values()), set(self._free)
        assert len(free) == len(self._free) and len(ready) == len(self._ready), "a slot is listed twice"
        assert not ready & free and not free & set(self._held) and not free & set(self._filling.values())
