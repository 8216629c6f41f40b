"""From logits to tokens and log-probabilities.

Log-probabilities are the raw log-softmax of the model's logits, before rules and temperature. A row's token depends on
its own logits, parameters, seed and output position only, never on the rest of the batch.

Shape suffixes: S slots, R logits rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from enginecore.ops.dispatch import Ops
from enginecore.plan import NewRequest
from enginecore.randomness import uniforms
from enginecore.request import SamplingParams, TokenLogprobs
from enginecore.runner.grammar import Grammars
from enginecore.runner.logit_rules import LogitRules, needs_rules
from enginecore.runner.transfers import Fetched, Transfers

NOT_NUMBERS = "the model returned logits that are not finite numbers"
NOTHING_LEFT = "no token is left to choose from: the request's bans exclude them all"


@dataclass(frozen=True)
class Draw:
    """A step's choice, on its way. `ids_R` are the tokens on the device (0 where there is nothing to choose from),
    `fetched` brings them (-1 there), then the figures of the rows that want log-probabilities. Dicts are keyed by row.
    """

    ids_R: torch.Tensor
    fetched: Fetched
    rows_with_logprobs: list[int]
    counts: list[int]
    rules: dict[int, LogitRules]
    ruled: list[bool]
    problems: dict[int, str]
    #: Of the rows whether their logits are broken, where `fetched` brings it; else the logits to look at.
    logits_RV: torch.Tensor | None


class Sampler:
    """Keeps each slot's sampling parameters as arrays, and the logit rules of the slots that have any."""

    def __init__(
        self, max_num_seqs: int, vocab_size: int, device: torch.device, ops: Ops, grammars: Grammars | None = None
    ) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._device = device
        self._ops = ops
        self._temperature_S = np.zeros(max_num_seqs, np.float32)
        self._top_p_S = np.ones(max_num_seqs, np.float32)
        self._min_p_S = np.zeros(max_num_seqs, np.float32)
        self._top_k_S = np.zeros(max_num_seqs, np.int64)
        self._seed_S = np.zeros(max_num_seqs, np.uint64)
        self._logprobs_S = np.full(max_num_seqs, -1, np.int64)
        self._rules: dict[int, LogitRules] = {}
        #: How arrays come to the device, and results back.
        self.transfers = Transfers(device)
        #: The parameters of rows that are all greedy: nothing else matters to them, and they are the same each time.
        self._greedy = self._greedy_columns(max_num_seqs)

    def enter(self, new: NewRequest) -> None:
        params, slot = new.request.params, new.slot
        greedy = params.greedy or params.top_k == 1
        self._temperature_S[slot] = 0.0 if greedy else params.temperature
        self._top_p_S[slot] = params.top_p
        self._min_p_S[slot] = params.min_p
        self._top_k_S[slot] = max(params.top_k, 0)
        self._seed_S[slot] = new.seed % 2**64
        self._logprobs_S[slot] = -1 if params.logprobs is None else params.logprobs
        self._rules.pop(slot, None)
        if needs_rules(new.request):
            self._rules[slot] = LogitRules(new.request, new.token_ids, new.num_prompt, self._vocab_size, self._device)

    def sample(
        self,
        logits_RV: torch.Tensor,
        slots: list[int],
        lengths: np.ndarray,
        num_prompt: np.ndarray,
        tokens_SL: np.ndarray,
    ) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """Tokens, log-probabilities and errors of the rows; the dicts are keyed by index into `slots`.

        `lengths` are the tokens each sequence has so far. May overwrite `logits_RV`.
        """
        return self.settle(self.draw(logits_RV, slots, lengths, num_prompt, tokens_SL))

    def draw(
        self,
        logits_RV: torch.Tensor,
        slots: list[int],
        lengths: np.ndarray,
        num_prompt: np.ndarray,
        tokens_SL: np.ndarray,
    ) -> Draw:
        """Choose, as `sample` does, without waiting for what was chosen where transfers are asynchronous. In that case
        the logits are not needed any more afterwards, else until `settle`."""
        wanted = self._logprobs_S[slots]
        rows_with_logprobs = np.flatnonzero(wanted >= 0)
        logprobs_QV, rows_Q = None, None
        if len(rows_with_logprobs):
            [rows_Q] = self.transfers.send(rows_with_logprobs)
            logprobs_QV = torch.log_softmax(logits_RV[rows_Q], dim=-1)
        ending: frozenset[int] = frozenset()
        problems: dict[int, str] = {}
        if self._grammars:
            ending, problems = self._grammars.apply(logits_RV, slots)
        rules = {row: self._rules[slot] for row, slot in enumerate(slots) if slot in self._rules} if self._rules else {}
        for row, own in rules.items():
            own.apply(logits_RV[row], tokens_SL[slots[row], : lengths[row]], must_end=row in ending)
        raw_R = self._choose(logits_RV, slots, lengths - num_prompt)
        ids_R = raw_R.clamp(min=0)
        brought = [raw_R]
        counts: list[int] = wanted[rows_with_logprobs].tolist()
        if logprobs_QV is not None:
            brought += _figures(logprobs_QV, ids_R[rows_Q], max(counts))
        ruled = [self._is_ruled(slot) for slot in slots] if self._rules or self._grammars else [False] * len(slots)
        asynchronous = self.transfers.asynchronous
        if asynchronous and any(ruled):
            brought.append(_are_broken(logits_RV))
        return Draw(
            ids_R,
            self.transfers.fetch(*brought),
            rows_with_logprobs.tolist(),
            counts,
            rules,
            ruled,
            problems,
            None if asynchronous else logits_RV,
        )

    def settle(self, draw: Draw) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
        """What was chosen: tokens, log-probabilities and errors of the rows."""
        raw_R, *rest = draw.fetched()
        token_ids: list[int] = raw_R.tolist()
        errors: dict[int, str] = {}
        if min(token_ids) < 0:
            broken_R = rest[-1] if draw.logits_RV is None and any(draw.ruled) else None
            for row, token in enumerate(token_ids):
                if token < 0:
                    errors[row] = _explain(row, draw, broken_R)
            token_ids = [max(token, 0) for token in token_ids]
        errors |= draw.problems
        for row, rules in draw.rules.items():
            rules.chosen(token_ids[row])
        rows = draw.rows_with_logprobs
        entries = _entries(rest[:4], [token_ids[row] for row in rows], draw.counts) if rows else []
        return token_ids, dict(zip(rows, entries, strict=True)), errors

    def forced(
        self, slots: list[int], lengths: np.ndarray, token_ids: list[int], errors: dict[int, str]
    ) -> dict[int, list[int]]:
        """The tokens that must come after the chosen ones; see `Grammars.advance`."""
        assert self._grammars is not None
        forced = self._grammars.advance(slots, lengths, token_ids, errors)
        for row, tokens in forced.items():
            rules = self._rules.get(slots[row])
            if rules is not None:
                for token in tokens:
                    rules.chosen(token)
        return forced

    def _is_ruled(self, slot: int) -> bool:
        return slot in self._rules or (self._grammars is not None and slot in self._grammars)

    def _choose(self, logits_RV: torch.Tensor, slots: list[int], positions: np.ndarray) -> torch.Tensor:
        """The id of each row, -1 where there is nothing to choose from."""
        temperature_R = self._temperature_S[slots]
        if temperature_R.any():
            uniform_R = uniforms(self._seed_S[slots], positions.astype(np.uint64))
            arrays = (temperature_R, self._top_k_S[slots], self._top_p_S[slots], self._min_p_S[slots], uniform_R)
            sent = self.transfers.send(*arrays)
        else:
            if len(slots) > len(self._greedy[0]):  # a row for each guess, too
                self._greedy = self._greedy_columns(2 * len(slots))
            sent = [column[: len(slots)] for column in self._greedy]
        chosen: torch.Tensor = self._ops.sample(logits_RV, *sent)
        return chosen

    def _greedy_columns(self, rows: int) -> list[torch.Tensor]:
        """Temperature, top-k, top-p, min-p and random numbers."""
        kinds = ((0, torch.float32), (0, torch.int64), (1, torch.float32), (0, torch.float32), (0, torch.float64))
        return [torch.full((rows,), value, dtype=dtype, device=self._device) for value, dtype in kinds]

    def prompt_logprobs(
        self, logits_PV: torch.Tensor, params: SamplingParams, targets: list[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens: row i of `logits_PV` predicts `targets[i]`."""
        logprobs_PV = torch.log_softmax(logits_PV, dim=-1)
        return top_logprobs(logprobs_PV, targets, [params.prompt_logprobs or 0] * len(targets))


def top_logprobs(logprobs_QV: torch.Tensor, chosen: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row the chosen token, then its `counts` best, best first."""
    chosen_Q = torch.tensor(chosen, device=logprobs_QV.device)
    return _entries(_figures(logprobs_QV, chosen_Q, max(counts)), chosen, counts)


def _figures(logprobs_QV: torch.Tensor, chosen_Q: torch.Tensor, most: int) -> list[torch.Tensor]:
    """On the device: the chosen tokens' log-probabilities and ranks [Q], the `most` best ids and theirs [Q, most]."""
    value_Q1 = logprobs_QV.gather(1, chosen_Q.unsqueeze(1))
    rank_Q = (logprobs_QV > value_Q1).sum(dim=1) + 1
    best = logprobs_QV.topk(min(most, logprobs_QV.shape[1]), dim=1)
    return [value_Q1.squeeze(1), rank_Q, best.indices, best.values]


def _entries(figures: list[torch.Tensor], chosen: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """From `_figures`, on the host."""
    values, ranks, best_ids, best_values = (figure.tolist() for figure in figures)
    return [
        TokenLogprobs([chosen[i], *best_ids[i][: counts[i]]], [values[i], *best_values[i][: counts[i]]], ranks[i])
        for i in range(len(chosen))
    ]


def _are_broken(logits_RV: torch.Tensor) -> torch.Tensor:
    return (torch.isnan(logits_RV) | torch.isposinf(logits_RV)).any(dim=-1)


def _explain(row: int, draw: Draw, broken_R: torch.Tensor | None) -> str:
    """Why a row has no token. Only rules can ban them all; without any, the model's logits were at fault, whatever an
    op has left of them."""
    if not draw.ruled[row]:
        return NOT_NUMBERS
    if broken_R is None:
        assert draw.logits_RV is not None
        return NOT_NUMBERS if bool(_are_broken(draw.logits_RV[row])) else NOTHING_LEFT
    return NOT_NUMBERS if bool(broken_R[row]) else NOTHING_LEFT
