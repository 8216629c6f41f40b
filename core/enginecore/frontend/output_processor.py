"""Engine outputs to request outputs: many sequences, grouped by the prompt that they answer.

The loop (`LLM` or `AsyncLLM`) feeds each step's outputs in. Every group that has news puts one `RequestOutput` into
its sink:

- kind "delta": only what is new, in every choice that moved;
- kind "cumulative": everything so far;
- kind "final": once, when all choices have ended.

`best_of` larger than n is always "final": the n candidates with the best mean log-probability, best first, numbered
from 0.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from enginecore.errors import RequestError
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import CompletionOutput, LogprobDict, RequestMetrics, RequestOutput
from enginecore.frontend.sequence_output import SequenceOutput, logprob_dict
from enginecore.frontend.stop import StopAutomaton
from enginecore.request import BeamAnswer, EngineOutput, EngineRequest, StepOutputs

OutputKind = Literal["delta", "cumulative", "final"]


class Sink(Protocol):
    """Where a group's outputs go. `key` is what the group was added with."""

    def put(self, key: int, output: RequestOutput) -> None: ...
    def fail(self, key: int, error: Exception) -> None: ...


class Observer(Protocol):
    """Told about the life of requests, for metrics. Times are `time.monotonic()` seconds."""

    def first_output(self, num_prompt_tokens: int) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...
    def tokens(self, count: int) -> None: ...
    def finished(self, reason: str, seconds: float, num_prompt_tokens: int, num_generated: int) -> None: ...


class Group:
    """The sequences that answer one prompt."""

    def __init__(self, request: PreparedRequest, request_id: str, internal_id: str, kind: OutputKind, sink: Sink,
                 key: int, table: TokenTable, arrival: float) -> None:  # fmt: skip
        params = request.params
        self.request, self.request_id, self.sink, self.key = request, request_id, sink, key
        self.internal_id = internal_id
        self.ranked = request.num_sequences > params.n
        self.kind: OutputKind = "final" if self.ranked else kind
        self.metrics = RequestMetrics(arrival)
        self.prompt_logprobs: list[LogprobDict | None] | None = None
        self.num_cached = 0
        self.num_generated = 0
        self.started = False
        stops = StopAutomaton(params.stop_list) if params.stop_list else None
        # Ranking needs log-probabilities that the caller did not ask for.
        self.hide_logprobs = self.ranked and params.logprobs is None
        shown = msgspec.structs.replace(params, logprobs=0) if self.hide_logprobs else params
        keep = self.kind != "delta"
        tokens = request.form.shown_tokens
        self.sequences = [
            SequenceOutput(i, shown, table, stops, keep_whole=keep, shown_tokens=tokens)
            for i in range(request.num_sequences)
        ]
        self.news: list[CompletionOutput] = []

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

    def engine_ids(self) -> list[str]:
        """The engine's ids of the sequences that still run; a beam search has one."""
        if self.request.params.beam is not None:
            return [] if self.finished else [f"{self.internal_id}_0"]
        return [f"{self.internal_id}_{i}" for i, sequence in enumerate(self.sequences) if not sequence.finished]

    def output(self) -> RequestOutput | None:
        """What to tell the sink now, or None for nothing."""
        news, self.news = self.news, []
        finished = self.finished
        if self.kind == "delta":
            outputs = news
        elif self.kind == "final" and not finished:
            return None
        elif self.ranked:
            outputs = self._ranked()
        else:
            outputs = [_copy(sequence.whole) for sequence in self.sequences]
        prompt_logprobs = self.prompt_logprobs
        if self.kind == "delta":
            self.prompt_logprobs = None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.text,
            prompt_token_ids=self.request.token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached,
            num_generated_tokens=self.num_generated,
            metrics=self.metrics,
        )

    def _ranked(self) -> list[CompletionOutput]:
        """The best n by mean log-probability a token."""

        def mean(output: CompletionOutput) -> float:
            return (output.cumulative_logprob or 0.0) / max(1, len(output.token_ids))

        best = sorted((sequence.whole for sequence in self.sequences), key=mean, reverse=True)
        best = best[: self.request.params.n]
        for index, output in enumerate(best):
            output.index = index
            if self.hide_logprobs:
                output.logprobs = output.token_texts = None
        return best


