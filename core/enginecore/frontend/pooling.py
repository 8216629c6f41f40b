"""Texts for a pooling model to engine requests, and the engine's numbers back to whoever asked.

`PoolingInput` and `PoolingOutputs` stand where `InputProcessor` and `OutputProcessor` stand for a model that generates,
so that everything in between (clients, collectors, aborts, the engine's death) is the same for both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from enginecore.config import EngineConfig
from enginecore.errors import ParameterError, RequestError
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.input_processor import InputProcessor, PreparedRequest, Prompt, split_prompt, too_long
from enginecore.frontend.output_processor import Observer, OutputProcessor, Sink
from enginecore.frontend.outputs import RequestMetrics
from enginecore.pooling import Pooled, PoolingModel, PoolingParams
from enginecore.request import EngineOutput, EngineRequest, SamplingParams, StepOutputs

FloatArray = npt.NDArray[np.float32]

#: What an engine request needs and pooling has no use for.
_NO_SAMPLING = SamplingParams(max_tokens=0)
INT32_MAX = 2**31 - 1
#: Tokenizers put no more tokens than this before a text.
MAX_ADDED = 16


@dataclass(frozen=True, slots=True)
class PreparedPooling:
    """One text, or pair of texts, checked and tokenised. `second_from` is where a pair's second segment begins."""

    token_ids: list[int]
    params: PoolingParams
    priority: int = 0
    second_from: int | None = None
    num_sequences: int = 1

    def engine_requests(self, internal_id: str, arrival_time: float) -> list[EngineRequest]:
        """The one request that it is."""
        return [
            EngineRequest(
                request_id=f"{internal_id}_0",
                prompt_token_ids=self.token_ids,
                params=_NO_SAMPLING,
                max_tokens=0,
                priority=self.priority,
                arrival_time=arrival_time,
                pooling=self.params,
                second_from=self.second_from,
            )
        ]


