"""From logits to tokens and log-probabilities.

Log-probabilities are the raw log-softmax of the model's logits, before rules and temperature. A row's token depends on
its own logits, parameters, seed and output position only, never on the rest of the batch.

Shape suffixes: S slots, R logits rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from enginecore.ops.dispatch import Ops
from enginecore.plan import NewRequest
from enginecore.randomness import uniforms
from enginecore.request import SamplingParams, TokenLogprobs
from enginecore.runner.grammar import Grammars
from enginecore.runner.logit_rules import LogitRules, needs_rules

NOT_NUMBERS = "the model returned logits that are not finite numbers"
NOTHING_LEFT = "no token is left to choose from: the request's bans exclude them all"


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
        wanted = self._logprobs_S[slots]
        rows_with_logprobs = np.flatnonzero(wanted >= 0)
        logprobs_QV = None
        if len(rows_with_logprobs):
            logprobs_QV = torch.log_softmax(logits_RV[torch.from_numpy(rows_with_logprobs).to(self._device)], dim=-1)
        ending: frozenset[int] = frozenset()
        problems: dict[int, str] = {}
        if self._grammars:
            ending, problems = self._grammars.apply(logits_RV, slots)
        if self._rules:
            for row, slot in enumerate(slots):
                rules = self._rules.get(slot)
                if rules is not None:
                    rules.apply(logits_RV[row], tokens_SL[slot, : lengths[row]], must_end=row in ending)
        token_ids = self._choose(logits_RV, slots, lengths - num_prompt).tolist()
        errors = {}
        if min(token_ids) < 0:
            errors = _explain(token_ids, logits_RV, [self._is_ruled(slot) for slot in slots])
            token_ids = [max(token, 0) for token in token_ids]
        errors |= problems
        if self._rules:
            for slot, token in zip(slots, token_ids, strict=True):
                if slot in self._rules:
                    self._rules[slot].chosen(token)
        logprobs: dict[int, TokenLogprobs] = {}
        if logprobs_QV is not None:
            rows = rows_with_logprobs.tolist()
            chosen = [token_ids[row] for row in rows]
            entries = top_logprobs(logprobs_QV, chosen, wanted[rows_with_logprobs].tolist())
            logprobs = dict(zip(rows, entries, strict=True))
        return token_ids, logprobs, errors

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
        else:
            uniform_R = np.zeros(len(slots))
        arrays = (temperature_R, self._top_k_S[slots], self._top_p_S[slots], self._min_p_S[slots], uniform_R)
        chosen: torch.Tensor = self._ops.sample(logits_RV, *(torch.from_numpy(a).to(self._device) for a in arrays))
        return chosen

    def prompt_logprobs(
        self, logits_PV: torch.Tensor, params: SamplingParams, targets: list[int]
    ) -> list[TokenLogprobs]:
        """Log-probabilities of prompt tokens: row i of `logits_PV` predicts `targets[i]`."""
        logprobs_PV = torch.log_softmax(logits_PV, dim=-1)
        return top_logprobs(logprobs_PV, targets, [params.prompt_logprobs or 0] * len(targets))


def top_logprobs(logprobs_QV: torch.Tensor, chosen: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """For each row the chosen token, then its `counts` best, best first."""
    chosen_Q1 = torch.tensor(chosen, device=logprobs_QV.device).unsqueeze(1)
    value_Q1 = logprobs_QV.gather(1, chosen_Q1)
    rank_Q = (logprobs_QV > value_Q1).sum(dim=1) + 1
    most = min(max(counts), logprobs_QV.shape[1])
    best = logprobs_QV.topk(most, dim=1) if most else None
    values, ranks = value_Q1.squeeze(1).tolist(), rank_Q.tolist()
    best_ids = best.indices.tolist() if best is not None else [[]] * len(chosen)
    best_values = best.values.tolist() if best is not None else [[]] * len(chosen)
    return [
        TokenLogprobs([chosen[i], *best_ids[i][: counts[i]]], [values[i], *best_values[i][: counts[i]]], ranks[i])
        for i in range(len(chosen))
    ]


def _explain(token_ids: list[int], logits_RV: torch.Tensor, has_rules: list[bool]) -> dict[int, str]:
    """Why rows have no token. Only rules can ban them all; without any, the model's logits were at fault, whatever an
    op has left of them."""
    errors = {}
    for row, token in enumerate(token_ids):
        if token < 0:
            logits_V = logits_RV[row]
            broken = bool((torch.isnan(logits_V) | torch.isposinf(logits_V)).any())
            errors[row] = NOT_NUMBERS if broken or not has_rules[row] else NOTHING_LEFT
    return errors
