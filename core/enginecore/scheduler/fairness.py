"""Fair sharing of the token budget among tenants, by virtual token counters.

Each tenant has a counter of the work that was done for it, weighted: `PROMPT_WEIGHT` for a computed prompt token,
`OUTPUT_WEIGHT` for a generated one, divided by the tenant's own weight. Whoever has the smallest goes first. A tenant
that had nothing to do and comes back is lifted to the smallest counter of those that have: nobody saves up a claim.
After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), whose bound on the difference between two
tenants that always have work rests on these two rules.

Three things are different here. Work is counted when it is done and not when a request is admitted, since prompts are
computed in pieces; what came out of a cache costs nothing. The order counts for running prompts too, and the first
request of a waiting tenant that was served less has its share of a step's budget kept free. And a tenant of which
nothing runs need not wait until another's answers end: one with several running sequences gives one of them back.

A tenant is a name; its requests keep the order of their arrival.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict

import numpy as np

from enginecore.kvcache import BlockPool
from enginecore.plan import BoolArray, IntArray, StepPlan
from enginecore.scheduler.sequence import Sequence
from enginecore.scheduler.sharing import Sharing

#: As in the paper's experiments, after what hosted models charge.
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
#: Tenants without requests whose counters are remembered.
MAX_IDLE = 4096


class FairShare:
    """The counters. `weights` are tenants' shares relative to others; 1 for those not named."""

    def __init__(self, weights: dict[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._counters: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._idle: OrderedDict[str, float] = OrderedDict()
        self._last = 0.0

    @property
    def active(self) -> list[str]:
        """Tenants with requests, waiting or running."""
        return list(self._active)

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, self._idle.get(tenant, 0.0))

    def arrived(self, tenant: str) -> None:
        """A request of the tenant has come in."""
        if tenant not in self._active:
            least = min(self._counters.values(), default=self._last)
            self._counters[tenant] = max(self._idle.pop(tenant, 0.0), least)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def left(self, tenant: str) -> None:
        """A request of the tenant has ended."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            self._last = self._idle[tenant] = self._counters.pop(tenant)
            if len(self._idle) > MAX_IDLE:
                self._idle.popitem(last=False)

    def charge(self, tenant: str, prompt_tokens: int, output_tokens: int) -> None:
        work = PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens
        if tenant in self._counters:
            self._counters[tenant] += work / self._weights.get(tenant, 1.0)


class FairQueue:
    """A waiting queue as `WaitingQueue` is, one for each tenant."""

    def __init__(self, share: FairShare) -> None:
        self._share = share
        self._heaps: dict[str, list[tuple[int, Sequence]]] = {}
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def key(self, sequence: Sequence) -> tuple[int, int]:
        return (0, sequence.arrival)

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heaps.setdefault(sequence.tenant, []), (sequence.arrival, sequence))
        self._live += 1

    def peek(self) -> Sequence | None:
        """The first of the tenant that was served least."""
        best: Sequence | None = None
        for tenant in list(self._heaps):
            heap = self._heaps[tenant]
            while heap and heap[0][1].cancelled:
                heapq.heappop(heap)
            if not heap:
                del self._heaps[tenant]
            elif best is None or self._rank(heap[0][1]) < self._rank(best):
                best = heap[0][1]
        return best

    def _rank(self, sequence: Sequence) -> tuple[float, int]:
        return (self._share.counter(sequence.tenant), sequence.arrival)

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty waiting queue")
        heapq.heappop(self._heaps[sequence.tenant])
        self._live -= 1
        return sequence

    def remove(self, sequence: Sequence) -> None:
        sequence.cancelled = True
        self._live -= 1
        heap = self._heaps[sequence.tenant]
        if len(heap) > 2 * self._live + 64:
            heap[:] = [entry for entry in heap if not entry[1].cancelled]
            heapq.heapify(heap)


def fair_budget(want: IntArray, yields: BoolArray, budget: int, reserve: int) -> IntArray:
    """Tokens for each row, in the rows' order: those that want one token (the next of an answer) come first, then the
    rest; of rows that `yields` marks, only so many that `reserve` tokens are left."""
    single = want == 1
    give = np.zeros_like(want)
    give[single] = np.clip(budget - np.arange(int(single.sum())), 0, 1)
    left = budget - int(give.sum())
    for rows, most in ((~single & ~yields, left), (~single & yields, left - reserve)):
        most = min(most, budget - int(give.sum()))
        before = np.cumsum(want[rows]) - want[rows]
        give[rows] = np.clip(max(0, most) - before, 0, want[rows])
    return give


class Fairness(Sharing):
    """A base of `Scheduler`; does nothing unless its policy is "fair"."""

    pool: BlockPool
    share: FairShare | None
    _watermark: int

    def _open_account(self, sequence: Sequence) -> None:
        if self.share is not None:
            self.share.arrived(sequence.tenant)

    def _settle_account(self, sequence: Sequence) -> None:
        if self.share is not None:
            self.share.left(sequence.tenant)

    def _charge(self, plan: StepPlan) -> None:
        """Book a step's work on its tenants: the next token of an answer as a generated one, of a prompt what is
        computed."""
        if self.share is None:
            return
        rows = zip(plan.slots_N.tolist(), plan.num_new_N.tolist(), plan.samples_N.tolist(), strict=True)
        for slot, count, samples in rows:
            self.share.charge(self.running.sequence(slot).tenant, count if count > 1 or not samples else 0, samples)

    def _shared_out(self, slots: IntArray, want: IntArray) -> tuple[IntArray, IntArray]:
        """(slots in order of service, tokens that each gets), for rows that want so many."""
        budget = self.config.max_num_batched_tokens
        share = self.share
        if share is None:
            before = np.cumsum(want) - want
            return slots, np.clip(budget - before, 0, want)
        counters = np.array([share.counter(self.running.sequence(slot).tenant) for slot in slots.tolist()])
        order = np.argsort(counters, kind="stable")
        slots, want, counters = slots[order], want[order], counters[order]
        reserve, yields = 0, np.zeros(len(slots), np.bool_)
        head = self.waiting.peek()
        if head is not None and self._fits_now(head):
            yields = counters >= share.counter(head.tenant)
            reserve = min(len(head.token_ids), self.config.long_prefill_token_threshold or budget)
        return slots, fair_budget(want, yields, budget, reserve)

    def _fits_now(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence would be admitted even if nothing of it were cached."""
        table = self.running
        if sequence.group is not None:
            return table.num_free_slots >= sequence.group.width  # what its beams need is seen when it is admitted
        if not table.has_free_slot:
            return False
        slots = table.order
        whole_S = (table.num_tokens_S[slots] + self.kv.block_size - 1) // self.kv.block_size
        owed = int(np.maximum(whole_S - table.num_blocks_S[slots], 0).sum())
        spare = owed + (self._watermark if len(table) else 0)
        return self.kv.blocks_for(len(sequence.token_ids)) + spare <= self.pool.num_free

    def _to_make_way(self) -> tuple[Sequence, Sequence] | None:
        """(the sequence that is to give its place back, the one that it is for): when the tenant whose turn it is has
        nothing running and no place, the latest of the tenant that was served most and has several running."""
        head = self.waiting.peek() if self.share is not None else None
        if self.share is None or head is None or self._fits_now(head):
            return None
        running = [self.running.sequence(slot) for slot in self.running.order.tolist()]
        roots = [each for each in running if each.group is None or each.group.root is each]
        counts = Counter(sequence.tenant for sequence in roots)
        if counts[head.tenant]:
            return None
        rich = [tenant for tenant, count in counts.items() if count > 1]
        most = max(rich, key=self.share.counter, default=None)
        if most is None or self.share.counter(most) < self.share.counter(head.tenant):
            return None
        return [each for each in roots if each.tenant == most][-1], head
