"""The references against torch's own functions, where torch has them, and against hand-made numbers where not."""

from __future__ import annotations

import math

import pytest
import torch
from enginecore.testing import references
from enginecore.testing.references import AttentionRule, LogicalCache
from enginecore.testing.tolerance import deviation, nmse

F = torch.nn.functional


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_torch(causal: bool) -> None:
    query, key, value = rand(9, 6, 16, seed=1), rand(9, 2, 16, seed=2), rand(9, 2, 16, seed=3)
    out = references.attend(query, key, value, AttentionRule(scale=0.3, causal=causal))
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.3, enable_gqa=True).transpose(0, 1)
    assert torch.allclose(out, wanted, atol=1e-12)


def test_window_of_one_returns_the_own_value() -> None:
    value = rand(5, 1, 8, seed=3)
    out = references.attend(rand(5, 1, 8), rand(5, 1, 8, seed=2), value, AttentionRule(scale=1.0, sliding_window=1))
    assert torch.equal(out, value)


def test_window_counts_the_current_token() -> None:
    rule = AttentionRule(scale=0.5, sliding_window=3)
    query, key, value = rand(7, 2, 8), rand(7, 2, 8, seed=1), rand(7, 2, 8, seed=2)
    last = references.attend(query[6:], key[4:], value[4:], AttentionRule(scale=0.5))
    assert torch.allclose(references.attend(query, key, value, rule)[6:], last)


def test_soft_cap_alibi_and_sinks_by_hand() -> None:
    query, key, value = torch.full((1, 1, 1), 2.0), torch.tensor([1.0, 3.0]).view(2, 1, 1), rand(2, 1, 1)
    rule = AttentionRule(
        scale=1.0, soft_cap=4.0, sinks_H=torch.tensor([0.5]), alibi_slopes_H=torch.tensor([0.25])
    )  # fmt: skip
    scores = [4 * math.tanh(2 / 4) - 0.25, 4 * math.tanh(6 / 4)]
    total = sum(math.exp(score) for score in scores) + math.exp(0.5)
    wanted = sum(math.exp(score) / total * float(value[i]) for i, score in enumerate(scores))
    assert float(references.attend(query.double(), key.double(), value, rule)) == pytest.approx(wanted)


def test_paged_attention_follows_the_block_table() -> None:
    cache = LogicalCache(6, 4, 1, 8)
    key, value = rand(6, 1, 8, seed=1).float(), rand(6, 1, 8, seed=2).float()
    cache.write(key, value, torch.tensor([20, 21, 22, 23, 4, 5]))
    query = rand(2, 2, 8, seed=3)
    out = references.paged_attention(query, cache, [2], [6], [[5, 1]], AttentionRule(scale=1.0))
    assert torch.allclose(out, references.attend(query, key.double(), value.double(), AttentionRule(scale=1.0)))


def test_logical_cache_skips_padding_and_copies() -> None:
    cache = LogicalCache(3, 2, 1, 1)
    cache.write(torch.tensor([1.0, 9.0, 2.0]).view(3, 1, 1), torch.zeros(3, 1, 1), torch.tensor([2, -1, 3]))
    assert cache.key[2].item() == 1.0
    assert cache.key[[0, 1, 4, 5]].isnan().all()
    cache.copy_blocks([(1, 0)])
    assert cache.key[:2].flatten().tolist() == [1.0, 2.0]


def test_norms_and_activations_equal_torch() -> None:
    x, weight = rand(5, 16), rand(16, seed=1)
    assert torch.allclose(references.rms_norm(x, weight, 1e-5), F.rms_norm(x, (16,), weight, 1e-5))
    normed, total = references.fused_add_rms_norm(x, 2 * x, weight, 1e-5)
    assert torch.allclose(total, 3 * x)
    assert torch.allclose(normed, F.rms_norm(3 * x, (16,), weight, 1e-5))
    gate, up = x.chunk(2, dim=-1)
    for kind, wanted in {
        "silu": F.silu(gate), "gelu": F.gelu(gate), "gelu_tanh": F.gelu(gate, approximate="tanh")
    }.items():  # fmt: skip
        assert torch.allclose(references.activate_and_mul(kind, x), wanted * up)
    with pytest.raises(ValueError, match="swish"):
        references.activate_and_mul("swish", x)


