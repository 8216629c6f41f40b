"""The waiting queue: ordered by priority then arrival (or arrival alone), with O(log n) push and pop, O(1) removal."""

from __future__ import annotations

import heapq

from enginecore.scheduler.sequence import Sequence


class WaitingQueue:
    """Smaller `priority` goes first, as in vLLM. A preempted sequence keeps its arrival and so comes before later ones.
    Removed sequences stay in the heap, marked, until they surface or are more than those that wait."""

    def __init__(self, *, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._heap: list[tuple[int, int, Sequence]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def key(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.request.priority if self._by_priority else 0, sequence.arrival)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (*self.key(sequence), sequence))
        self._live += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty waiting queue")
        heapq.heappop(self._heap)
        self._live -= 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        self._live -= 1
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled]
            heapq.heapify(self._heap)
