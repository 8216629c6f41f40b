"""The scheduler's part that shares blocks: families of one prompt, what they may take over, and what is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginecore.kvcache import BlockTable, KVCacheManager
from enginecore.kvcache.events import EventRecorder
from enginecore.scheduler.journal import Journal
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.running import RunningTable
from enginecore.scheduler.sequence import Family, Sequence

if TYPE_CHECKING:
    from enginecore.scheduler.fairness import FairQueue
    from enginecore.scheduler.scheduler import SchedulerConfig


class Sharing:
    """A base of `Scheduler`, which owns what is named here."""

    config: SchedulerConfig
    kv: KVCacheManager
    running: RunningTable
    waiting: WaitingQueue | FairQueue
    journal: Journal
    events: EventRecorder | None
    _sequences: dict[str, Sequence]
    _num_pending: int

    def _join(self, sequence: Sequence) -> bool:
        """Make a sequence one of its parent's family; True when it has to wait until the prompt is computed."""
        request, parent = sequence.request, self._sequences.get(sequence.request.fork_of or "")
        if parent is None or sequence.prompt_logprobs is not None:
            return False
        other = parent.request
        if (other.prompt_token_ids, other.cache_salt, other.adapter) != (
            request.prompt_token_ids, request.cache_salt, request.adapter,
        ):  # fmt: skip
            return False
        family = parent.family
        if family is None:
            family = parent.family = Family(parent)
        sequence.family = family
        waits = self._donor(sequence) is None
        family.members.append(sequence)
        if waits:
            family.pending.append(sequence)
            self._num_pending += 1
        return waits

    def _donor(self, sequence: Sequence) -> Sequence | None:
        """A running sequence of the family whose prompt is computed, as of the last step."""
        if sequence.family is not None:
            for member in sequence.family.members:
                slot = member.slot
                if slot >= 0 and self.running.num_computed_S[slot] >= member.num_prompt:
                    return member
        return None

    def _part(self, sequence: Sequence, family: Family) -> None:
        """A member has ended. If it was the one that computed the prompt for the others, the next one does."""
        family.members.remove(sequence)
        if sequence in family.pending:
            family.pending.remove(sequence)
            self._num_pending -= 1
        elif family.pending and len(family.pending) == len(family.members):
            self._num_pending -= 1
            self.waiting.push(family.pending.pop(0))

    def _release_pending(self, slots: list[int]) -> None:
        """The prompts of these slots' sequences are computed: those that wait for them may be admitted."""
        for slot in slots:
            family = self.running.sequence(slot).family
            if family is not None and family.pending:
                for member in family.pending:
                    self.waiting.push(member)
                self._num_pending -= len(family.pending)
                family.pending = []

    def _reusable(self, sequence: Sequence) -> tuple[int, Sequence | None]:
        """How many of a waiting sequence's tokens are computed already: in the prefix cache (None), or, when that is
        more, in a sibling's blocks. Its last token is always computed anew, to have something to sample from."""
        tokens = sequence.token_ids
        cached = self.kv.match(sequence.table, tokens) if sequence.reads_cache else 0
        if sequence.family is None or sequence.prompt_logprobs is not None or len(tokens) > sequence.num_prompt:
            return cached, None
        shared = len(tokens) - 1
        if not self.config.copies_blocks:
            shared -= shared % self.config.block_size
        donor = self._donor(sequence) if shared > cached else None
        return (cached, None) if donor is None else (shared, donor)

    def _match_end(self, sequence: Sequence, cached: int, donor: Sequence | None) -> dict[str, Any]:
        """Where the reuse of computed tokens ended, and why."""
        block = cached // self.config.block_size
        if donor is not None:
            return {"block": block, "reason": "the last token of the prompt is always computed"}
        if not self.config.prefix_caching:
            return {"block": block, "reason": "prefix caching is off"}
        if not sequence.request.cached_prompt or sequence.request.params.prompt_logprobs is not None:
            return {"block": block, "reason": "the request asked for every prompt token to be computed"}
        if block >= (len(sequence.token_ids) - 1) // self.config.block_size:
            return {"block": block, "reason": "partial tail: the block of the last token is always computed"}
        return {"block": block, **self.journal.why_missing(sequence.table.hashes[block])}

    def _record_stored(self, slot: int, table: BlockTable, stored: list[int]) -> None:
        """One event for each run of consecutive blocks."""
        assert self.events is not None
        size, start = self.config.block_size, 0
        for i in range(1, len(stored) + 1):
            if i < len(stored) and stored[i] == stored[i - 1] + 1:
                continue
            first, end = stored[start], stored[i - 1] + 1
            tokens: list[int] = self.running.tokens_SL[slot, first * size : end * size].tolist()
            parent = table.hashes[first - 1] if first else None
            self.events.blocks_stored(table.hashes[first:end], parent, tokens)
            start = i