class OutputProcessor:
    """Keeps every request in flight. Not thread-safe: one loop owns it."""

    def __init__(self, table: TokenTable, observer: Observer | None = None) -> None:
        self._table = table
        self._observer = observer
        self._groups: dict[str, Group] = {}
        self._sequences: dict[str, tuple[Group, SequenceOutput]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._groups)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def add(
        self, request: PreparedRequest, *, request_id: str, internal_id: str, sink: Sink, kind: OutputKind, key: int = 0
    ) -> list[EngineRequest]:
        """Register a prompt; returns what to send to the engine."""
        arrival = time.monotonic()
        group = Group(request, request_id, internal_id, kind, sink, key, self._table, arrival)
        self._groups[internal_id] = group
        engine_requests = request.engine_requests(internal_id, arrival)
        for engine_request, sequence in zip(engine_requests, group.sequences, strict=False):
            self._sequences[engine_request.request_id] = (group, sequence)
        return engine_requests

    def process(self, step: StepOutputs) -> dict[str, str]:
        """Take a step's outputs; returns the ids that the engine has to abort, and why: "stop" (a stop string ended
        them) or "error" (a sibling failed)."""
        to_abort: dict[str, str] = {}
        touched: dict[str, Group] = {}
        now = time.monotonic()
        num_tokens = 0
        for news in step.outputs:
            entry = self._sequences.get(news.request_id)
            if entry is None:
                continue  # aborted while this output was on its way
            group, sequence = entry
            if news.finish_reason == "error":
                error = RequestError(news.error or "the engine refused the request")
                to_abort.update(dict.fromkeys(self._fail(group, error, news.request_id), "error"))
                touched.pop(group.internal_id, None)
                continue
            if news.beams is not None:
                num_tokens += self._take_beams(group, news, news.beams, now)
                del self._sequences[news.request_id]
                touched[group.internal_id] = group
                continue
            self._observe(group, sequence, news, now)
            delta = sequence.advance(news)
            group.num_generated += len(delta.token_ids)
            num_tokens += len(delta.token_ids)
            group.news.append(delta)
            if delta.finish_reason is not None:
                del self._sequences[news.request_id]
                if news.finish_reason is None:
                    to_abort[news.request_id] = "stop"
            touched[group.internal_id] = group
        if self._observer and num_tokens:
            self._observer.tokens(num_tokens)
        for group in touched.values():
            self._emit(group, now)
        return to_abort

    def _take_beams(self, group: Group, news: EngineOutput, beams: list[BeamAnswer], now: float) -> int:
        """The answers of a beam search become the choices, best first; returns how many tokens they have."""
        count = 0
        for sequence, answer in zip(group.sequences, beams, strict=False):
            whole = EngineOutput(
                news.request_id, answer.token_ids, answer.logprobs, None, answer.finish_reason, answer.stop_reason,
                news.num_cached_tokens,
            )  # fmt: skip
            self._observe(group, sequence, whole, now)
            delta = sequence.advance(whole)
            for output in (delta, sequence.whole):
                output.cumulative_logprob, output.score = answer.cumulative_logprob, answer.score
            group.news.append(delta)
            count += len(delta.token_ids)
        group.num_generated += count
        return count

    def abort(self, internal_ids: Iterable[str]) -> list[str]:
        """Forget requests whose reader has gone; returns the ids that the engine has to abort."""
        to_abort: list[str] = []
        now = time.monotonic()
        for internal_id in internal_ids:
            group = self._groups.pop(internal_id, None)
            if group is None:
                continue
            running = group.engine_ids()
            to_abort += running
            for engine_id in running:
                self._sequences.pop(engine_id)[1].abort()
            self._observe_end(group, "abort", now)
        return to_abort

    def fail_all(self, error: Exception) -> list[str]:
        """Every request in flight gets `error`. Returns the ids of the sequences that were running."""
        ids = list(self._sequences)
        for group in list(self._groups.values()):
            self._fail(group, error)
        return ids

    def _fail(self, group: Group, error: Exception, engine_id: str | None = None) -> list[str]:
        """End a request with an error; returns its other sequences, which the engine still runs."""
        self._groups.pop(group.internal_id, None)
        running = group.engine_ids()
        for other in running:
            self._sequences.pop(other)[1].abort()
        self._observe_end(group, "error", time.monotonic())
        group.sink.fail(group.key, error)
        return [other for other in running if other != engine_id]

    def _emit(self, group: Group, now: float) -> None:
        output = group.output()
        if group.finished:
            group.metrics.finished_time = now
            del self._groups[group.internal_id]
            reasons = {sequence.whole.finish_reason for sequence in group.sequences}
            self._observe_end(group, "length" if "length" in reasons else str(reasons.pop()), now)
        if output is not None:
            group.sink.put(group.key, output)

    def _observe(self, group: Group, sequence: SequenceOutput, news: EngineOutput, now: float) -> None:
        observer, metrics = self._observer, group.metrics
        if not group.started:
            group.started = True
            group.num_cached = news.num_cached_tokens
            if observer:
                observer.first_output(len(group.request.token_ids))
        if news.prompt_logprobs is not None:
            group.prompt_logprobs = [
                None if entry is None else logprob_dict(self._table, entry) for entry in news.prompt_logprobs
            ]
        if not news.token_ids:
            return
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            if observer:
                observer.first_token(now - metrics.arrival_time)
        elif observer and sequence.last_time is not None:
            observer.next_token(now - sequence.last_time)
        sequence.last_time = now

    def _observe_end(self, group: Group, reason: str, now: float) -> None:
        if self._observer:
            prompt = len(group.request.token_ids) if group.started else 0
            self._observer.finished(reason, now - group.metrics.arrival_time, prompt, group.num_generated)


def _copy(output: CompletionOutput) -> CompletionOutput:
    """A snapshot whose lists do not grow any more."""
    return CompletionOutput(
        index=output.index,
        text=output.text,
        token_ids=list(output.token_ids),
        cumulative_logprob=output.cumulative_logprob,
        logprobs=None if output.logprobs is None else list(output.logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        token_texts=None if output.token_texts is None else list(output.token_texts),
        score=output.score,
    )