@dataclass(slots=True)
class PoolingOutput:
    """What came of one text: `data` is [entries], or [tokens, entries] of a task that says something of each token.

    The rest is there for whoever counts tokens: nothing is generated, and nothing comes out of a cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    data: FloatArray
    finished: bool = True
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)

    def merge(self, newer: PoolingOutput) -> None:
        """There is never a second output of a text."""
        raise AssertionError("a text has one output")


class PoolingInput(InputProcessor):
    """Checks texts against a pooling model. Thread-safe."""

    tokenizer: Any  # one that reads pairs, too

    def __init__(self, config: EngineConfig, tokenizer: Any, table: TokenTable) -> None:
        super().__init__(config, tokenizer, table)
        assert config.pooling is not None
        self.model: PoolingModel = config.pooling

    def process(self, *args: Any, **kwargs: Any) -> PreparedRequest:
        """Refuses: nothing is generated here."""
        raise ParameterError(
            f"the model {self.config.served_model_name!r} is for pooling and generates no text",
            param="model",
            code="model_does_not_generate",
            fix="ask for vectors, scores or classes, or serve a model that generates",
        )

    def prepare(
        self,
        prompt: Prompt,
        params: PoolingParams,
        *,
        truncate: int | None = None,
        add_special_tokens: bool = True,
        priority: int = 0,
        param: str = "input",
    ) -> PreparedPooling:
        """Check and tokenise. `truncate` keeps the first so many tokens, those that the tokenizer adds included; -1 as
        many as fit. `param` is what errors call the text's field. Raises ParameterError."""
        self.model.check(params)
        self._check_scheduling(priority, None)
        limit = self._limit(truncate)
        text, ids = split_prompt(prompt, param)
        if ids is not None:
            with _way_out():
                self._check_ids(ids, SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate), param)
            ids = ids if limit is None else ids[:limit]
        else:
            assert text is not None
            text = self._prepared(self.model.prefix + text if text else text)
            with _way_out():
                ids = self.tokenize(text, add_special_tokens=add_special_tokens, param=param, whole=limit is None)
            if limit is not None and len(ids) > limit:
                ids = self._cut(text, ids, limit)
        self._check_length(len(ids), param)
        return PreparedPooling(ids, params, priority)

    def prepare_pair(
        self, first: str, second: str, params: PoolingParams, *, truncate: int | None = None, priority: int = 0,
        param: str = "text_1",
    ) -> PreparedPooling:  # fmt: skip
        """Two texts that the model reads together. `truncate` takes tokens from the end of the longer one first."""
        self.model.check(params)
        self._check_scheduling(priority, None)
        limit = self._limit(truncate)
        for text in (first, second):
            if not isinstance(text, str) or not text:
                raise ParameterError(f"{param} must be a text that is not empty", param=param)
        first, second = self._prepared(first), self._prepared(second)
        ids, kinds = self.tokenizer.encode_pair(first, second)
        if limit is not None and len(ids) > limit:
            ids, kinds = self._cut_pair(first, second, ids, kinds, limit)
        self._check_length(len(ids), param)
        return PreparedPooling(ids, params, priority, kinds.index(1) if 1 in kinds else None)

    def _limit(self, truncate: int | None) -> int | None:
        if truncate is None:
            return None
        if type(truncate) is not int or truncate == 0 or not -1 <= truncate <= INT32_MAX:
            raise ParameterError(
                "truncate_prompt_tokens must be -1 or at least 1, got " + str(truncate)[:24],
                param="truncate_prompt_tokens",
            )
        return self.config.max_model_len if truncate == -1 else truncate

    def _prepared(self, text: str) -> str:
        return text.lower() if self.model.lowercase else text

    def _cut(self, text: str, ids: list[int], limit: int) -> list[int]:
        """The first tokens, between those that the tokenizer puts around a text."""
        plain = self.tokenizer.encode(text, add_special_tokens=False)
        before, after = _around(ids, plain)
        return _cut_between(ids[:before], plain, ids[len(ids) - after :], limit)

    def _cut_pair(
        self, first: str, second: str, ids: list[int], kinds: list[int], limit: int
    ) -> tuple[list[int], list[int]]:
        parts = [self.tokenizer.encode(text, add_special_tokens=False) for text in (first, second)]
        before = _find(ids, parts[0], 0)
        middle = _find(ids, parts[1], before + len(parts[0]))
        ends = (before + len(parts[0]), middle + len(parts[1]))
        over = len(ids) - limit
        if over > sum(map(len, parts)) - 2:
            raise ParameterError(
                f"truncate_prompt_tokens {limit} leaves no room for the texts", param="truncate_prompt_tokens"
            )
        drop = _shares(len(parts[0]), len(parts[1]), over)
        keep = [*range(ends[0] - drop[0]), *range(ends[0], ends[1] - drop[1]), *range(ends[1], len(ids))]
        return [ids[i] for i in keep], [kinds[i] for i in keep]

    def _check_length(self, length: int, param: str) -> None:
        limit = self.config.max_model_len
        with _way_out():
            if length > limit:
                raise too_long(limit, f"the text has {length}", param)


@contextmanager
def _way_out() -> Iterator[None]:
    """Says what to do about a text that is too long."""
    try:
        yield
    except ParameterError as error:
        if error.code == "context_length_exceeded":
            error.fix = "shorten it, or send truncate_prompt_tokens -1 to use as much of its beginning as fits"
        raise


def _around(ids: list[int], plain: list[int]) -> tuple[int, int]:
    """How many tokens stand before and after `plain` in `ids`."""
    before = _find(ids, plain, 0)
    return before, len(ids) - before - len(plain)


def _find(ids: list[int], part: list[int], start: int) -> int:
    """Where `part` stands in `ids`; the tokenizer may only add a few tokens around it."""
    for at in range(start, min(start + MAX_ADDED, len(ids) - len(part)) + 1):
        if ids[at : at + len(part)] == part:
            return at
    raise ParameterError(
        "this model's tokenizer changes a text by what it puts around it, so it cannot be truncated here",
        param="truncate_prompt_tokens",
    )


def _cut_between(before: list[int], plain: list[int], after: list[int], limit: int) -> list[int]:
    room = limit - len(before) - len(after)
    if room < 1:
        raise ParameterError(
            f"truncate_prompt_tokens {limit} leaves no room for the text between the {len(before) + len(after)} "
            "tokens that the tokenizer adds",
            param="truncate_prompt_tokens",
        )
    return [*before, *plain[:room], *after]


