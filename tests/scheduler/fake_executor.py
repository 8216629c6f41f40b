"""An executor that knows only what plans tell it, and checks them against a cache it really writes and reads.

Each KV slot (block * block size + offset) holds (position, digest of the whole prefix, cache salt and adapter too).
Before a token is sampled, every position of its sequence is read back through the block table: an aliased block, a
stale table, a foreign prefix or a slot that was never written is an AssertionError. The next token is a function of the
sequence's tokens alone, so `expected` can say beforehand what every request must answer.
"""

from __future__ import annotations

import zlib
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from enginecore.plan import BeamMove
from enginecore.request import EngineOutput, EngineRequest, SamplingParams, TokenLogprobs
from enginecore.scheduler import NewRequest, Scheduler, SchedulerConfig, StepPlan, StepResult
from enginecore.scheduler.lookahead import Flight

VOCAB = 40
#: A sequence that holds this token gets an error instead of a next one.
BAD_TOKEN = VOCAB


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(np.array(token_ids, "<i4").tobytes()) % VOCAB


def continuations(token_ids: list[int]) -> list[float]:
    """A beam's log-probability of each token of the vocabulary, as float32."""
    seed = zlib.crc32(np.array(token_ids, "<i4").tobytes())
    logits = np.random.default_rng(seed).normal(size=VOCAB)
    values: list[float] = (logits - np.log(np.exp(logits).sum())).astype(np.float32).tolist()
    return values


def request(request_id: str, prompt: list[int], max_tokens: int = 4, **fields: Any) -> EngineRequest:
    """`fields` are EngineRequest's, and under `params` SamplingParams'."""
    params = SamplingParams(max_tokens=max_tokens, **fields.pop("params", {}))
    return EngineRequest(request_id, prompt, params, max_tokens, **fields)


