"""Who is next among texts for pooling: whole texts, as many as a step's tokens and rows allow, in the policy's order.

A text needs every one of its tokens in one step and leaves nothing behind, so there are no slots, no blocks and no
preemption. What comes first never waits for what comes later: admission stops at the first text that does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows
from typing import Literal

from enginecore.request import EngineRequest, EngineStats
from enginecore.scheduler.fairness import FairQueue, FairShare
from enginecore.scheduler.journal import BUDGET, NOTHING_WAITS, SLOTS, Journal
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.sequence import Sequence


class PoolingScheduler:
    """A queue with a budget. `max_tokens` of a step hold at least one text of `max_model_len`."""

    def __init__(
        self, *, max_rows: int, max_tokens: int, max_model_len: int, policy: Literal["fcfs", "priority", "fair"],
        tenant_weights: dict[str, float], journal: Journal | None = None,
    ) -> None:  # fmt: skip
        self._max_rows, self._max_tokens, self._max_model_len = max_rows, max(max_tokens, max_model_len), max_model_len
        self.journal = journal or Journal()
        self.share = FairShare(tenant_weights) if policy == "fair" else None
        self.waiting = FairQueue(self.share) if self.share else WaitingQueue(by_priority=policy == "priority")
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._counts = EngineStats()

    def add(self, request: EngineRequest) -> str | None:
        """Queue a request. Returns None, or why it can never run."""
        length = len(request.prompt_token_ids)
        if request.request_id in self._sequences:
            return f"request id {request.request_id!r} is already in use"
        if request.pooling is None:
            return "the engine has a model for pooling, which generates no text"
        if not length:
            return "the text is empty"
        if length > self._max_model_len:
            return f"{length} tokens exceed max_model_len {self._max_model_len}"
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals, 0)
        self._sequences[request.request_id] = sequence
        if self.share is not None:
            self.share.arrived(sequence.tenant)
        self.journal.arrived(request.request_id, length)
        self.waiting.push(sequence)
        return None

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> list[str]:
        """Drop requests that wait; returns those that did. What is in a step is done when the step is."""
        dropped = []
        for request_id in request_ids:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                self.waiting.remove(sequence)
                self._end(sequence, reason)
                dropped.append(request_id)
        return dropped

    def has_work(self) -> bool:
        return bool(self._sequences)

    def schedule(self) -> list[EngineRequest]:
        """The texts of the next step, in order."""
        batch: list[Sequence] = []
        tokens, why = 0, NOTHING_WAITS
        while (sequence := self.waiting.peek()) is not None:
            if len(batch) == self._max_rows:
                why = SLOTS
                break
            if tokens + sequence.num_prompt > self._max_tokens:
                why = BUDGET
                break
            batch.append(self.waiting.pop())
            tokens += sequence.num_prompt
            if self.share is not None:
                self.share.charge(sequence.tenant, sequence.num_prompt, 0)
        for sequence in batch:
            self.journal.admitted(sequence.request_id, 0, None, {"reason": "pooling keeps no prefixes"})
        if batch:
            self.journal.step(len(batch), tokens, why)
        return [sequence.request for sequence in batch]

    def finish(self, requests: Rows[EngineRequest], reasons: Rows[str]) -> None:
        """A step is over: why each of its texts ended."""
        self._counts.num_steps += 1
        for request, reason in zip(requests, reasons, strict=True):
            sequence = self._sequences[request.request_id]
            if reason != "error":
                self._counts.prompt_tokens += sequence.num_prompt
                self.journal.first_token(request.request_id)
            self._end(sequence, reason)

    def _end(self, sequence: Sequence, reason: str) -> None:
        del self._sequences[sequence.request_id]
        if self.share is not None:
            self.share.left(sequence.tenant)
        self.journal.ended(sequence.request_id, reason, 0)

    def stats(self) -> EngineStats:
        """Gauges now and counters so far; there are no KV blocks."""
        counts = self._counts
        counts.num_waiting = len(self.waiting)
        counts.num_running = len(self._sequences) - counts.num_waiting
        return EngineStats(
            num_running=counts.num_running,
            num_waiting=counts.num_waiting,
            prompt_tokens=counts.prompt_tokens,
            num_steps=counts.num_steps,
        )