def _shares(first: int, second: int, over: int) -> tuple[int, int]:
    """How many of `over` tokens each of two texts gives up, one after the other from the longer (the second when they
    are equal)."""
    gap = first - second
    alone = min(over, abs(gap))
    rest = over - alone
    drop = [rest // 2, rest - rest // 2]
    drop[0 if gap > 0 else 1] += alone
    return drop[0], drop[1]


class _Waiting:
    """One text in flight."""

    __slots__ = ("arrival", "internal_id", "key", "prompt", "request_id", "sink")

    def __init__(self, internal_id: str, request_id: str, prompt: list[int], sink: Sink, key: int) -> None:
        self.internal_id, self.request_id, self.prompt, self.sink, self.key = internal_id, request_id, prompt, sink, key
        self.arrival = time.monotonic()


class PoolingOutputs:
    """Keeps every text in flight. Not thread-safe: one loop owns it."""

    def __init__(self, observer: Observer | None = None) -> None:
        self._observer = observer
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        return len(self._waiting)

    def add(
        self, request: PreparedPooling, *, request_id: str, internal_id: str, sink: Any, kind: str, key: int = 0
    ) -> list[EngineRequest]:
        """Register a text; returns what to send to the engine."""
        entry = _Waiting(internal_id, request_id, request.token_ids, sink, key)
        self._waiting[internal_id] = entry
        return request.engine_requests(internal_id, entry.arrival)

    def process(self, step: StepOutputs) -> dict[str, str]:
        """Take a step's outputs to their sinks. Nothing ever has to be aborted for what came of another."""
        for news in step.outputs:
            entry = self._waiting.pop(news.request_id.rpartition("_")[0], None)
            if entry is not None:  # else it was given up while this was on its way
                self._deliver(entry, news)
        return {}

    def _deliver(self, entry: _Waiting, news: EngineOutput) -> None:
        if news.pooled is None:
            self._observe_end(entry, "error")
            entry.sink.fail(entry.key, RequestError(news.error or "the engine refused the request"))
            return
        if self._observer:
            self._observer.first_output(len(entry.prompt))
        self._observe_end(entry, "stop")
        metrics = RequestMetrics(entry.arrival, finished_time=time.monotonic())
        output: Any = PoolingOutput(entry.request_id, entry.prompt, as_array(news.pooled), metrics=metrics)
        entry.sink.put(entry.key, output)

    def abort(self, internal_ids: Iterable[str]) -> list[str]:
        """Forget texts whose reader has gone; returns the ids that the engine has to abort."""
        gone = [entry for each in internal_ids if (entry := self._waiting.pop(each, None)) is not None]
        for entry in gone:
            self._observe_end(entry, "abort")
        return [f"{entry.internal_id}_0" for entry in gone]

    def fail_all(self, error: Exception) -> list[str]:
        """Every text in flight gets `error`. Returns the engine's ids of them."""
        entries, self._waiting = list(self._waiting.values()), {}
        for entry in entries:
            self._observe_end(entry, "error")
            entry.sink.fail(entry.key, error)
        return [f"{entry.internal_id}_0" for entry in entries]

    def _observe_end(self, entry: _Waiting, reason: str) -> None:
        if self._observer:
            prompt = len(entry.prompt) if reason == "stop" else 0
            self._observer.finished(reason, time.monotonic() - entry.arrival, prompt, 0)


def as_array(pooled: Pooled) -> FloatArray:
    """The numbers, as a read-only array."""
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)


def processors(
    config: EngineConfig, tokenizer: Any, table: TokenTable, observer: Observer | None = None
) -> tuple[InputProcessor, Any]:
    """What stands before and behind an engine of this kind: (input, an OutputProcessor or PoolingOutputs)."""
    if config.pooling is None:
        return InputProcessor(config, tokenizer, table), OutputProcessor(table, observer)
    return PoolingInput(config, tokenizer, table), PoolingOutputs(observer)
