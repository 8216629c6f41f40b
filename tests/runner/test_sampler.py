"""The sampler: what is drawn, from what, with whose seed; log-probabilities; rows that cannot be sampled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from enginecore.ops.dispatch import Ops
from enginecore.request import EngineRequest, SamplingParams
from enginecore.runner.sampler import Sampler, top_logprobs
from enginecore.scheduler import NewRequest

VOCAB = 30
CPU = torch.device("cpu")
Params = dict[str, Any]


class OverwritingOps:
    """The reference, and then what the schema allows an implementation to do: the logits are gone."""

    def sample(self, logits_RV: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        ids_R = Ops(None).sample(logits_RV.clone(), *arguments)
        logits_RV.fill_(0.5)
        return ids_R


def sampler(rows: list[Params], *, ops: Any = None, prompt: int = 3) -> Sampler:
    """One slot a row; `seed` in a row is the request's."""
    made = Sampler(len(rows), VOCAB, CPU, ops or Ops(None))
    for slot, row in enumerate(rows):
        params = {**row}
        seed = params.pop("seed", 0)
        req = EngineRequest(str(slot), [1] * prompt, SamplingParams(**params), 99)
        made.enter(NewRequest(slot, req, req.prompt_token_ids, prompt, seed, None))
    return made


def sample(
    rows: list[Params], logits: torch.Tensor, *, position: int = 0, slots: list[int] | None = None, ops: Any = None
) -> tuple[list[int], dict[int, Any], dict[int, str]]:
    slots = list(range(len(rows))) if slots is None else slots
    n = len(slots)
    tokens = np.ones((len(rows), 1000), np.int64)
    return sampler(rows, ops=ops).sample(logits.clone(), slots, np.full(n, 3 + position), np.full(n, 3), tokens)


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draws(params: Params, logits_V: torch.Tensor, count: int) -> np.ndarray:
    """How often each token is drawn, over `count` seeds."""
    tokens, _, errors = sample([{**params, "seed": seed} for seed in range(count)], logits_V.expand(count, -1))
    assert not errors
    return np.bincount(tokens, minlength=VOCAB)


# ---- what is drawn -----------------------------------------------------------------------------------------------


def test_greedy_is_top_k_1_is_a_tiny_temperature() -> None:
    logits = some_logits(20)
    best = logits.argmax(dim=1).tolist()
    tiny: list[Params] = [{"temperature": 10.0**-n} for n in (3, 6, 10)]
    same: list[Params] = [{"temperature": 0}, {"top_k": 1, "temperature": 5.0}]
    for params in same + tiny:
        assert sample([params] * 20, logits)[0] == best
    mixed: list[Params] = [{"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i} for i in range(20)]
    assert sample(mixed, logits)[0][1::2] == best[1::2], "beside rows that are drawn"


def test_of_equal_logits_the_first_is_the_greedy_choice() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [7, 3, 20]] = 1.0
    assert sample([{"temperature": 0}, {"temperature": 0}], logits)[0] == [3, 3]
    assert sample([{"temperature": 0}, {"temperature": 1.0}], logits)[0][0] == 3


def probabilities(logits_V: torch.Tensor, params: Params) -> np.ndarray:
    """The distribution that the parameters ask for, by the schema's words."""
    p = torch.softmax(logits_V.double() / params.get("temperature", 1.0), dim=0).numpy()
    order = np.argsort(-p, kind="stable")
    kept = list(order[: params["top_k"]]) if params.get("top_k", 0) > 0 else list(order)
    total, mass, nucleus = p[kept].sum(), 0.0, []
    for i in kept:
        if mass < params.get("top_p", 1.0) * total:
            nucleus.append(i)
        mass += p[i]
    kept = [i for i in nucleus if p[i] >= params.get("min_p", 0.0) * p[order[0]]]
    q = np.zeros(VOCAB)
    q[kept] = p[kept] / p[kept].sum()
    return q


FILTERS: list[Params] = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5}, {"top_k": 1000}, {"top_p": 1e-6},
]  # fmt: skip


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_distribution(params: Params) -> None:
    """Chi-square over 8,000 fixed seeds, with a bound that a right sampler meets for nearly any choice of seeds."""
    logits_V, count = some_logits(1)[0], 8000
    expected = probabilities(logits_V, params) * count
    observed = draws(params, logits_V, count)
    assert observed[expected == 0].sum() == 0, "a token that was filtered out is drawn"
    common = expected >= 5
    statistic = ((observed - expected)[common] ** 2 / expected[common]).sum()
    degrees = max(int(common.sum()) - 1, 1)
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


