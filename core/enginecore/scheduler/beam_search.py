"""Beam search as arithmetic: candidates in, the beams that go on and the answers that are finished out.

The rules are those of transformers' `generate(num_beams=width, do_sample=False)`, in float32 as there:

- each step takes the best `(1 + stop tokens) * width` (at least `2 * width`) continuations over all beams by the sum of
  their log-probabilities;
- of the best `width` of these, those that end (a stop token, or the last token allowed) are finished answers, with the
  score `sum / tokens ** length_penalty`; the `width` best finished answers are kept;
- the best `width` that do not end go on.

It is over when no token may follow, or `width` answers are finished and: `early_stopping` is True; or it is False and
the best beam's score as it stands is no better than the worst answer's; or it is "never" and the same holds for the
score that the beam would have at the greatest length (with a positive penalty, which favours length).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginecore.request import BeamAnswer, BeamOptions, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Link:
    """The last token of a beam and the beam before it: beams that agree share their links."""

    before: Link | None
    token: int
    logprob: float
    entry: TokenLogprobs | None

    def chain(self) -> list[Link]:
        """All links, the first token's first."""
        links: list[Link] = []
        link: Link | None = self
        while link is not None:
            links.append(link)
            link = link.before
        return links[::-1]


@dataclass(frozen=True, slots=True)
class _Finished:
    score: np.float32
    total: np.float32
    link: Link
    reason: str
    stop_reason: int | None


def num_candidates(width: int, num_stops: int) -> int:
    """Continuations of each beam that a step has to know."""
    return max(2, 1 + num_stops) * width


class BeamSearch:
    """The state of one search. `stops` maps each stop token to the stop reason of an answer that it ends; with
    `logprobs` the answers' tokens bring their log-probabilities and that many of the best beside them."""

    def __init__(
        self, options: BeamOptions, stops: dict[int, int | None], max_tokens: int, logprobs: int | None = None
    ) -> None:
        self._options = options
        self._stops = stops
        self._max_tokens = max_tokens
        self._logprobs = logprobs
        self.num_tokens = 0
        self.scores = np.zeros(1, np.float32)
        self.links: list[Link | None] = [None]
        self._finished: list[_Finished] = []

    def advance(self, candidates: Sequence[TokenLogprobs]) -> tuple[list[int], list[int]] | None:
        """Take each beam's best continuations (its chosen token first, which is ignored). Returns (parent, token) of
        each beam that goes on, best first, or None when the search is over."""
        width, before = self._options.width, self.links
        self.num_tokens += 1
        totals, beams, ranks = self._best(candidates)
        going: list[tuple[np.float32, int, Link]] = []
        for place, (total, beam, rank) in enumerate(zip(totals, beams.tolist(), ranks.tolist(), strict=True)):
            entry = candidates[beam]
            token = entry.token_ids[1 + rank]
            ends = token in self._stops or self.num_tokens == self._max_tokens
            if (ends and place >= width) or (not ends and len(going) == width):
                continue
            kept = entry if self._logprobs is not None else None
            link = Link(before[beam], token, entry.logprobs[1 + rank], kept)
            if ends:
                self._finish(total, link)
            else:
                going.append((total, beam, link))
        self._finished = sorted(self._finished, key=lambda answer: -answer.score)[:width]
        if not going or self._is_over(going[0][0]):
            return None
        self.scores = np.array([total for total, _, _ in going], np.float32)
        self.links = [link for _, _, link in going]
        return [beam for _, beam, _ in going], [link.token for _, _, link in going]

    def _best(self, candidates: Sequence[TokenLogprobs]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(sum, beam, rank within the beam) of the best continuations, best first."""
        count = num_candidates(self._options.width, len(self._stops))
        rows = [np.array(entry.logprobs[1 : count + 1], np.float32) for entry in candidates]
        totals = np.concatenate([row + score for row, score in zip(rows, self.scores, strict=True)])
        beams = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        ranks = np.concatenate([np.arange(len(row)) for row in rows])
        order = np.argsort(-totals, kind="stable")[:count]
        return totals[order], beams[order], ranks[order]

    def _score(self, total: np.float32, length: int) -> np.float32:
        score: np.float32 = total / np.float32(float(length) ** self._options.length_penalty)
        return score

    def _finish(self, total: np.float32, link: Link) -> None:
        stopped = link.token in self._stops
        reason, stop_reason = ("stop", self._stops[link.token]) if stopped else ("length", None)
        self._finished.append(_Finished(self._score(total, self.num_tokens), total, link, reason, stop_reason))

    def _is_over(self, best: np.float32) -> bool:
        options = self._options
        if len(self._finished) < options.width:
            return False
        if options.early_stopping is True:
            return True
        to_the_end = options.early_stopping == "never" and options.length_penalty > 0
        return not self._score(best, self._max_tokens if to_the_end else self.num_tokens) > self._finished[-1].score

    def answers(self) -> list[BeamAnswer]:
        """The finished answers, best first."""
        return [_answer(finished, self._logprobs) for finished in self._finished]


def _answer(finished: _Finished, logprobs: int | None) -> BeamAnswer:
    links = finished.link.chain()
    entries = None
    if logprobs is not None:
        entries = [_entry(link, link.entry, logprobs) for link in links if link.entry is not None]
    return BeamAnswer(
        token_ids=[link.token for link in links],
        score=float(finished.score),
        cumulative_logprob=float(finished.total),
        finish_reason=finished.reason,
        stop_reason=finished.stop_reason,
        logprobs=entries,
    )


def _entry(link: Link, entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """The log-probabilities that a caller asked for: the beam's token, then the `count` best."""
    best_ids, best = entry.token_ids[1 : count + 1], entry.logprobs[1 : count + 1]
    rank = 1 + entry.token_ids[1:].index(link.token)
    return TokenLogprobs([link.token, *best_ids], [link.logprob, *best], rank)
