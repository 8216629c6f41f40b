"""What happened to requests: kept for the last ones, read by nobody in a step.

A step costs one line in a ring, whatever its batch; a request costs an entry when it arrives, is admitted, is preempted
and ends. Everything else (why it waited, how large its batches were) is worked out from the ring when somebody asks.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

#: Why admission stopped in a step: the index is what the ring holds.
REASONS = (
    "nothing waits", "token budget", "no free slot", "KV blocks", "a preemption in the same step",
    "blocks on their way from a lower tier",
)  # fmt: skip
NOTHING_WAITS, BUDGET, SLOTS, BLOCKS, PREEMPTED, LIFTING = range(len(REASONS))
#: Steps of a request that are told one by one.
MAX_TOLD_STEPS = 1024

#: A request is not on its way to the engine for longer.
MAX_HANDOVER_S = 600.0
#: Evicted blocks that are remembered, for the reason why a prefix was not found.
MAX_EVICTED = 65_536


@dataclass(slots=True)
class Entry:
    """One request. Steps are numbers of the journal's steps, times the clock's seconds; -1 and None: not yet."""

    request_id: str
    num_prompt: int
    arrived: float
    arrived_step: int
    admitted: float | None = None
    admitted_step: int = -1
    first_token: float | None = None
    first_token_step: int = -1
    ended: float | None = None
    ended_step: int = -1
    finish_reason: str | None = None
    num_tokens: int = 0
    num_reused: int = 0
    forked_from: str | None = None
    match_end: dict[str, Any] | None = None
    waits_again: bool = False
    grammar_seconds: float | None = None
    preemptions: list[dict[str, Any]] = field(default_factory=list)
    transfers: list[dict[str, Any]] = field(default_factory=list)


class Journal:
    """Entries of the last `keep` requests and lines of the last `steps` steps. Also watches the prefix index."""

    def __init__(self, keep: int = 1024, steps: int = 65_536, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep = keep
        self._entries: dict[str, Entry] = {}
        # Ordered, because the first of a plain dict takes ever longer to find behind those that have left it.
        self._evicted: OrderedDict[bytes, float] = OrderedDict()
        self._cleared: float | None = None
        self._step_no = 0
        self._reasons = np.zeros(steps, np.int8)
        self._rows = np.zeros(steps, np.int32)
        self._tokens = np.zeros(steps, np.int32)
        self.clock = clock

    # ---- written by the scheduler --------------------------------------------------------------------------------

    def arrived(self, request_id: str, num_prompt: int) -> None:
        self._entries.pop(request_id, None)
        self._entries[request_id] = Entry(request_id, num_prompt, self.clock(), self._step_no)
        if len(self._entries) > self._keep:
            del self._entries[next(iter(self._entries))]

    def sent(self, request_id: str, at: float) -> None:
        """The frontend handed the request over at that time, and it has waited for the step that was underway. A time
        that cannot be is none of this clock's."""
        entry = self._entries.get(request_id)
        if entry is not None and 0 < entry.arrived - at < MAX_HANDOVER_S:
            entry.arrived = at

    def held(self, request_id: str, since: float) -> None:
        """Before it arrived here the request has waited for its grammar, since that time."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.arrived, entry.grammar_seconds = since, entry.arrived - since

    def step(self, rows: int, tokens: int, reason: int) -> None:
        """A step was planned: its batch and why nobody else was admitted."""
        at = self._step_no % len(self._rows)
        self._rows[at], self._tokens[at], self._reasons[at] = rows, tokens, reason
        self._step_no += 1

    def admitted(self, request_id: str, num_reused: int, forked_from: str | None, match_end: dict[str, Any]) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.admitted is None:
            entry.admitted, entry.admitted_step = self.clock(), self._step_no
            entry.num_reused, entry.forked_from, entry.match_end = num_reused, forked_from, match_end

    def resumed(self, request_id: str, num_reused: int) -> None:
        """A preempted request runs again, with so many of its tokens still computed."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.preemptions:
            entry.waits_again = False
            event = entry.preemptions[-1]
            event["waited_s"] = self.clock() - entry.arrived - event["at_s"]
            event["reused_tokens"] = num_reused

    def first_token(self, request_id: str) -> None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.first_token is None:
            entry.first_token, entry.first_token_step = self.clock(), self._step_no

    def preempted(self, request_id: str, by: str, num_tokens: int, saved: bool = False) -> None:
        """`saved`: its blocks are in a lower tier, from where they can come back."""
        entry = self._entries.get(request_id)
        if entry is not None:
            event = {"at_s": self.clock() - entry.arrived, "step": self._step_no, "by": by, "tokens": num_tokens}
            entry.preemptions.append({**event, "then": "bring back" if saved else "compute again"})
            entry.waits_again = True

    def moved(self, request_id: str, tier: str, num_blocks: int, num_arrived: int, seconds: float) -> None:
        """Blocks were to come up from a tier while the request waited."""
        entry = self._entries.get(request_id)
        if entry is not None:
            at = self.clock() - entry.arrived
            told = {"from": tier, "blocks": num_blocks, "arrived": num_arrived, "seconds": seconds, "at_s": at}
            entry.transfers.append(told)

    def ended(self, request_id: str, reason: str, num_tokens: int) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.ended, entry.ended_step = self.clock(), self._step_no
            entry.finish_reason, entry.num_tokens = reason, num_tokens

    # ---- the prefix index, as its observer -----------------------------------------------------------------------

    def stored(self, block: int, block_hash: bytes) -> None:
        self._evicted.pop(block_hash, None)

    def removed(self, block: int, block_hash: bytes) -> None:
        self._evicted[block_hash] = self.clock()
        if len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)

    def cleared(self) -> None:
        self._evicted.clear()
        self._cleared = self.clock()

    def why_missing(self, block_hash: bytes) -> dict[str, Any]:
        """Why the index has no such block. Never tells whether another salt has the same tokens."""
        evicted = self._evicted.get(block_hash)
        if evicted is not None:
            return {"reason": "evicted", "seconds_ago": self.clock() - evicted}
        if self._cleared is not None:
            return {"reason": "never seen since the cache was reset", "seconds_ago": self.clock() - self._cleared}
        return {"reason": "never seen under this salt and adapter"}

    # ---- read when asked -----------------------------------------------------------------------------------------

    def explain(self, request_id: str) -> dict[str, Any] | None:
        """How a request's time was spent, as plain data; None when it is not known (any more)."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        now = self.clock()
        state = "preempted" if entry.waits_again else "waiting" if entry.admitted is None else "running"
        state = "ended" if entry.ended is not None else state
        end = entry.ended if entry.ended is not None else now
        admitted = entry.admitted if entry.admitted is not None else end
        first = entry.first_token
        answer: dict[str, Any] = {
            "id": entry.request_id,
            "state": state,
            "finish_reason": entry.finish_reason,
            "queued": {
                "seconds": admitted - entry.arrived,
                "grammar_seconds": entry.grammar_seconds,
                "steps_by_reason": self._waits(entry.arrived_step, entry.admitted_step),
            },
            "prefill": None,
            "decode": None,
            "preemptions": entry.preemptions,
            "transfers": entry.transfers,
            "batch": self._batches(entry),
        }
        if entry.admitted is not None:
            answer["prefill"] = {
                "seconds": (first if first is not None else end) - admitted,
                "prompt_tokens": entry.num_prompt,
                "reused_tokens": entry.num_reused,
                "computed_tokens": entry.num_prompt - entry.num_reused,
                "forked_from": entry.forked_from,
                "prefix_match_ended": entry.match_end,
            }
        if first is not None:
            answer["decode"] = {"seconds": end - first, "output_tokens": entry.num_tokens or None}
        return answer

    def _window(self, start: int, end: int) -> tuple[np.ndarray, bool]:
        """(places in the ring of the steps from `start` up to `end`, whether some are not there any more)."""
        oldest = max(0, self._step_no - len(self._rows))
        steps = np.arange(max(start, oldest), end)
        return steps % len(self._rows), start < oldest

    def _waits(self, start: int, admitted_step: int) -> dict[str, int]:
        places, lost = self._window(start, admitted_step if admitted_step >= 0 else self._step_no)
        counts = np.bincount(self._reasons[places], minlength=len(REASONS))
        found = {REASONS[i]: int(count) for i, count in enumerate(counts) if count and i != NOTHING_WAITS}
        if counts[NOTHING_WAITS]:
            found["a sibling computes the same prompt"] = int(counts[NOTHING_WAITS])
        return {**found, "steps that are not kept any more": -1} if lost else found

    def _batches(self, entry: Entry) -> dict[str, Any] | None:
        """Of the steps between admission and the end."""
        if entry.admitted_step < 0:
            return None
        places, lost = self._window(entry.admitted_step, entry.ended_step if entry.ended_step >= 0 else self._step_no)
        if not len(places):
            return {"steps": 0, "complete": not lost}
        rows, tokens = self._rows[places], self._tokens[places]
        return {
            "steps": len(places),
            "complete": not lost,
            "sequences": {"min": int(rows.min()), "mean": float(rows.mean()), "max": int(rows.max())},
            "tokens": {"min": int(tokens.min()), "mean": float(tokens.mean()), "max": int(tokens.max())},
            "last_steps": {
                "sequences": rows[-MAX_TOLD_STEPS:].tolist(), "tokens": tokens[-MAX_TOLD_STEPS:].tolist(),
            },
        }  # fmt: skip
