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
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginecore.kvcache import BlockPool, KVCacheManager
from enginecore.kvcache.events import EventRecorder
from enginecore.plan import IntArray, NewRequest, StepPlan, StepResult
from enginecore.randomness import request_seed
from enginecore.request import EngineOutput, EngineRequest, EngineStats
from enginecore.scheduler.journal import BLOCKS, BUDGET, NOTHING_WAITS, PREEMPTED, SLOTS, Journal
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.running import RunningTable
from enginecore.scheduler.sequence import Sequence
from enginecore.scheduler.sharing import Sharing


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """`long_prefill_token_threshold` 0 means no cap a sequence; `watermark` is the share of blocks that admission
    leaves free for running sequences to grow into. `copies_blocks` says whether plans may ask for copies of blocks."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    seed: int = 0
    copies_blocks: bool = True


class Scheduler(Sharing):
    """`add`, `abort`, `schedule`, `update`; nothing here blocks, allocates device memory or knows a device."""

    def __init__(
        self, config: SchedulerConfig, journal: Journal | None = None, *, record_events: bool = False
    ) -> None:
        self.config = config
        self.journal = journal or Journal()
        #: Changes of the prefix index, for whoever takes them after each step.
        self.events = EventRecorder(config.block_size, self.journal) if record_events else None
        self.pool = BlockPool(config.num_blocks, self.events or self.journal)
        self.kv = KVCacheManager(self.pool, config.block_size, prefix_caching=config.prefix_caching)
        self.waiting = WaitingQueue(by_priority=config.policy == "priority")
        self.running = RunningTable(config.max_num_seqs, config.max_model_len)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._num_pending = 0
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
        needed = self.kv.blocks_for(max(total - 1, len(request.prompt_token_ids)))
        if needed > self.config.num_blocks:
            return f"the request needs {needed} KV blocks; the cache has {self.config.num_blocks}"
        self._arrivals += 1
        seed = request.seed if request.seed is not None else request_seed(self.config.seed, self._arrivals)
        sequence = Sequence(request, self._arrivals, seed)
        self._sequences[request.request_id] = sequence
        self.journal.arrived(request.request_id, sequence.num_prompt)
        if request.fork_of is None or not self._join(sequence):
            self.waiting.push(sequence)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Drop requests, waiting or running, and free their blocks. Unknown ids are ignored; returns the known ones."""
        dropped = []
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is None:
                continue
            family = sequence.family
            if sequence.slot >= 0:
                self._leave(sequence)
            elif family is None or sequence not in family.pending:
                self.waiting.remove(sequence)
            if family is not None:
                self._part(sequence, family)
            self.journal.ended(request_id, "abort", len(sequence.token_ids) - sequence.num_prompt)
            dropped.append(request_id)
        return dropped

    def has_work(self) -> bool:
        return bool(self._sequences)

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, those of running sequences too; returns the number of blocks forgotten."""
        return self.kv.reset()

    # ---- one step ------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan a step: running sequences in order, then as many waiting ones as budget, slots and blocks allow."""
        updates: list[tuple[int, int, list[int]]] = []
        slots, give, preempted = self._serve_running(updates)
        new: list[NewRequest] = []
        copies: list[tuple[int, int]] = []
        if not preempted and len(self.waiting) and self.running.has_free_slot:
            budget = self.config.max_num_batched_tokens - int(give.sum())
            admitted = self._admit(budget, new, updates, copies)
            if admitted:
                slots = np.concatenate([slots, np.array([slot for slot, _ in admitted], np.int64)])
                give = np.concatenate([give, np.array([count for _, count in admitted], np.int64)])
        starts = self.running.num_computed_S[slots]
        num_tokens = int(give.sum())
        self.journal.step(len(slots), num_tokens, self._why_no_more(num_tokens, preempted))
        return StepPlan(
            slots_N=slots,
            starts_N=starts,
            num_new_N=give,
            samples_N=starts + give == self.running.num_tokens_S[slots],
            new=new,
            block_updates=updates,
            copies=copies,
        )

    def _why_no_more(self, num_tokens: int, preempted: bool) -> int:
        """Why the step being planned admits nobody else."""
        if not len(self.waiting):
            return NOTHING_WAITS
        if preempted:
            return PREEMPTED
        if not self.running.has_free_slot:
            return SLOTS
        return BUDGET if num_tokens >= self.config.max_num_batched_tokens else BLOCKS

    def _serve_running(self, updates: list[tuple[int, int, list[int]]]) -> tuple[IntArray, IntArray, bool]:
        """(slots, tokens each, whether any was preempted) of the running sequences that get tokens."""
        table, block_size = self.running, self.config.block_size
        slots = table.order
        if not len(slots):
            return slots, np.zeros(0, np.int64), False
        computed = table.num_computed_S[slots]
        want = np.minimum(table.num_tokens_S[slots] - computed, self._chunk)
        before = np.cumsum(want) - want
        give = np.clip(self.config.max_num_batched_tokens - before, 0, want)
        needed = (computed + give + block_size - 1) // block_size
        alive = len(slots)
        for row in np.flatnonzero((needed > table.num_blocks_S[slots]) & (give > 0)).tolist():
            if row >= alive:
                break
            alive = self._grow(slots, row, int(needed[row]), alive, updates)
        preempted = alive < len(slots)
        slots, give = slots[:alive], give[:alive]
        served = give > 0
        if not served.all():
            slots, give = slots[served], give[served]
        return slots, give, preempted

    def _grow(
        self, slots: IntArray, row: int, needed: int, alive: int, updates: list[tuple[int, int, list[int]]]
    ) -> int:
        """Get `needed` blocks for a row, preempting from the end of the order. Returns how many rows are left."""
        slot = int(slots[row])
        sequence = self.running.sequence(slot)
        first = len(sequence.table.blocks)
        while alive > row:
            fresh = self.kv.grow(sequence.table, needed)
            if fresh is not None:
                self.running.num_blocks_S[slot] = needed
                updates.append((slot, first, fresh))
                return alive
            alive -= 1
            self._preempt(self.running.sequence(int(slots[alive])), sequence.request_id)
        return alive

    def _preempt(self, sequence: Sequence, by: str) -> None:
        """Take a sequence's blocks and let it wait again, with its tokens: it is recomputed, cached parts aside."""
        self._leave(sequence)
        self.journal.preempted(sequence.request_id, by, len(sequence.token_ids))
        sequence.num_preemptions += 1
        if sequence.prompt_logprobs is not None:
            sequence.prompt_logprobs = [None]
        self._counts.num_preemptions += 1
        self.waiting.push(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.running.leave(sequence, self.waiting.key(sequence))
        self.kv.free(sequence.table)

    def _take_blocks(
        self, sequence: Sequence, donor: Sequence | None, cached: int, needed: int, copies: list[tuple[int, int]]
    ) -> bool:
        """Start the table of a sequence that is being admitted; False when the pool has too few blocks."""
        if donor is None:
            return self.kv.attach(sequence.table, cached, needed)
        pairs = self.kv.attach_fork(sequence.table, donor.table, cached, needed)
        if pairs is None:
            return False
        copies += pairs
        self._counts.num_forks += 1
        self._counts.forked_tokens += cached
        return True

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
        owed = int(np.maximum(whole_S - table.num_blocks_S[slots], 0).sum())
        admitted: list[tuple[int, int]] = []
        while budget > 0 and table.has_free_slot:
            sequence = self.waiting.peek()
            if sequence is None:
                break
            tokens = sequence.token_ids
            cached, donor = self._reusable(sequence)
            count = min(len(tokens) - cached, self._chunk, budget)
            whole = kv.blocks_for(len(tokens))
            spare = owed + (self._watermark if len(table) else 0)
            fits = (
                kv.can_attach(sequence.table, cached, whole, spare)
                if donor is None
                else kv.can_attach_fork(cached, whole, spare)
            )
            now = kv.blocks_for(cached + count)
            if not fits or not self._take_blocks(sequence, donor, cached, now, copies):
                break
            owed += whole - now
            self.waiting.pop()
            if not sequence.admitted:
                sequence.admitted = True
                match_end = self._match_end(sequence, cached, donor)
                forked_from = None if donor is None else donor.request_id
                self.journal.admitted(sequence.request_id, cached, forked_from, match_end)
                if donor is None:
                    sequence.num_cached = cached
                    kv.count_query(len(tokens), cached)
                self._counts.prompt_tokens += sequence.num_prompt
            slot = table.enter(sequence, self.waiting.key(sequence), cached)
            new.append(
                NewRequest(
                    slot=slot,
                    request=sequence.request,
                    token_ids=tokens,
                    num_prompt=sequence.num_prompt,
                    seed=sequence.seed,
                    prompt_logprobs_from=None if sequence.prompt_logprobs is None else 0,
                )
            )
            updates.append((slot, 0, list(sequence.table.blocks)))
            admitted.append((slot, count))
            budget -= count
        return admitted

    def update(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        """Book a step's results: advance, append tokens, publish full blocks, finish what is finished."""
        table, block_size = self.running, self.config.block_size
        self._counts.num_steps += 1
        slots = plan.slots_N
        ends = plan.starts_N + plan.num_new_N
        table.num_computed_S[slots] = ends
        for row, entries in result.prompt_logprobs.items():
            collected = table.sequence(int(slots[row])).prompt_logprobs
            if collected is not None:
                collected += entries
        for row in np.flatnonzero(ends // block_size > plan.starts_N // block_size).tolist():
            self._publish(int(slots[row]), int(ends[row]))

        rows = np.flatnonzero(plan.samples_N)
        tokens = np.array(result.token_ids, np.int64)
        sampled = slots[rows]
        lengths = table.num_tokens_S[sampled]
        for slot in sampled[lengths == table.num_prompt_S[sampled]].tolist():
            self.journal.first_token(table.sequence(slot).request_id)
        table.tokens_SL[sampled, lengths] = tokens
        lengths = lengths + 1
        table.num_tokens_S[sampled] = lengths
        self._counts.generation_tokens += len(rows)
        stopped = (table.stop_SX[sampled] == tokens[:, None]).any(axis=1)
        at_limit = lengths >= table.max_total_S[sampled]
        ended = stopped | at_limit

        if self._num_pending:
            self._release_pending(sampled.tolist())

        # This loop is what a step costs: keep calls out of it.
        sequences, logprobs, errors, many_stops = table.sequences, result.logprobs, result.errors, table.many_stops
        outputs = []
        columns = (rows.tolist(), sampled.tolist(), result.token_ids, ended.tolist())
        for row, slot, token, done in zip(*columns, strict=True):
            sequence = sequences[slot]
            assert sequence is not None
            output = EngineOutput(sequence.request_id, [token], num_cached_tokens=sequence.num_cached)
            if row in logprobs:
                output.logprobs = [logprobs[row]]
            if sequence.prompt_logprobs is not None:
                output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
            if done or slot in many_stops or row in errors:
                self._finish(sequence, token, row, result, output)
            outputs.append(output)
        return outputs

    def _publish(self, slot: int, num_computed: int) -> None:
        block_table = self.running.sequence(slot).table
        if not self.kv.publishes(block_table):
            return
        block_size = self.config.block_size
        start, full = len(block_table.hashes) * block_size, num_computed // block_size * block_size
        fresh: list[int] = self.running.tokens_SL[slot, start:full].tolist() if full > start else []
        stored = self.kv.publish(block_table, fresh, num_computed)
        if self.events is not None and stored:
            self._record_stored(slot, block_table, stored)

    def _finish(self, sequence: Sequence, token: int, row: int, result: StepResult, output: EngineOutput) -> None:
        """Decide whether and why the sequence ends here, and if it does, let it go."""
        request, slot = sequence.request, sequence.slot
        if row in result.errors:
            output.finish_reason, output.error = "error", result.errors[row]
            self._take_back_token(output)
        elif request.max_tokens == 0:
            output.finish_reason = "length"
            self._take_back_token(output)
        elif token in self.running.stop_SX[slot] or token in self.running.many_stops.get(slot, ()):
            output.finish_reason = "stop"
            is_eos = token in request.eos_token_ids and not request.params.ignore_eos
            output.stop_reason = None if is_eos else token
        elif self.running.num_tokens_S[slot] >= self.running.max_total_S[slot]:
            output.finish_reason = "length"
        else:
            return
        del self._sequences[request.request_id]
        self._leave(sequence)
        num_generated = len(sequence.token_ids) - sequence.num_prompt - (not output.token_ids)
        self.journal.ended(request.request_id, str(output.finish_reason), num_generated)
        if sequence.family is not None:
            self._part(sequence, sequence.family)

    def _take_back_token(self, output: EngineOutput) -> None:
        output.token_ids, output.logprobs = [], None
        self._counts.generation_tokens -= 1

    # ---- figures -------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges now and counters so far. `kv_slots_held` are token slots of blocks that running sequences hold,
        `kv_tokens_held` those of them that hold a computed token (a shared block counts for each holder)."""
        counts, slots = self._counts, self.running.order
        counts.num_running = len(self.running)
        counts.num_waiting = len(self.waiting) + self._num_pending
        counts.num_blocks = self.pool.num_blocks
        counts.num_free_blocks = self.pool.num_free
        counts.num_used_blocks = self.pool.num_blocks - self.pool.num_free
        counts.prefix_cache_queries = self.kv.queries
        counts.prefix_cache_hits = self.kv.hits
        counts.kv_slots_held = int(self.running.num_blocks_S[slots].sum()) * self.config.block_size
        counts.kv_tokens_held = int(self.running.num_computed_S[slots].sum())
        return copy(counts)
