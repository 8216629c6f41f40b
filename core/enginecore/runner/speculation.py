"""Speculation: guess the next tokens, compute them all in one step, keep those that the model would have chosen.

A guess costs a step a row more, which costs little time where reading the weights is what takes it. Each guessed
position is sampled exactly as it would have been alone: a row's token depends on its logits, its parameters, its seed
and its position, so a guess is right when it equals the token that is sampled there, and the answer, greedy or not, is
the one without speculation. (Leviathan et al., 2023, accept by a ratio of probabilities; with the random number of a
position fixed beforehand, equality keeps the distribution, too, and the very tokens.)

How many tokens are guessed follows from what is measured on the way: how often guesses with as much to be said for them
were right, and what a row more costs a step of this size (`guessing.py`). Where nothing repeats, nothing is guessed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from enginecore.config import EngineConfig
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineRequest, TokenLogprobs
from enginecore.runner.guessing import NgramProposer, Odds, Proposer, StepCost, worth_guessing

#: So many rows may have guesses among them, however few sequences run.
FEW_ROWS = 64

#: Steps in a row whose texts gave no guess worth making, after which only every REST-th is looked at.
PATIENCE = 8
REST = 4

Entry = TypeVar("Entry")


class Speculation:
    """Guesses for the slots of a runner's batch, up to `most` tokens each, in steps of up to `most_rows` rows."""

    def __init__(self, proposer: Proposer, most: int, most_rows: int) -> None:
        self._proposer = proposer
        self._most, self._most_rows = most, most_rows
        #: Of sampled answers (0) and of greedy ones (1), which repeat themselves more.
        self._odds = Odds(2)
        self._cost = StepCost()
        #: By slot that may be guessed for: which of the odds' kinds.
        self._kind: dict[int, int] = {}
        #: By slot, what there was to be said for its latest guesses.
        self._evidence: dict[int, int] = {}
        #: Steps since the latest guess.
        self._fruitless = 0

    def enter(self, slot: int, request: EngineRequest) -> None:
        """A sequence takes a slot."""
        self._kind.pop(slot, None)
        if not request.is_followed:
            self._kind[slot] = int(request.params.temperature == 0)

    def look_on(self, result: StepResult, plan: StepPlan, tokens_SL: np.ndarray, seconds: float) -> StepResult:
        """A step's result with guesses for the next one. `tokens_SL` hold what was sampled, too; the step took
        `seconds`."""
        slots = plan.slots_N.tolist()
        self._odds.fade()
        for row, ids in plan.guesses.items():
            kind, evidence = self._kind.get(slots[row]), self._evidence.get(slots[row])
            if kind is not None and evidence is not None:
                self._odds.checked(kind, evidence, len(result.accepted.get(row, ())), len(ids))
        if plan.num_tokens == len(slots) + sum(map(len, plan.guesses.values())):
            self._cost.add(plan.num_tokens, seconds)
        rows = [row for row in np.flatnonzero(plan.samples_N).tolist()
                if slots[row] in self._kind and row not in result.errors]  # fmt: skip
        self._fruitless += 1
        rests = self._fruitless > PATIENCE and self._fruitless % REST
        if not rows or rests or len(slots) >= self._most_rows:
            return result
        guesses = self._guess(result, plan, tokens_SL, rows)
        if guesses:
            self._fruitless = 0
        return replace(result, guesses=guesses)

    def _guess(
        self, result: StepResult, plan: StepPlan, tokens_SL: np.ndarray, rows: list[int]
    ) -> dict[int, list[int]]:
        slots_N = plan.slots_N[rows]
        right_N = np.array([len(result.accepted.get(row, ())) for row in rows], np.int64)
        lengths_N = plan.ends_N[rows] + right_N + 1
        proposal = self._proposer.propose(tokens_SL, slots_N, lengths_N, self._most)
        if not proposal.evidence_N.any():
            return {}
        kinds_N = np.array([self._kind[slot] for slot in slots_N.tolist()])
        chances_NK = self._odds.chances(kinds_N, proposal.evidence_N, self._most)
        count = len(plan.slots_N)
        counts = worth_guessing(chances_NK, count, self._cost.relative_slope(count), self._most_rows - count)
        guesses = {}
        for i in np.flatnonzero(counts).tolist():
            guesses[rows[i]] = proposal.ids_NK[i, : counts[i]].tolist()
            self._evidence[int(slots_N[i])] = int(proposal.evidence_N[i])
        return guesses


def speculation_of(config: EngineConfig) -> Speculation | None:
    """What the configuration asks for."""
    if config.speculation == "off":
        return None
    return Speculation(NgramProposer(), config.num_speculative_tokens, most_rows(config.max_num_seqs))


def most_rows(max_num_seqs: int) -> int:
    """Rows of the largest step that is given guesses."""
    return max(max_num_seqs, FEW_ROWS)


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
