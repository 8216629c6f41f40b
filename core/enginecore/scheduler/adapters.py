"""The scheduler's part in adapters: which of them lie in the device's slots.

There are as many slots as adapters may be in one batch. A sequence is admitted once its adapter has a slot: one that it
has already, an empty one, or that of the adapter that was used longest ago and that no running sequence has. One that
finds none waits, and so do sequences with adapters behind it, or a busy adapter would starve it; sequences of the base
model pass.
"""

from __future__ import annotations

from collections.abc import Iterable

from enginecore.adapters import AdapterKey
from enginecore.scheduler.running import RunningTable
from enginecore.scheduler.sequence import Sequence

#: So many waiting sequences are looked past for one whose adapter has a slot.
MAX_ASIDE = 64


class AdapterPlaces:
    """`take_placed` gives what has changed since the last plan: (slot, adapter)."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        #: The one that was used longest ago first.
        self._slots: dict[AdapterKey, int] = {}
        self._placed: list[tuple[int, AdapterKey]] = []
        self.num_placed = 0

    def place(self, key: AdapterKey, in_use: Iterable[AdapterKey | None]) -> bool:
        """Give an adapter a slot, if there is one beside those `in_use`."""
        slot = self._slots.pop(key, None)
        if slot is None:
            slot = self._find(set(in_use))
            if slot is None:
                return False
            self._placed.append((slot, key))
            self.num_placed += 1
        self._slots[key] = slot
        return True

    def admits(self, sequence: Sequence, running: RunningTable, aside: list[Sequence]) -> bool:
        """Whether a waiting sequence has its adapter in a slot from now on. `aside` are those before it that have
        none."""
        key = sequence.request.adapter
        if key is None:
            return True
        running_slots = running.order.tolist()
        return not aside and self.place(key, (running.sequence(slot).request.adapter for slot in running_slots))

    def _find(self, in_use: set[AdapterKey | None]) -> int | None:
        if self._free:
            return self._free.pop()
        idle = next((key for key in self._slots if key not in in_use), None)
        return None if idle is None else self._slots.pop(idle)

    def forget(self, key: AdapterKey) -> None:
        """The adapter is gone; nothing that runs has it."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
            self._placed = [entry for entry in self._placed if entry[1] != key]

    def take_placed(self) -> list[tuple[int, AdapterKey]]:
        placed, self._placed = self._placed, []
        return placed
