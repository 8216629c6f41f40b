"""One choice on its way out: tokens in, text, log-probabilities and the reason to stop out."""

from __future__ import annotations

from enginecore.frontend.detokenizer import Detokenizer, TokenTable
from enginecore.frontend.outputs import CompletionOutput, Logprob, LogprobDict
from enginecore.frontend.stop import StopAutomaton, StopChecker
from enginecore.request import EngineOutput, SamplingParams, TokenLogprobs


def logprob_dict(table: TokenTable, entry: TokenLogprobs) -> LogprobDict:
    """By token id: the chosen token with its rank, then the best k, which the engine gives in order."""
    ids, values = entry.token_ids, entry.logprobs
    chosen = ids[0]
    result = {chosen: Logprob(values[0], entry.rank, table.text(chosen))}
    rank = 0
    best = ids[1:]
    skip = entry.rank if chosen not in best else 0
    for token, value in zip(best, values[1:], strict=True):
        rank += 1
        if rank == skip:
            rank += 1
        if token != chosen:
            result[token] = Logprob(value, rank, table.text(token))
    return result


class SequenceOutput:
    """Accumulates one sequence. `advance` returns the news as a delta and keeps the whole in `whole`.

    Stop strings are looked for in the text of the tokens after `min_tokens`; those before never stop the sequence. The
    token that ends it (end of text or one of stop_token_ids) adds no text unless include_stop_str_in_output is set.
    """

    __slots__ = ("_checker", "_detokenizer", "_params", "_table", "_wants_logprobs", "keep_whole", "last_time", "whole")

    def __init__(
        self, index: int, params: SamplingParams, table: TokenTable, stops: StopAutomaton | None, *, keep_whole: bool,
        shown_tokens: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.whole = CompletionOutput(index, "", [])
        self.keep_whole = keep_whole
        self.last_time: float | None = None
        self._params = params
        self._table = table
        self._wants_logprobs = params.logprobs is not None
        self._detokenizer = (
            Detokenizer(table, skip_special_tokens=params.skip_special_tokens, shown=shown_tokens)
            if params.detokenize
            else None
        )
        self._checker = StopChecker(stops, include=params.include_stop_str_in_output) if stops is not None else None
        if self._wants_logprobs:
            self.whole.logprobs, self.whole.token_texts = [], []

    @property
    def finished(self) -> bool:
        return self.whole.finish_reason is not None

    def advance(self, news: EngineOutput) -> CompletionOutput:
        """Take an engine output. When a stop string is found, tokens after it are dropped; `finish_reason` is then set
        here while the engine still runs the sequence."""
        delta = CompletionOutput(self.whole.index, "", [])
        texts: list[str] = []
        last = len(news.token_ids) - 1 if news.finish_reason == "stop" else -1
        hide_last = not self._params.include_stop_str_in_output
        for position, token in enumerate(news.token_ids):
            delta.token_ids.append(token)
            hidden = self._detokenizer is None or (position == last and hide_last)
            text = "" if hidden or self._detokenizer is None else self._detokenizer.add(token)
            texts.append(text)
            if text and self._show(delta, text):
                break
        if news.finish_reason is not None and delta.finish_reason is None:
            self._finish(delta, news, texts)
        if self._wants_logprobs:
            entries = (news.logprobs or [])[: len(delta.token_ids)]
            delta.logprobs = [logprob_dict(self._table, entry) for entry in entries]
            delta.token_texts = texts
            new_sum = sum(entry.logprobs[0] for entry in entries)
            delta.cumulative_logprob = (self.whole.cumulative_logprob or 0.0) + new_sum
        self._book(delta)
        return delta

    def abort(self) -> CompletionOutput:
        """End the sequence because the client went away or the server stops."""
        delta = CompletionOutput(self.whole.index, "", [], finish_reason="abort")
        delta.cumulative_logprob = self.whole.cumulative_logprob
        if self._checker is not None:
            delta.text = self._checker.finish()
        if self._wants_logprobs:
            delta.logprobs, delta.token_texts = [], []
        self._book(delta)
        return delta

    def _show(self, delta: CompletionOutput, text: str) -> bool:
        """Pass text through the stop checker; True when a stop string ended the sequence."""
        if self._checker is None:
            delta.text += text
            return False
        count = len(self.whole.token_ids) + len(delta.token_ids)
        shown, stop = self._checker.feed(text, may_stop=count > self._params.min_tokens)
        delta.text += shown
        if stop is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop
        return stop is not None

    def _finish(self, delta: CompletionOutput, news: EngineOutput, texts: list[str]) -> None:
        rest = self._detokenizer.finish() if self._detokenizer is not None else ""
        if rest:
            if texts:
                texts[-1] += rest
            if self._show(delta, rest):
                return
        if self._checker is not None:
            delta.text += self._checker.finish()
        delta.finish_reason, delta.stop_reason = news.finish_reason, news.stop_reason

    def _book(self, delta: CompletionOutput) -> None:
        """Add a delta to the whole; text and lists only when someone will read them."""
        whole = self.whole
        whole.token_ids += delta.token_ids
        whole.cumulative_logprob = delta.cumulative_logprob
        whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
        if not self.keep_whole:
            return
        whole.text += delta.text
        if whole.logprobs is not None and delta.logprobs is not None:
            whole.logprobs += delta.logprobs
        if whole.token_texts is not None and delta.token_texts is not None:
            whole.token_texts += delta.token_texts
