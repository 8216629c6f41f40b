"""The running table: one row (slot) a running sequence, as arrays, so that a step costs little a sequence.

Shape suffixes: S slots, L longest sequence, X stop-token columns.
"""

from __future__ import annotations

import bisect

import numpy as np

from enginecore.plan import IntArray
from enginecore.scheduler.sequence import Sequence

#: Stop tokens that are compared as arrays; a request with more is checked on its own.
STOP_COLUMNS = 8


class RunningTable:
    """Rows are valid for the slots in `order`, which lists them in scheduling order (first served first)."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.tokens_SL = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.num_tokens_S = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_S = np.zeros(max_num_seqs, np.int64)
        self.num_computed_S = np.zeros(max_num_seqs, np.int64)
        #: Of the computed tokens, those of steps that are booked.
        self.num_booked_S = np.zeros(max_num_seqs, np.int64)
        #: How many of the tokens, the last ones, are being computed and not known yet.
        self.ahead_S = np.zeros(max_num_seqs, np.int64)
        #: Slots whose next step can only be prepared when all tokens are known.
        self.needs_tokens_S = np.zeros(max_num_seqs, np.bool_)
        #: Counts who enters and leaves each slot.
        self.entries_S = np.zeros(max_num_seqs, np.int64)
        self.num_blocks_S = np.zeros(max_num_seqs, np.int64)
        self.max_total_S = np.zeros(max_num_seqs, np.int64)
        #: Slots whose sequence is part of a beam search.
        self.beam_S = np.zeros(max_num_seqs, np.bool_)
        self.stop_SX = np.full((max_num_seqs, STOP_COLUMNS), -1, np.int64)
        self.sequences: list[Sequence | None] = [None] * max_num_seqs
        self.many_stops: dict[int, frozenset[int]] = {}
        #: Tokens that may come next, by slot.
        self.guesses: dict[int, list[int]] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._keys: list[tuple[int, int, int]] = []
        self._order: IntArray | None = None

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def order(self) -> IntArray:
        if self._order is None:
            self._order = np.array([slot for _, _, slot in self._keys], np.int64)
        return self._order

    def sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def reserve(self, count: int) -> list[int]:
        """Slots that nobody gets until they are entered by number, or given back with `unreserve`."""
        return [self._free_slots.pop() for _ in range(count)]

    def unreserve(self, slots: list[int]) -> None:
        self._free_slots += slots

    def enter(self, sequence: Sequence, key: tuple[int, int], num_computed: int, slot: int | None = None) -> int:
        """Take a slot, or a certain one that was reserved; `key` orders the sequence among the running."""
        slot = self._free_slots.pop() if slot is None else slot
        sequence.slot = slot
        count = len(sequence.token_ids)
        self.tokens_SL[slot, :count] = sequence.token_ids
        self.num_tokens_S[slot] = count
        self.num_prompt_S[slot] = sequence.num_prompt
        self.num_computed_S[slot] = self.num_booked_S[slot] = num_computed
        self.ahead_S[slot] = 0
        self.entries_S[slot] += 1
        self.needs_tokens_S[slot] = sequence.needs_known_tokens
        self.num_blocks_S[slot] = len(sequence.table.blocks)
        self.max_total_S[slot] = sequence.num_prompt + sequence.request.max_tokens
        self.beam_S[slot] = sequence.group is not None
        stops = _stop_tokens(sequence)
        self.stop_SX[slot] = -1
        if len(stops) <= STOP_COLUMNS:
            self.stop_SX[slot, : len(stops)] = sorted(stops)
        else:
            self.many_stops[slot] = stops
        self.sequences[slot] = sequence
        bisect.insort(self._keys, (*key, slot))
        self._order = None
        return slot

    def leave(self, sequence: Sequence, key: tuple[int, int], *, keep_slot: bool = False) -> None:
        """Give the slot back, or keep it reserved; the sequence takes the tokens that are known along."""
        slot = sequence.slot
        self.entries_S[slot] += 1
        sequence.token_ids = self.tokens(slot)
        sequence.slot = -1
        self.sequences[slot] = None
        self.many_stops.pop(slot, None)
        self.guesses.pop(slot, None)
        if not keep_slot:
            self._free_slots.append(slot)
        del self._keys[bisect.bisect_left(self._keys, (*key, slot))]
        self._order = None

    def tokens(self, slot: int) -> list[int]:
        ids: list[int] = self.tokens_SL[slot, : self.num_known(slot)].tolist()
        return ids

    def num_known(self, slot: int) -> int:
        return int(self.num_tokens_S[slot] - self.ahead_S[slot])


def _stop_tokens(sequence: Sequence) -> frozenset[int]:
    request = sequence.request
    stops = set(request.params.stop_token_ids or ())
    if not request.params.ignore_eos or request.grammar is not None:  # nothing may follow a complete answer
        stops.update(request.eos_token_ids)
    return frozenset(stops)