def test_linear_equals_torch() -> None:
    x, weight, bias = rand(5, 7), rand(3, 7, seed=1), rand(3, seed=2)
    assert torch.allclose(references.linear(x, weight, bias), F.linear(x, weight, bias))
    assert torch.allclose(references.linear(x, weight, None), F.linear(x, weight))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_and_keeps_lengths(interleaved: bool) -> None:
    angle = torch.tensor([0.3, 1.1])
    table = torch.cat([angle.cos(), angle.sin()])[None]
    x = rand(1, 2, 6)
    out = references.rotary_embedding(torch.tensor([0]), x, table, interleaved)
    for i in range(2):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + 2)
        before, after = (torch.complex(y[..., first], y[..., second]) for y in (x, out))
        assert torch.allclose(after, before * torch.polar(torch.ones(1), angle[i : i + 1]), atol=1e-6)
    assert torch.equal(out[..., 4:], x[..., 4:])


def one(rule: tuple[float, int, float, float], probs: list[float], uniform: float) -> set[int]:
    temperature, top_k, top_p, min_p = (torch.tensor([value]) for value in rule)
    logits = torch.tensor([probs]).log()
    return references.sample(logits, temperature, top_k, top_p, min_p, torch.tensor([uniform], dtype=torch.float64))[0]


PROBS = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("rule", "uniform", "wanted"),
    [
        ((0.0, 0, 1.0, 0.0), 0.9, {1}),
        ((1.0, 0, 1.0, 0.0), 0.05, {0}),
        ((1.0, 0, 1.0, 0.0), 0.45, {1}),
        ((1.0, 0, 1.0, 0.0), 0.1, {0, 1}),  # on the edge: rounding decides
        ((1.0, 2, 1.0, 0.0), 0.0, {1}),
        ((1.0, 2, 1.0, 0.0), 0.99, {3}),
        ((1.0, 0, 0.65, 0.0), 0.99, {3}),
        ((1.0, 0, 0.75, 0.0), 0.5, {2}),
        ((1.0, 0, 1.0, 0.6), 0.01, {1}),
        ((1.0, 0, 1.0, 0.6), 0.99, {3}),
    ],
)
def test_sample_by_hand(rule: tuple[float, int, float, float], uniform: float, wanted: set[int]) -> None:
    assert one(rule, PROBS, uniform) == wanted


def test_merge_of_two_halves_is_the_whole() -> None:
    scores, value = rand(3, 2, 10), rand(10, 2, 4, seed=1)
    parts = []
    for span in (slice(0, 4), slice(4, 10), slice(0, 10)):
        weights = scores[..., span].softmax(-1)
        parts.append((torch.einsum("thn,nhd->thd", weights, value[span]), scores[..., span].logsumexp(-1)))
    out, lse = references.merge_attn_states(*parts[0], *parts[1])
    assert torch.allclose(out, parts[2][0]) and torch.allclose(lse, parts[2][1])


def test_nmse_is_relative_and_sees_single_rows_and_nan() -> None:
    expected = rand(100, 8)
    assert nmse(expected, expected) == 0
    assert nmse(1000 * expected * 1.01, 1000 * expected) == pytest.approx(1e-4)
    wrong = expected.clone()
    wrong[17] = 0
    found = deviation(wrong, expected)
    assert found.row == 17
    assert found.worst_row == pytest.approx(100 * found.total)
    assert not found.within(found.total)
    wrong[3, 2] = math.nan
    assert deviation(wrong, expected).not_finite == 1
    assert "NaN" in deviation(wrong, expected).describe(1.0)
    with pytest.raises(ValueError, match="shape"):
        deviation(expected[:5], expected)