def expected(req: EngineRequest) -> tuple[list[int], str, int | None]:
    """(tokens, finish reason, stop reason) that the request must end with."""
    tokens = list(req.prompt_token_ids)
    if BAD_TOKEN in tokens:
        return [], "error", None
    stops = set(req.params.stop_token_ids or ())
    eos = () if req.params.ignore_eos else req.eos_token_ids
    for _ in range(req.max_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            return tokens[len(req.prompt_token_ids) :], "stop", None
        if tokens[-1] in stops:
            return tokens[len(req.prompt_token_ids) :], "stop", tokens[-1]
    return tokens[len(req.prompt_token_ids) :], "length", None


@dataclass
class _Row:
    request: EngineRequest
    num_prompt: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    prompt_logprobs_at: int | None = None
    write_from: int = 0


class FakeExecutor:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.rows: dict[int, _Row] = {}
        self.store: dict[int, tuple[int, int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self._check(plan)
        for move in plan.moves:
            self._move(move)
        for new in plan.new:
            self._enter(new)
        for slot, first, blocks in plan.block_updates:
            row = self.rows[slot]
            own = row.request.params.beam is not None and first == len(row.blocks) - 1 and len(blocks) == 1
            assert len(row.blocks) == first or own, "a table may only grow at its end"
            assert all(0 <= block < self.config.num_blocks for block in blocks)
            row.blocks[first:] = blocks
        self._copy(plan)
        self._write(plan)
        token_ids, prompt_logprobs, logprobs, errors = [], {}, {}, {}
        for i, (slot, start, count, samples) in enumerate(_rows(plan)):
            row, end = self.rows[slot], start + count
            self._read(row, end)
            assert samples == (end == len(row.tokens)), "a row samples exactly when its gap closes"
            entries = self._prompt_logprobs(row, start, end)
            if entries:
                prompt_logprobs[i] = entries
            if not samples:
                continue
            token = next_token(row.tokens)
            if BAD_TOKEN in row.tokens:
                errors[i], token = "bad token", -1
            token_ids.append(token)
            row.tokens.append(token)
            if row.request.params.beam is not None:
                logprobs[i] = self._continuations(row, token)
            elif row.request.params.logprobs is not None:
                logprobs[i] = TokenLogprobs([token], [-float(end)], 1)
        return StepResult(token_ids, logprobs, prompt_logprobs, errors)

    def _continuations(self, row: _Row, chosen: int) -> TokenLogprobs:
        values = continuations(row.tokens[:-1])
        best = sorted(range(VOCAB), key=lambda token: -values[token])[: row.request.params.logprobs]
        return TokenLogprobs([chosen, *best], [values[chosen], *(values[token] for token in best)], 1)

    def _move(self, move: BeamMove) -> None:
        width = -(-move.position // self.config.block_size)
        sources = [copy(self.rows[slot]) for slot in move.sources.tolist()]
        assert all(row.request is sources[0].request for row in sources), "a beam follows a beam of its own search"
        for slot, source, token in zip(move.slots.tolist(), sources, move.tokens, strict=True):
            row = self.rows[slot]
            row.tokens = [*source.tokens[: move.position], token]
            row.blocks, row.digests = source.blocks[:width], source.digests[: move.position]

    def _copy(self, plan: StepPlan) -> None:
        size = self.config.block_size
        sources, targets = {pair[0] for pair in plan.copies}, [pair[1] for pair in plan.copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets)
        assert self.config.copies_blocks or not plan.copies
        for source, target in plan.copies:
            for offset in range(size):
                self.store.pop(target * size + offset, None)
                if source * size + offset in self.store:
                    self.store[target * size + offset] = self.store[source * size + offset]

    def _check(self, plan: StepPlan) -> None:
        config, slots = self.config, plan.slots_N.tolist()
        assert slots, "a plan with nothing in it"
        assert len(slots) == len(plan.starts_N) == len(plan.num_new_N) == len(plan.samples_N)
        assert plan.num_tokens <= config.max_num_batched_tokens, "the budget is exceeded"
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(config.max_num_seqs))
        assert (plan.num_new_N >= 1).all()
        if config.long_prefill_token_threshold:
            assert (plan.num_new_N <= config.long_prefill_token_threshold).all()
        assert {new.slot for new in plan.new} <= set(slots), "a sequence enters and gets nothing to do"

    def _enter(self, new: NewRequest) -> None:
        assert new.num_prompt == len(new.request.prompt_token_ids)
        assert new.token_ids[: new.num_prompt] == new.request.prompt_token_ids
        owed = None if new.prompt_logprobs_from is None else new.prompt_logprobs_from + 1
        self.rows[new.slot] = _Row(new.request, new.num_prompt, list(new.token_ids), prompt_logprobs_at=owed)
        self.rows[new.slot].write_from = new.write_from

    def _slot(self, row: _Row, position: int) -> int:
        size = self.config.block_size
        return row.blocks[position // size] * size + position % size

    def _digest(self, row: _Row, position: int) -> int:
        """Of the tokens up to and including `position`."""
        while len(row.digests) <= position:
            before = row.digests[-1] if row.digests else hash((row.request.cache_salt, row.request.adapter))
            row.digests.append(hash((before, row.tokens[len(row.digests)])))
        return row.digests[position]

    def _write(self, plan: StepPlan) -> None:
        written: set[int] = set()
        for slot, start, count, _ in _rows(plan):
            row = self.rows[slot]
            assert start + count <= len(row.tokens), "a token is computed before it is known"
            for position in range(max(start, row.write_from), start + count):
                at = self._slot(row, position)
                assert at not in written, "two tokens of a step share a slot"
                written.add(at)
                self.store[at] = (position, self._digest(row, position))

    def _read(self, row: _Row, end: int) -> None:
        for position in range(end):
            found = self.store.get(self._slot(row, position))
            assert found == (position, self._digest(row, position)), f"position {position} holds something else"

    def _prompt_logprobs(self, row: _Row, start: int, end: int) -> list[TokenLogprobs]:
        first, stop = row.prompt_logprobs_at, min(end + 1, row.num_prompt)
        if first is None or stop <= first:
            return []
        assert first == start + 1, "prompt log-probabilities skip a position"
        row.prompt_logprobs_at = stop
        return [TokenLogprobs([row.tokens[p]], [-float(p)], 1) for p in range(first, stop)]


NOTHING = StepPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))


def _rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    columns = (plan.slots_N, plan.starts_N, plan.num_new_N, plan.samples_N)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Harness:
    """A scheduler with a fake executor; collects what each request got. `ahead`: the next step is planned, and run,
    before the last one is booked, wherever the scheduler allows it, which `num_ahead` counts."""

    def __init__(self, *, ahead: bool = False, **config: Any) -> None:
        self.ahead, self.num_ahead = ahead, 0
        self.flying: tuple[Flight, StepResult] | None = None
        defaults = {
            "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 64, "block_size": 4,
        }  # fmt: skip
        self.config = SchedulerConfig(**{**defaults, **config})
        self.scheduler = Scheduler(self.config)
        self.executor = FakeExecutor(self.config)
        self.outputs: dict[str, list[EngineOutput]] = {}

    def add(self, *requests: EngineRequest) -> None:
        for req in requests:
            assert self.scheduler.add(req) is None
            self.outputs[req.request_id] = []

    def step(self) -> StepPlan:
        if not self.ahead:
            plan = self.scheduler.schedule()
            self._take(self.scheduler.update(plan, self.executor.execute(plan)))
            return plan
        flying, self.flying = self.flying, None
        if flying is not None and self.scheduler.can_plan_ahead():
            self.flying = self._launch(ahead=True)
            self.num_ahead += self.flying is not None
        if flying is not None:
            self._take(self.scheduler.book(*flying))
        if self.flying is None and self.scheduler.has_work():
            self.flying = self._launch(ahead=False)
        return self.flying[0].plan if self.flying is not None else NOTHING

    def _launch(self, *, ahead: bool) -> tuple[Flight, StepResult] | None:
        preempted = self.scheduler.stats().num_preemptions
        plan = self.scheduler.schedule()
        assert not ahead or self.scheduler.stats().num_preemptions == preempted
        if ahead and plan.empty:
            return None
        return self.scheduler.depart(plan), self.executor.execute(plan)

    def settle(self) -> None:
        """Book what is still in flight."""
        if self.flying is not None:
            self._take(self.scheduler.book(*self.flying))
            self.flying = None

    def _take(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert not self.finished(output.request_id), "news of a request that has ended"
            self.outputs[output.request_id].append(output)
        self.scheduler.pool.check()

    def run(self, limit: int = 1000) -> int:
        """Until all is done; how many steps it took."""
        for steps in range(limit):
            if not self.scheduler.has_work():
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def finished(self, request_id: str) -> bool:
        outputs = self.outputs[request_id]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def check(self, req: EngineRequest) -> None:
        """The request has ended, with exactly what it should have."""
        outputs = self.outputs[req.request_id]
        tokens, finish_reason, stop_reason = expected(req)
        assert self.tokens(req.request_id) == tokens
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (finish_reason, stop_reason)
        if req.params.logprobs is not None and finish_reason != "error":
            logprobs = [entry for output in outputs for entry in output.logprobs or []]
            n = len(req.prompt_token_ids)
            assert logprobs == [TokenLogprobs([t], [-float(n + i)], 1) for i, t in enumerate(tokens)]
        prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
        if req.params.prompt_logprobs is None:
            assert prompt_logprobs == []
        else:
            rest = [TokenLogprobs([t], [-float(p)], 1) for p, t in enumerate(req.prompt_token_ids) if p]
            assert prompt_logprobs == [[None, *rest]] and outputs[0].prompt_logprobs is not None

    def check_idle(self) -> None:
        """Nothing is left: no block in use, no slot, nobody waiting."""
        self.settle()
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
        assert (stats.kv_tokens_held, stats.kv_slots_held) == (0, 0)
        assert self.scheduler.pool.num_free == self.config.num_blocks
        assert sorted(self.scheduler.running._free_slots) == list(range(self.config.max_num_seqs))
        self.scheduler.pool.check()
