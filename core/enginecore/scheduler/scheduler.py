"""The scheduler: continuous batching with one token budget a step.

There is no prefill phase and no decode phase. Each sequence has tokens it knows (`num_tokens`) and tokens whose keys
and values are computed (`num_computed`); a step hands out a budget of tokens to close the gap, running sequences first,
then waiting ones. A sequence whose gap closes gets a next token sampled. Chunked prefill, prefix hits and preemption
are nothing but different sizes of the gap.

Invariants: the plan never exceeds the budget or the slots; a sequence is admitted only if the pool can hold all its
known tokens beside what running prompts still need; when a running sequence cannot grow, the last in order (lowest
priority, latest arrival) gives its blocks back and waits again, so the first in order always makes progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

import numpy as np

from enginecore.adapters import AdapterKey
from enginecore.kvcache import BlockPool, KVCacheManager
from enginecore.kvcache.events import EventRecorder
from enginecore.kvcache.tiers import Tiers
from enginecore.plan import BeamMove, IntArray, NewRequest, StepPlan
from enginecore.randomness import request_seed
from enginecore.request import EngineRequest, EngineStats
from enginecore.scheduler.adapters import MAX_ASIDE, AdapterPlaces
from enginecore.scheduler.beams import BeamGroup
from enginecore.scheduler.config import SchedulerConfig, evictor_of
from enginecore.scheduler.costs import Costs
from enginecore.scheduler.fairness import FairQueue, FairShare
from enginecore.scheduler.journal import BLOCKS, BUDGET, LIFTING, NOTHING_WAITS, PREEMPTED, SLOTS, Journal
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.results import Results
from enginecore.scheduler.running import RunningTable
from enginecore.scheduler.sequence import Sequence
from enginecore.scheduler.tiering import NOTHING, Lift


class Scheduler(Results):
    """`add`, `abort`, `schedule`, `update` (which is `depart` and `book`, see `lookahead.py`); nothing here blocks,
    allocates device memory or knows a device."""

    def __init__(self, config: SchedulerConfig, journal: Journal | None = None, *, record_events: bool = False) -> None:
        self.config = config
        self.journal = journal or Journal()
        #: Changes of the prefix index, for whoever takes them after each step.
        self.events = EventRecorder(config.block_size, self.journal) if record_events else None
        self.pool = BlockPool(config.num_blocks, self.events or self.journal, evictor_of(config))
        self.kv = KVCacheManager(self.pool, config.block_size, prefix_caching=config.prefix_caching)
        #: What was done for each tenant, under the policy "fair".
        self.share = FairShare(dict(config.tenant_weights)) if config.policy == "fair" else None
        self.waiting = FairQueue(self.share) if self.share else WaitingQueue(by_priority=config.policy == "priority")
        self.running = RunningTable(config.max_num_seqs, config.max_model_len)
        self._sequences: dict[str, Sequence] = {}
        self._groups: dict[str, BeamGroup] = {}
        #: The tiers below the device, for whoever has some to set before the first step.
        self.tiers: Tiers | None = None
        self.adapters = AdapterPlaces(config.max_loras) if config.max_loras else None
        self.costs = Costs(config.block_size)
        self._lifts: list[Lift] = []
        #: When the last plan was made, by the journal's clock.
        self._planned_at = 0.0
        #: When the last step was booked, by the same.
        self._timed_at = 0.0
        self._in_flight = 0
        self._arrivals = 0
        self._num_pending = 0
        self._held: list[int] = []
        self._counts = EngineStats()
        self._watermark = int(config.watermark * config.num_blocks)
        self._chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens

    # ---- requests in and out -------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> str | None:
        """Queue a request. Returns None, or why it can never run (then it is not queued)."""
        if request.request_id in self._sequences:
            return f"request id {request.request_id!r} is already in use"
        total = len(request.prompt_token_ids) + request.max_tokens
        if not request.prompt_token_ids:
            return "the prompt is empty"
        if total > self.config.max_model_len:
            return (
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_tokens} output tokens "
                f"exceed max_model_len {self.config.max_model_len}"
            )
        needed = self._most_blocks(request)
        if needed > self.config.num_blocks:
            return f"the request needs {needed} KV blocks; the cache has {self.config.num_blocks}"
        self._arrivals += 1
        seed = request.seed if request.seed is not None else request_seed(self.config.seed, self._arrivals)
        sequence = Sequence(request, self._arrivals, seed)
        sequence.needs_known_tokens |= self.config.speculates
        problem = self._begin_search(sequence) if request.params.beam is not None else None
        if problem is not None:
            return problem
        self._sequences[request.request_id] = sequence
        self._open_account(sequence)
        self.journal.arrived(request.request_id, sequence.num_prompt)
        if request.fork_of is None or not self._join(sequence):
            self.waiting.push(sequence)
        return None

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        """Drop requests, waiting or running, and free their blocks. Unknown ids are ignored; returns the known ones."""
        dropped = []
        self._let_go()
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is None:
                continue
            self._groups.pop(request_id, None)
            self._settle_account(sequence)
            family = sequence.family
            if sequence.slot >= 0:
                self._leave(sequence)
            elif self._drop_lift(sequence):
                pass
            elif family is None or sequence not in family.pending:
                self.waiting.remove(sequence)
            if family is not None:
                self._part(sequence, family)
            self.journal.ended(request_id, reason, len(sequence.token_ids) - sequence.num_prompt)
            dropped.append(request_id)
        return dropped

    def has_work(self) -> bool:
        return bool(self._sequences)

    def num_with_adapter(self, key: AdapterKey) -> int:
        """Sequences, waiting or running, that have this adapter."""
        return sum(sequence.request.adapter == key for sequence in self._sequences.values())

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, those of running sequences and lower tiers too; returns the number of blocks
        forgotten (the most of any tier)."""
        return max(self.kv.reset(), self.tiers.clear() if self.tiers is not None else 0)

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step: running sequences in order, then as many waiting ones as budget, slots and blocks allow."""
        self._take_in()
        self._let_go()
        self.pool.expire_pins(self.journal.clock())
        if (way := self._to_make_way()) is not None:
            self._preempt(way[0], way[1].request_id)
        updates: list[tuple[int, int, list[int]]] = []
        own: list[tuple[int, int, int]] = []
        slots, give, preempted = self._serve_running(updates, own)
        new: list[NewRequest] = []
        moves: list[BeamMove] = []
        if self._groups:
            alive = set(slots.tolist())
            own = [copy for copy in own if copy[0] in alive]
            updates = [update for update in updates if update[0] in alive]
            moves = self._announce(slots, new, updates)
        copies = [(source, target) for _, source, target in own]
        if not preempted and len(self.waiting) and self.running.has_free_slot:
            budget = self.config.max_num_batched_tokens - int(give.sum())
            admitted = self._admit(budget, new, updates, copies)
            if admitted:
                slots = np.concatenate([slots, np.array([slot for slot, _ in admitted], np.int64)])
                give = np.concatenate([give, np.array([count for _, count in admitted], np.int64)])
        starts = self.running.num_computed_S[slots]
        ends = starts + give
        num_tokens = int(give.sum())
        if num_tokens:
            self.journal.step(len(slots), num_tokens, self._why_no_more(num_tokens, preempted))
        self._planned_at = self.journal.clock() if self.tiers is not None else 0.0
        return StepPlan(
            slots_N=slots,
            starts_N=starts,
            num_new_N=give,
            samples_N=ends >= self.running.num_tokens_S[slots],
            new=new,
            block_updates=updates,
            copies=copies,
            moves=moves,
            adapters=self.adapters.take_placed() if self.adapters is not None else [],
            guesses=self._guessed(slots, ends) if self.running.guesses else {},
        )

    def _why_no_more(self, num_tokens: int, preempted: bool) -> int:
        """Why the step being planned admits nobody else."""
        if not len(self.waiting):
            return LIFTING if self._lifts else NOTHING_WAITS
        if preempted:
            return PREEMPTED
        if not self.running.has_free_slot:
            return SLOTS
        return BUDGET if num_tokens >= self.config.max_num_batched_tokens else BLOCKS

    def _serve_running(
        self, updates: list[tuple[int, int, list[int]]], copies: list[tuple[int, int, int]]
    ) -> tuple[IntArray, IntArray, bool]:
        """(slots, tokens each, whether any was preempted) of the running sequences that get tokens."""
        preempted = False
        while True:
            slots, give, lost = self._serve_who_can(updates, copies)
            preempted |= lost
            # Who was given the whole budget, found no block and comes last has made way for the others: their turn.
            if len(slots):
                return slots, give, preempted
            if not lost:
                return slots, give, False

    def _serve_who_can(
        self, updates: list[tuple[int, int, list[int]]], copies: list[tuple[int, int, int]]
    ) -> tuple[IntArray, IntArray, bool]:
        table, block_size = self.running, self.config.block_size
        slots = table.order
        if not len(slots):
            return slots, np.zeros(0, np.int64), False
        want = np.minimum(table.num_tokens_S[slots] - table.num_computed_S[slots], self._chunk)
        if table.guesses:
            want = self._with_guesses(slots, want, block_size)
        if self._in_flight:
            want[self._ending(slots)] = 0
        slots, give = self._shared_out(slots, want)
        computed = table.num_computed_S[slots]
        if self._groups:
            give = self._in_step(slots, give)
        needed = (computed + give + block_size - 1) // block_size
        alive = len(slots)
        for row in np.flatnonzero(((needed > table.num_blocks_S[slots]) | table.beam_S[slots]) & (give > 0)).tolist():
            if row >= alive:
                break
            alive = self._grow(slots, row, int(needed[row]), alive, updates, copies)
        preempted = alive < len(slots)
        slots, give = slots[:alive], give[:alive]
        served = give > 0
        if not served.all():
            slots, give = slots[served], give[served]
        return slots, give, preempted

    def _grow(
        self, slots: IntArray, row: int, needed: int, alive: int, updates: list[tuple[int, int, list[int]]],
        copies: list[tuple[int, int, int]],
    ) -> int:  # fmt: skip
        """Get `needed` blocks for a row, preempting from the end of the order. Returns how many rows are left."""
        slot = int(slots[row])
        sequence = self.running.sequence(slot)
        first = len(sequence.table.blocks)
        while alive > row:
            writable = sequence.group is None or self._own_tail(sequence, copies, updates)
            fresh = self.kv.grow(sequence.table, needed) if writable else None
            if fresh is not None:
                self.running.num_blocks_S[slot] = needed
                if fresh:
                    updates.append((slot, first, fresh))
                return alive
            if self._hurry():
                continue
            last = self.running.sequence(int(slots[alive - 1]))
            alive -= 1 if last.group is None else len(last.group.members)
            self._preempt(last, sequence.request_id)
        return alive

    def _preempt(self, sequence: Sequence, by: str) -> None:
        """Take a sequence's blocks and let it wait again, with its tokens: it is recomputed, cached parts aside."""
        if sequence.group is not None:
            sequence = sequence.group.root
        assert not self._in_flight, "a sequence with a step in flight is to give its blocks back"
        saved = self._save(sequence)
        self._leave(sequence)
        sequence.lifted = NOTHING
        self.journal.preempted(sequence.request_id, by, len(sequence.token_ids), saved)
        self._counts.num_swaps += saved
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]
        self._counts.num_preemptions += 1
        self.waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.group is not None:
            self._leave_together(sequence.group)
        else:
            self.running.leave(sequence, self.waiting.key(sequence))
            self.kv.free(sequence.table)

    def _admit(
        self,
        budget: int,
        new: list[NewRequest],
        updates: list[tuple[int, int, list[int]]],
        copies: list[tuple[int, int]],
    ) -> list[tuple[int, int]]:
        """Move waiting sequences into slots, in order, until one does not fit. Returns (slot, tokens) of each."""
        table, kv = self.running, self.kv
        slots = table.order
        whole_S = (table.num_tokens_S[slots] + kv.block_size - 1) // kv.block_size
        owed = int(np.maximum(whole_S - table.num_blocks_S[slots], 0).sum()) + self._owed_to_searches()
        admitted: list[tuple[int, int]] = []
        aside: list[Sequence] = []
        while budget > 0 and table.has_free_slot and len(aside) < MAX_ASIDE:
            sequence = self.waiting.peek()
            if sequence is None:
                break
            if self.adapters is not None and not self.adapters.admits(sequence, table, aside):
                aside.append(self.waiting.pop())
                continue
            tokens = sequence.token_ids
            cached, donor = self._reusable(sequence)
            whole = kv.blocks_for(len(tokens))
            if sequence.group is not None:
                if table.num_free_slots < sequence.group.width:
                    break
                whole += self._blocks_beside_root(sequence.group)
            spare = owed + (self._watermark if len(table) else 0)
            if donor is None and self._lift(sequence, cached, whole, spare):
                continue
            taken = self._attach(sequence, cached, donor, whole, spare, min(self._chunk, budget), copies)
            if taken is None:
                break
            shared = kv.num_shared(cached) * kv.block_size
            cached, count = taken
            owed += whole - len(sequence.table.blocks)
            self.waiting.pop()
            if not sequence.admitted:
                sequence.admitted = True
                self._pin_prefix(sequence)
                match_end = self._match_end(sequence, cached, donor)
                forked_from = None if donor is None else donor.request_id
                self.journal.admitted(sequence.request_id, cached, forked_from, match_end)
                if donor is None:
                    sequence.num_cached = cached
                    kv.count_query(len(tokens), cached)
                self._counts.prompt_tokens += sequence.num_prompt
            elif sequence.num_preemptions:
                self.journal.resumed(sequence.request_id, cached)
            slot = table.enter(sequence, self.waiting.key(sequence), cached)
            if sequence.group is not None:
                sequence.group.reserved = table.reserve(sequence.group.width - 1)
            new.append(
                NewRequest(
                    slot=slot,
                    request=sequence.request,
                    token_ids=tokens,
                    num_prompt=sequence.num_prompt,
                    seed=sequence.seed,
                    prompt_logprobs_from=None if sequence.prompt_logprobs is None else 0,
                    write_from=len(tokens) if shared > cached else 0,
                )
            )
            updates.append((slot, 0, list(sequence.table.blocks)))
            admitted.append((slot, count))
            budget -= count
        for sequence in aside:
            self.waiting.push(sequence)
        return admitted

    # ---- figures -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges now and counters so far. `kv_slots_held` are token slots of blocks that running sequences hold,
        `kv_tokens_held` those of them that hold a computed token (a shared block counts for each holder)."""
        self._take_in()
        counts, slots = self._counts, self.running.order
        counts.num_running = len(self.running)
        counts.num_waiting = len(self.waiting) + self._num_pending + self._num_lifting
        counts.num_blocks = self.pool.num_blocks
        counts.num_free_blocks = self.pool.num_free
        counts.num_used_blocks = self.pool.num_blocks - self.pool.num_free
        counts.prefix_cache_queries = self.kv.queries
        counts.prefix_cache_hits = self.kv.hits
        counts.kv_slots_held = int(self.running.num_blocks_S[slots].sum()) * self.config.block_size
        counts.kv_tokens_held = int(self.running.num_computed_S[slots].sum())
        if self.tiers is not None:
            counts.host_blocks = self.tiers.host.num_ready
            counts.disk_blocks = self.tiers.disk.num_blocks if self.tiers.disk is not None else 0
        return copy(counts)
