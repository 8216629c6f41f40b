"""Speculation: guess the next tokens, compute them all in one step, keep those that the model would have chosen.

A guess costs a step a few more rows and, where memory bandwidth is the limit, next to no time. Each guessed position is
sampled exactly as it would have been alone: a row's token depends on its logits, its parameters, its seed and its
position, so a guess is right when it equals the token that is sampled there, and the answer, greedy or not, is the one
without speculation. (Leviathan et al., 2023, accept by a ratio of probabilities; with the random number of a position
fixed beforehand, equality keeps the distribution, too, and the very tokens.)

Guesses come from the text itself, as in prompt lookup decoding (Saxena, 2023): where the last few tokens stood before,
what came after them then.

Shape suffix: L tokens of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

from enginecore.config import EngineConfig
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineRequest, TokenLogprobs

#: Guesses in a row that were wrong from the first token on, after which a sequence guesses more rarely.
PATIENCE = 4
#: Steps without a guess after each further one of those.
PAUSE = 16


Entry = TypeVar("Entry")


class Proposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens_L: np.ndarray, most: int) -> list[int]:
        """Up to `most` tokens that may come after `tokens_L`, the likeliest continuation; empty for no guess."""


class NgramProposer:
    """What came after an earlier occurrence of the sequence's last tokens: of `longest` of them, else of fewer, down to
    `shortest`. The latest occurrence that enough tokens follow, else the first."""

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._longest, self._shortest = longest, shortest

    def propose(self, tokens_L: np.ndarray, most: int) -> list[int]:
        count = len(tokens_L)
        # Where the last token stands: every longer end is among these places.
        found = np.flatnonzero(tokens_L[: count - 1] == tokens_L[-1])
        best: int | None = None
        for length in range(2, self._longest + 1):
            if length >= count:
                break
            found = found[found >= length - 1]
            found = found[tokens_L[found - (length - 1)] == tokens_L[-length]]
            if not len(found):
                break
            if length >= self._shortest:
                enough = found[found + most < count]
                best = int(enough[-1] if len(enough) else found[0])
        if best is None:
            return []
        ids: list[int] = tokens_L[best + 1 : best + 1 + most].tolist()
        return ids


@dataclass
class _Luck:
    """How the guesses for a slot have gone lately."""

    misses: int = 0
    wait: int = 0


class Speculation:
    """Guesses for the slots of a runner's batch, up to `most` tokens each. A sequence whose text repeats nothing stops
    paying for guesses: after some misses it pauses between them."""

    def __init__(self, proposer: Proposer, most: int) -> None:
        self._proposer = proposer
        self._most = most
        self._luck: dict[int, _Luck] = {}

    def enter(self, slot: int, request: EngineRequest) -> None:
        """A sequence takes a slot."""
        self._luck.pop(slot, None)
        if not request.is_followed:
            self._luck[slot] = _Luck()

    def look_on(self, result: StepResult, plan: StepPlan, tokens_SL: np.ndarray) -> StepResult:
        """A step's result with guesses for the next one. `tokens_SL` hold what was sampled, too."""
        guesses = {}
        ends = plan.ends_N
        for row in np.flatnonzero(plan.samples_N).tolist():
            luck = self._luck.get(slot := int(plan.slots_N[row]))
            if luck is None or row in result.errors:
                continue
            right = len(result.accepted.get(row, ()))
            if row in plan.guesses:
                luck.misses = 0 if right else luck.misses + 1
                luck.wait = PAUSE if luck.misses >= PATIENCE else 0
            if luck.wait:
                luck.wait -= 1
            elif ids := self._proposer.propose(tokens_SL[slot, : ends[row] + 1 + right], self._most):
                guesses[row] = ids
        return replace(result, guesses=guesses)


def speculation_of(config: EngineConfig) -> Speculation | None:
    """What the configuration asks for."""
    return None if config.speculation == "off" else Speculation(NgramProposer(), config.num_speculative_tokens)


def collapse(result: StepResult, plan: StepPlan, rows_R: list[int]) -> StepResult:
    """From one entry for each token that was sampled (R, of row `rows_R[i]`) to one for each row: the first token, and
    where guesses held what was sampled after those."""

    def by_row(entries: dict[int, Entry]) -> dict[int, Entry]:
        return {rows_R[i]: entry for i, entry in entries.items() if not i or rows_R[i - 1] != rows_R[i]}

    result_of_rows = replace(
        result, forced=by_row(result.forced), logprobs=by_row(result.logprobs), errors=by_row(result.errors)
    )
    if not plan.guesses:
        return result_of_rows
    firsts = [i for i, row in enumerate(rows_R) if not i or rows_R[i - 1] != row]
    accepted: dict[int, list[int]] = {}
    accepted_logprobs: dict[int, list[TokenLogprobs]] = {}
    for i in firsts:
        guesses = plan.guesses.get(rows_R[i], [])
        right = 0
        # A position where sampling failed is left for the step that comes to it without a guess.
        while right < len(guesses) and result.token_ids[i + right] == guesses[right]:
            if i + right in result.errors or i + right + 1 in result.errors:
                break
            right += 1
        if right:
            accepted[rows_R[i]] = result.token_ids[i + 1 : i + 1 + right]
            if i in result.logprobs:
                accepted_logprobs[rows_R[i]] = [result.logprobs[j] for j in range(i + 1, i + 1 + right)]
    return replace(
        result_of_rows,
        token_ids=[result.token_ids[i] for i in firsts],
        accepted=accepted,
        accepted_logprobs=accepted_logprobs,
    )