def test_positions_draw_independently() -> None:
    logits = torch.zeros(1, VOCAB)
    tokens = [sample([{"seed": 5}], logits, position=position)[0][0] for position in range(600)]
    counts = np.bincount(tokens, minlength=VOCAB)
    assert ((counts - 20) ** 2 / 20).sum() < 29 + 5 * math.sqrt(58)
    pairs = {(a, b) for a, b in itertools.pairwise(tokens)}
    assert len(pairs) > 350, "a following token depends on the one before"


def test_a_seed_gives_the_same_whatever_else_runs() -> None:
    logits = some_logits(6)
    rows: list[Params] = [{"seed": i, "temperature": 0.5 + i / 4, "top_p": 1 - i / 20} for i in range(6)]
    together = sample(rows, logits, position=4)[0]
    for i in range(6):
        assert sample(rows, logits[i : i + 1], position=4, slots=[i])[0] == [together[i]]
    order = [3, 0, 5, 1, 4, 2]
    assert sample(rows, logits[order], position=4, slots=order)[0] == [together[i] for i in order]
    others = [{**row, "seed": row["seed"] + 100} if i != 2 else row for i, row in enumerate(rows)]
    assert sample(others, logits, position=4)[0][2] == together[2]


def test_seeds_may_be_any_64_bit_number() -> None:
    logits = some_logits(1)
    for seed in (0, -1, -(2**63), 2**63 - 1, 2**64 - 1):
        assert sample([{"seed": seed}], logits) == sample([{"seed": seed}], logits)


def test_a_slot_keeps_nothing_of_its_last_owner() -> None:
    made = sampler([{"top_k": 1, "logprobs": 2, "logit_bias": {3: 100.0}, "seed": 9}])
    req = EngineRequest("next", [1, 1, 1], SamplingParams(), 99)
    made.enter(NewRequest(0, req, req.prompt_token_ids, 3, 4, None))
    logits, at = some_logits(1), (np.array([3]), np.array([3]), np.ones((1, 9), np.int64))
    assert made.sample(logits.clone(), [0], *at) == sample([{"seed": 4}], logits)


# ---- log-probabilities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, VOCAB + 7])
def test_logprobs_are_the_raw_log_softmax(k: int) -> None:
    """Raw: before temperature, filters, bias and bans."""
    logits = some_logits(4)
    rows: list[Params] = [
        {"temperature": 0, "logprobs": k}, {"temperature": 0.3, "logprobs": k, "seed": 1},
        {"temperature": 0, "logprobs": k, "logit_bias": {11: 100.0}}, {"temperature": 2.0, "seed": 3},
    ]  # fmt: skip
    tokens, logprobs, errors = sample(rows, logits)
    assert sorted(logprobs) == [0, 1, 2] and not errors and tokens[2] == 11
    want = torch.log_softmax(logits, dim=-1)
    for row, entry in logprobs.items():
        best = want[row].topk(min(k, VOCAB))
        assert entry.token_ids == [tokens[row], *best.indices.tolist()]
        np.testing.assert_allclose(entry.logprobs, [want[row, tokens[row]], *best.values], rtol=1e-6, atol=1e-6)
        assert entry.rank == 1 + int((want[row] > want[row, tokens[row]]).sum())
    assert logprobs[0].rank == 1 and logprobs[2].rank > 5, "the forced token is far outside the top"


