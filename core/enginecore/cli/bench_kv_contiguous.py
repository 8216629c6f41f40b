"""Contiguous KV memory, to compare paging with: a request gets one piece for all that it may need, at admission.

Three policies say how much: the longest sequence that the model allows ("max"), the prompt and the answer's length
rounded up to a power of two ("pow2"), or exactly what will be needed, which only an oracle knows ("oracle"). Pieces
come from a buddy allocator. Policies and allocator are those of the comparison in Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention" (2023), section 6.1. Everything else is the real
scheduler's: order, budget, batching at every step.
"""

from __future__ import annotations

from enginecore.request import EngineRequest
from enginecore.scheduler import Scheduler, SchedulerConfig
from enginecore.scheduler.sequence import Sequence

POLICIES = ("oracle", "pow2", "max")


class BuddyMemory:
    """Pieces of 2^k blocks, each split from a piece twice as large and merged with its other half when both are free.

    The memory need not be a power of two: it begins as the largest pieces that fit.
    """

    def __init__(self, num_blocks: int) -> None:
        self._free: dict[int, set[int]] = {}
        self._roots: dict[int, int] = {}
        start = 0
        for order in range(num_blocks.bit_length() - 1, -1, -1):
            if num_blocks >> order & 1:
                self._free.setdefault(order, set()).add(start)
                self._roots[start] = order
                start += 1 << order

    @property
    def num_free(self) -> int:
        return sum(len(starts) << order for order, starts in self._free.items())

    def take(self, num_blocks: int) -> tuple[int, int] | None:
        """(first block, order) of a piece of at least `num_blocks`, None when there is none."""
        wanted = max(0, num_blocks - 1).bit_length()
        order = min((order for order, starts in self._free.items() if order >= wanted and starts), default=None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free.setdefault(order, set()).add(start + (1 << order))
        return start, wanted

    def give_back(self, start: int, order: int) -> None:
        """A piece as `take` gave it."""
        root = max(first for first in self._roots if first <= start)
        while order < self._roots[root]:
            buddy = root + ((start - root) ^ (1 << order))
            if buddy not in self._free.get(order, ()):
                break
            self._free[order].remove(buddy)
            start, order = min(start, buddy), order + 1
        self._free.setdefault(order, set()).add(start)


def reserved_tokens(policy: str, request: EngineRequest, max_model_len: int) -> int:
    """Slots that a policy sets aside for a request."""
    prompt, answer = len(request.prompt_token_ids), request.max_tokens
    if policy == "max":
        return max_model_len
    if policy == "pow2":
        answer = 1 << max(0, answer - 1).bit_length()
    return min(prompt + answer, max_model_len)


class ContiguousScheduler(Scheduler):
    """The real scheduler with one piece of memory for each running sequence instead of blocks as they are needed."""

    def __init__(self, config: SchedulerConfig, policy: str) -> None:
        super().__init__(config)
        self._policy = policy
        self._memory = BuddyMemory(config.num_blocks)
        self._pieces: dict[str, tuple[int, int]] = {}

    def _attach(
        self, sequence: Sequence, cached: int, donor: Sequence | None, whole: int, spare: int, most: int,
        copies: list[tuple[int, int]],
    ) -> tuple[int, int] | None:  # fmt: skip
        wanted = self.kv.blocks_for(reserved_tokens(self._policy, sequence.request, self.config.max_model_len))
        piece = self._memory.take(wanted)
        if piece is None:
            return None
        self._pieces[sequence.request_id] = piece
        sequence.table.blocks = list(range(piece[0], piece[0] + wanted))
        return 0, min(len(sequence.token_ids), most)

    def _leave(self, sequence: Sequence) -> None:
        self.running.leave(sequence, self.waiting.key(sequence))
        sequence.table.blocks = []
        self._memory.give_back(*self._pieces.pop(sequence.request_id))
