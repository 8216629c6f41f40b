"""The scheduler's part that shares blocks: families of one prompt, what they may take over, and what is told of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginecore.kvcache import BlockTable, KVCacheManager
from enginecore.kvcache.events import EventRecorder
from enginecore.kvcache.hashing import token_bytes
from enginecore.request import EngineStats
from enginecore.scheduler.journal import Journal
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.running import RunningTable
from enginecore.scheduler.sequence import Family, Sequence

if TYPE_CHECKING:
    from enginecore.scheduler.config import SchedulerConfig
    from enginecore.scheduler.fairness import FairQueue


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
    _counts: EngineStats
    #: Blocks that the plan's copies are from and that nobody else may get before it has run.
    _held: list[int]

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
                if slot >= 0 and self.running.num_booked_S[slot] >= member.num_prompt:
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
        if not self.config.copies_blocks and self.kv.num_shared(shared) * self.config.block_size < shared:
            shared -= shared % self.config.block_size
        donor = self._donor(sequence) if shared > cached else None
        return (cached, None) if donor is None else (shared, donor)

    def _attach(
        self, sequence: Sequence, cached: int, donor: Sequence | None, whole: int, spare: int, most: int,
        copies: list[tuple[int, int]],
    ) -> tuple[int, int] | None:  # fmt: skip
        """Start the table of a sequence that is being admitted, with what `_reusable` has found and, where a cached
        block begins with the tokens that follow, a copy of it. It needs `whole` blocks in the end; `spare` must stay.

        Returns (tokens that are computed already, tokens of the first step, at most `most`), None when it does not fit.
        """
        kv, table, length = self.kv, sequence.table, len(sequence.token_ids)
        if donor is not None:
            count = min(length - cached, most)
            pairs = None
            if kv.can_attach_fork(cached, whole, spare):
                pairs = kv.attach_fork(table, donor.table, cached, kv.blocks_for(cached + count))
            if pairs is None:
                return None
            copied = {target: source for source, target in copies}  # a donor's block may be a copy of this very plan
            copies += [(copied.get(source, source), target) for source, target in pairs]
            self._counts.num_forks += 1
            self._counts.forked_tokens += cached
            return cached, count
        source, more = -1, 0
        if self.config.copies_blocks and sequence.reads_cache:
            source, more = kv.match_tail(table, sequence.token_ids, cached)
        if more and kv.can_attach(table, cached, whole, spare + kv.pool.is_cached_free(source)):
            kv.pool.share([source])
            self._held.append(source)
        elif kv.can_attach(table, cached, whole, spare):
            more = 0
        else:
            return None
        count = min(length - cached - more, most)
        if not kv.attach(table, cached, kv.blocks_for(cached + more + count)):
            return None
        if more:
            copies.append((source, table.blocks[cached // self.config.block_size]))
            self._counts.copied_tokens += more
        return cached + more, count

    def _let_go(self) -> None:
        """The last plan has run."""
        if self._held:
            self.kv.pool.release(self._held)
            self._held = []

    def _bytes_of(self, slot: int, index: int) -> bytes:
        """The tokens of a running sequence's block, as `kv.note` takes them."""
        size = self.config.block_size
        return token_bytes(self.running.tokens_SL[slot, index * size : (index + 1) * size].tolist())

    def _match_end(self, sequence: Sequence, cached: int, donor: Sequence | None) -> dict[str, Any]:
        """Where the reuse of computed tokens ended, and why."""
        block, inside = divmod(cached, self.config.block_size)
        if donor is not None or cached == len(sequence.token_ids) - 1:
            return {"block": block, "reason": "the last token of the prompt is always computed"}
        if not self.config.prefix_caching:
            return {"block": block, "reason": "prefix caching is off"}
        if not sequence.request.cached_prompt or sequence.request.params.prompt_logprobs is not None:
            return {"block": block, "reason": "the request asked for every prompt token to be computed"}
        if block >= (len(sequence.token_ids) - 1) // self.config.block_size:
            return {"block": block, "reason": "partial tail: the block of the last token is always computed"}
        if inside:
            return {"block": block, "token": cached, "reason": "the tokens are others from here on"}
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
            self._tell_stored(self.running.sequence(slot), table.hashes[first:end], parent, tokens)
            start = i

    def _tell_stored(self, sequence: Sequence, hashes: list[bytes], parent: bytes | None, tokens: list[int]) -> None:
        request = sequence.request
        name, generation = request.adapter or (None, None)
        assert self.events is not None
        self.events.blocks_stored(
            hashes, parent, tokens, adapter=name, adapter_id=generation,
            salted_root=sequence.table.root if request.cache_salt is not None else None,
        )  # fmt: skip
