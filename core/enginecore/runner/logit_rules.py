"""Changes to one sequence's logits before sampling, in vLLM's order: allowed ids, bad words, minimum length, bias,
penalties. Only sequences that asked for any of these pay for it.

Shape suffix: V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from enginecore.request import EngineRequest
from enginecore.runner.thinking import ThinkingBudget

_BANNED = float("-inf")


class LogitRules:
    """Built when a sequence enters a slot (again after preemption: everything follows from its tokens)."""

    def __init__(self, request: EngineRequest, token_ids: list[int], num_prompt: int, vocab: int, device: torch.device):
        params = request.params
        self._params = params
        self._num_prompt = num_prompt
        self._not_allowed_V: torch.Tensor | None = None
        if params.allowed_token_ids:
            self._not_allowed_V = torch.ones(vocab, dtype=torch.bool, device=device)
            self._not_allowed_V[params.allowed_token_ids] = False
        self._bad_words = [words for words in request.bad_words_ids if words]
        stops = set(params.stop_token_ids or ())
        stops.update(request.eos_token_ids)
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64, device=device)
        bias = params.logit_bias or {}
        self._bias_ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._thinking = None if request.thinking is None else ThinkingBudget(request.thinking, num_prompt)
        self._penalised = needs_penalties(request)
        if self._penalised:
            self._prompt_V = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._prompt_V[token_ids[:num_prompt]] = True
            output = torch.tensor(token_ids[num_prompt:], dtype=torch.int64, device=device)
            self._counts_V = torch.bincount(output, minlength=vocab).to(torch.float32)

    def apply(self, logits_V: torch.Tensor, tokens_L: np.ndarray, *, must_end: bool = False) -> None:
        """Change `logits_V` in place; `tokens_L` are all tokens of the sequence so far. An answer that `must_end` (its
        grammar is complete) may do so before min_tokens."""
        num_output = len(tokens_L) - self._num_prompt
        if self._not_allowed_V is not None:
            logits_V[self._not_allowed_V] = _BANNED
        for words in self._bad_words:
            head = words[:-1]
            if not head or (num_output >= len(head) and tokens_L[-len(head) :].tolist() == head):
                logits_V[words[-1]] = _BANNED
        if num_output < self._params.min_tokens and not must_end:
            logits_V[self._stops] = _BANNED
        if len(self._bias_ids):
            logits_V[self._bias_ids] += self._bias
        if self._penalised:
            self._penalise(logits_V)
        token = self._thinking.forced(tokens_L) if self._thinking is not None else None
        if token is not None:
            kept = logits_V[token].clamp(min=-1e9)
            logits_V.fill_(_BANNED)
            logits_V[token] = kept

    def _penalise(self, logits_V: torch.Tensor) -> None:
        """repetition_penalty counts prompt and output tokens, the other two output tokens only."""
        params, seen_V = self._params, self._counts_V > 0
        if params.repetition_penalty != 1.0:
            either_V = seen_V | self._prompt_V
            factor = params.repetition_penalty
            scaled_V = torch.where(logits_V > 0, logits_V / factor, logits_V * factor)
            logits_V.copy_(torch.where(either_V, scaled_V, logits_V))
        if params.frequency_penalty or params.presence_penalty:
            logits_V -= params.frequency_penalty * self._counts_V + params.presence_penalty * seen_V

    def chosen(self, token: int) -> None:
        """Count a sampled token."""
        if self._penalised:
            self._counts_V[token] += 1


def needs_penalties(request: EngineRequest) -> bool:
    params = request.params
    return params.repetition_penalty != 1.0 or bool(params.frequency_penalty) or bool(params.presence_penalty)


def needs_rules(request: EngineRequest) -> bool:
    params = request.params
    return bool(
        params.allowed_token_ids
        or request.bad_words_ids
        or params.min_tokens
        or params.logit_bias
        or request.thinking is not None
        or needs_penalties(request)
    )
