"""Logit rules against a numpy reference, alone and in any order within a batch (field case F19)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from enginecore.ops.dispatch import Ops
from enginecore.request import EngineRequest, SamplingParams
from enginecore.runner.logit_rules import LogitRules, needs_rules
from enginecore.runner.sampler import Sampler
from enginecore.scheduler import NewRequest

VOCAB = 24
CPU = torch.device("cpu")


def request(prompt: list[int], **fields: Any) -> EngineRequest:
    eos, bad = fields.pop("eos", []), fields.pop("bad_words_ids", [])
    return EngineRequest("r", prompt, SamplingParams(temperature=0, **fields), 16, eos_token_ids=eos, bad_words_ids=bad)


def applied(req: EngineRequest, output: list[int], logits: np.ndarray) -> np.ndarray:
    tokens = [*req.prompt_token_ids, *output]
    row = torch.from_numpy(logits.copy())
    LogitRules(req, tokens, len(req.prompt_token_ids), VOCAB, CPU).apply(row, np.array(tokens))
    changed: np.ndarray = row.numpy()
    return changed


def reference(req: EngineRequest, output: list[int], logits: np.ndarray) -> np.ndarray:
    """The rules in numpy: allowed ids, bad words, minimum length, bias, penalties."""
    p, x = req.params, logits.astype(np.float64)
    if p.allowed_token_ids:
        x[[i for i in range(VOCAB) if i not in p.allowed_token_ids]] = -np.inf
    for *head, last in req.bad_words_ids:
        if len(output) >= len(head) and output[len(output) - len(head) :] == head:
            x[last] = -np.inf
    if len(output) < p.min_tokens:
        x[[*(p.stop_token_ids or []), *req.eos_token_ids]] = -np.inf
    for i, bias in (p.logit_bias or {}).items():
        x[i] += bias
    for i in {*req.prompt_token_ids, *output}:
        x[i] = x[i] / p.repetition_penalty if x[i] > 0 else x[i] * p.repetition_penalty
    for i in set(output):
        x[i] -= p.frequency_penalty * output.count(i) + p.presence_penalty
    return x


RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 2.0},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 1.25},
    "all penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "bias": {"logit_bias": {3: -100.0, 7: 100.0, 9: 0.5}},
    "allowed": {"allowed_token_ids": [1, 2, 5]},
    "one bad word": {"bad_words_ids": [[4], [6]]},
    "bad words of several tokens": {"bad_words_ids": [[1, 2], [2, 2, 3], [4]]},
    "min tokens": {"min_tokens": 3, "stop_token_ids": [5, 6], "eos": [7]},
    "min tokens against bias": {"min_tokens": 3, "eos": [7], "logit_bias": {7: 100.0}},
    "everything": {
        "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25, "logit_bias": {1: 3.0, 2: -1.0},
        "allowed_token_ids": list(range(20)), "bad_words_ids": [[1, 2], [4]], "min_tokens": 2, "eos": [0],
    },
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_against_numpy(rule: str) -> None:
    rng = np.random.default_rng(0)
    for trial in range(40):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
        output = rng.integers(1, 4 if trial % 2 else VOCAB, rng.integers(0, 7)).tolist()
        logits = rng.normal(0, 3, VOCAB).astype(np.float32)
        req = request(prompt, **RULES[rule])
        assert needs_rules(req)
        np.testing.assert_allclose(
            applied(req, output, logits),
            reference(req, output, logits),
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"{prompt} {output}",
        )


def test_a_plain_request_needs_none() -> None:
    plain = request([1], top_p=0.5, top_k=3, min_p=0.1, stop_token_ids=[1], logprobs=3, eos=[2])
    assert not needs_rules(plain)


def test_what_counts_where() -> None:
    """repetition: prompt and output; presence and frequency: output only, frequency once for each time."""
    logits = np.full(VOCAB, 2.0, np.float32)
    got = applied(request([1, 1], repetition_penalty=2.0), [3], logits)
    assert got[[1, 3, 5]].tolist() == [1.0, 1.0, 2.0]
    got = applied(request([1, 1], presence_penalty=0.5), [3, 3], logits)
    assert got[[1, 3, 5]].tolist() == [2.0, 1.5, 2.0]
    got = applied(request([1, 1], frequency_penalty=0.5), [3, 3], logits)
    assert got[[1, 3, 5]].tolist() == [2.0, 1.0, 2.0]


def test_bad_words_look_at_the_output_only() -> None:
    req = request([1], bad_words_ids=[[1, 2]])
    logits = np.zeros(VOCAB, np.float32)
    assert np.isfinite(applied(req, [], logits)).all(), "the 1 belongs to the prompt"
    assert applied(req, [1], logits)[2] == -np.inf
    assert np.isfinite(applied(req, [1, 1, 3], logits)).all()


def test_counts_follow_the_tokens_chosen() -> None:
    """Step by step, and built anew from the tokens (as after preemption), the penalties are the same."""
    req = request([1, 2], frequency_penalty=1.0, repetition_penalty=1.2)
    rules = LogitRules(req, [1, 2], 2, VOCAB, CPU)
    tokens, logits = [1, 2], np.linspace(-2, 2, VOCAB, dtype=np.float32)
    for token in (5, 5, 2, 9):
        rules.chosen(token)
        tokens.append(token)
        row = torch.from_numpy(logits.copy())
        rules.apply(row, np.array(tokens))
        np.testing.assert_array_equal(row.numpy(), applied(req, tokens[2:], logits))


MIX: list[dict[str, Any]] = [
    {}, {"repetition_penalty": 1.5}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0},
    {"logit_bias": {3: 5.0}}, {"min_p": 0.5}, {"top_k": 1}, {"allowed_token_ids": [2, 4, 6]},
]  # fmt: skip


def decode(order: list[int], steps: int = 12) -> dict[int, list[int]]:
    """The requests of MIX, decoded together in this order on logits that depend on each one's own tokens only."""
    sampler = Sampler(len(MIX), VOCAB, CPU, Ops(None))
    tokens = np.zeros((len(MIX), 64), np.int64)
    prompts = [[i, 2, 3, 3, 3] for i in range(len(MIX))]
    for slot, i in enumerate(order):
        req = EngineRequest(str(i), prompts[i], SamplingParams(temperature=0, **MIX[i]), 16)
        sampler.enter(NewRequest(slot, req, prompts[i], 5, 7, None))
        tokens[slot, :5] = prompts[i]
    for step in range(steps):
        length = 5 + step
        rows = [np.random.default_rng([i, *tokens[slot, :length]]).normal(0, 1, VOCAB) for slot, i in enumerate(order)]
        logits = torch.from_numpy(np.array(rows, np.float32))
        lengths, num_prompt = np.full(len(order), length), np.full(len(order), 5)
        chosen, _, errors = sampler.sample(logits, list(range(len(order))), lengths, num_prompt, tokens)
        assert not errors
        tokens[: len(order), length] = chosen
    return {i: tokens[slot, 5 : 5 + steps].tolist() for slot, i in enumerate(order)}


def test_rows_do_not_leak_into_each_other() -> None:
    solo = {i: decode([i])[i] for i in range(len(MIX))}
    assert len({tuple(tokens) for tokens in solo.values()}) > 5, "the rules do something"
    for seed in range(5):
        order = list(range(len(MIX)))
        random.Random(seed).shuffle(order)
        assert decode(order) == solo