def test_each_row_gets_as_many_as_it_asked_for() -> None:
    rows: list[Params] = [{"temperature": 0, "logprobs": k} for k in (3, 0, 7)]
    _, logprobs, _ = sample(rows, some_logits(3))
    assert [len(logprobs[i].token_ids) for i in range(3)] == [4, 1, 8]


def test_prompt_logprobs() -> None:
    logits = some_logits(3)
    made = sampler([{}])
    entries = made.prompt_logprobs(logits, SamplingParams(prompt_logprobs=2), [4, 0, 29])
    want = torch.log_softmax(logits, dim=-1)
    for row, target in enumerate((4, 0, 29)):
        assert entries[row].token_ids == [target, *want[row].topk(2).indices.tolist()]
        assert entries[row].logprobs[0] == pytest.approx(float(want[row, target]), abs=1e-6)
        assert entries[row].rank == 1 + int((want[row] > want[row, target]).sum())
    bare = made.prompt_logprobs(logits, SamplingParams(prompt_logprobs=0), [4, 0, 29])
    assert [entry.token_ids for entry in bare] == [[4], [0], [29]]


def test_rank_of_equal_values_is_the_best_of_them() -> None:
    entry = top_logprobs(torch.tensor([[-1.0, -1.0, -3.0, -2.0]]), [1], [0])[0]
    assert entry.rank == 1
    assert top_logprobs(torch.tensor([[-1.0, -1.0, -3.0, -2.0]]), [3], [0])[0].rank == 3


# ---- rows that cannot be sampled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", [None, OverwritingOps()], ids=["reference", "overwriting"])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "top_p": 0.5}]
)
@pytest.mark.parametrize("poison", ["one nan", "all nan", "inf", "nan at 0"])
def test_logits_that_are_not_finite_fail_their_own_row_only(poison: str, params: Params, ops: Any) -> None:
    logits = some_logits(3)
    where = {"one nan": 17, "all nan": slice(None), "inf": 5, "nan at 0": 0}[poison]
    logits[1, where] = math.inf if poison == "inf" else math.nan
    rows = [params, {**params, "logprobs": 2}, {"temperature": 0}]
    tokens, _, errors = sample(rows, logits, ops=ops)
    assert list(errors) == [1] and "not finite" in errors[1]
    assert all(0 <= token < VOCAB for token in tokens) and tokens[2] == int(logits[2].argmax())


@pytest.mark.parametrize("ops", [None, OverwritingOps()], ids=["reference", "overwriting"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_bans_that_leave_nothing_fail_their_own_row_only(temperature: float, ops: Any) -> None:
    logits = some_logits(2)
    logits[0, [5, 6]] = -math.inf
    tokens, _, errors = sample(
        [{"temperature": temperature, "allowed_token_ids": [5, 6]}, {"temperature": 0}], logits, ops=ops
    )
    assert list(errors) == [0] and "bans exclude them all" in errors[0]
    assert tokens[1] == int(logits[1].argmax())


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_banned_tokens_are_never_drawn(temperature: float) -> None:
    logits_V = some_logits(1)[0]
    params = {"temperature": temperature, "allowed_token_ids": [3, 9], "logit_bias": {9: -2.0}}
    counts = draws(params, logits_V, 500)
    assert counts.sum() == counts[[3, 9]].sum()
    assert (counts > 0).sum() == (1 if temperature == 0 else 2)


def test_a_token_of_no_weight_is_never_drawn_at_the_edges_of_the_interval() -> None:
    """The uniform number may be 0 or just below 1; leading and trailing tokens without mass must not be picked."""
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 8]] = 0.0
    for uniform, token in ((0.0, 4), (0.499, 4), (0.5, 8), (1 - 2.0**-53, 8)):
        arrays = [torch.tensor([x]) for x in (1.0, 0, 1.0, 0.0)] + [torch.tensor([uniform], dtype=torch.float64)]
        assert Ops(None).sample(logits.clone(), *arrays).tolist() == [token]
