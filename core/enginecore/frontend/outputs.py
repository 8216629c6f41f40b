"""What a caller gets back, in vLLM's shapes: `RequestOutput` for a prompt, `CompletionOutput` for each of its
choices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """The raw log-probability of one token at a position. `rank` counts from 1; `decoded_token` is readable text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


#: One position: the chosen token and the best k, by token id.
LogprobDict = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. In a delta, `text`, `token_ids`, `logprobs` and `token_texts` hold only what is new.

    `finish_reason` is "stop", "length", "abort" or None while running; `stop_reason` is the stop string or stop token
    that ended it (None for the end-of-text token). `token_texts`, there when logprobs were asked for, is the text that
    each token added before stop strings cut it: bytes of an unfinished character count for the token that finishes it.
    `score` is what a beam search ranked the choice by, None for any other.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobDict] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_texts: list[str] | None = None
    score: float | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def merge(self, newer: CompletionOutput) -> None:
        """Append a later delta of the same choice."""
        self.text += newer.text
        self.token_ids += newer.token_ids
        if newer.logprobs is not None:
            self.logprobs = (self.logprobs or []) + newer.logprobs
        if newer.token_texts is not None:
            self.token_texts = (self.token_texts or []) + newer.token_texts
        self.cumulative_logprob = newer.cumulative_logprob
        self.finish_reason = newer.finish_reason
        self.stop_reason = newer.stop_reason
        self.score = newer.score


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds, on the clock of `time.monotonic()`; None until it happened."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The state (or, in a delta stream, the news) of one prompt.

    `num_generated_tokens` counts every token generated for the prompt so far, over all choices and over the candidates
    that `best_of` dropped. `num_cached_tokens` is how much of the prompt the prefix cache held. `prompt_logprobs` has
    an entry for each prompt token, the first of them None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[LogprobDict | None] | None = None
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    metrics: RequestMetrics | None = field(default=None, repr=False)

    def merge(self, newer: RequestOutput) -> None:
        """Append a later delta of the same request: a slow reader gets one larger delta instead of a backlog."""
        known = {output.index: output for output in self.outputs}
        for output in newer.outputs:
            if output.index in known:
                known[output.index].merge(output)
            else:
                self.outputs.append(output)
        self.finished = newer.finished
        self.num_cached_tokens = newer.num_cached_tokens
        self.num_generated_tokens = newer.num_generated_tokens
        self.prompt_logprobs = newer.prompt_logprobs or self.prompt_logprobs
