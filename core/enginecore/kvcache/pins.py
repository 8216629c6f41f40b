"""Prefixes that are to stay cached for a time: names of blocks, whether these are computed yet or not.

A pin is a set of block identities and the moment when it ends. The blocks are the last to be evicted (`eviction.py`)
while any pin names them. Who pins the same prefix again begins its time anew.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """`hashes` in the order of the prefix; `ends` by the engine's clock; `owner` is the tenant who asked for it."""

    name: str
    hashes: tuple[bytes, ...]
    ends: float
    owner: str = ""


class Pins:
    """At most `max_blocks` different blocks are pinned at a time, half of them by one owner that has a name."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._pins: dict[str, Pin] = {}
        self._count: dict[bytes, int] = {}
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._count

    @property
    def num_blocks(self) -> int:
        return len(self._count)

    def get(self, name: str) -> Pin | None:
        return self._pins.get(name)

    def all(self) -> list[Pin]:
        """The pins, those that end first before others."""
        return sorted(self._pins.values(), key=lambda pin: pin.ends)

    def add(self, name: str, hashes: Iterable[bytes], ends: float, owner: str = "") -> list[bytes] | None:
        """Pin blocks, or begin the time of that pin anew (it never becomes shorter). Returns those that were not pinned
        before, None (and nothing changed) when they would be too many."""
        wanted = tuple(hashes)
        before = self._pins.get(name)
        fresh = [each for each in dict.fromkeys(wanted) if each not in self._count]
        if len(self._count) + len(fresh) > self.max_blocks or (owner and self._too_many(owner, name, wanted)):
            return None
        if before is not None:
            ends = max(ends, before.ends)
        self._pins[name] = Pin(name, wanted, ends, owner)
        for each in wanted:
            self._count[each] = self._count.get(each, 0) + 1
        if before is not None:
            self._drop(before)
        heapq.heappush(self._ends, (ends, name))
        return fresh

    def _too_many(self, owner: str, name: str, wanted: tuple[bytes, ...]) -> bool:
        own = set(wanted)
        for pin in self._pins.values():
            if pin.owner == owner and pin.name != name:
                own.update(pin.hashes)
        return len(own) > self.max_blocks // 2

    def remove(self, name: str) -> list[bytes] | None:
        """End a pin. Returns the blocks that no pin names any more, None when there is no such pin."""
        pin = self._pins.pop(name, None)
        return None if pin is None else self._drop(pin)

    def expire(self, now: float) -> list[bytes]:
        """End the pins whose time is over; the blocks that no pin names any more."""
        freed: list[bytes] = []
        while self._ends and self._ends[0][0] <= now:
            ends, name = heapq.heappop(self._ends)
            pin = self._pins.get(name)
            if pin is not None and pin.ends == ends:
                freed += self.remove(name) or []
        return freed

    def _drop(self, pin: Pin) -> list[bytes]:
        freed = []
        for each in pin.hashes:
            self._count[each] -= 1
            if not self._count[each]:
                del self._count[each]
                freed.append(each)
        return freed
