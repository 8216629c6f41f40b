"""Recurrent layers in float64 against sums written out, and a sequence cut in pieces against the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from enginecore.ops.recurrent import causal_conv, selective_scan, ssd_scan

T, C, D, H, P = 7, 6, 4, 4, 3


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one(length: int, *, known: bool = False) -> tuple[torch.Tensor, ...]:
    return torch.tensor([0, length]), torch.tensor([1]), torch.tensor([known])


def test_selective_scan_is_a_sum_over_the_past() -> None:
    x, dt, b, c = rand(T, C, seed=1), rand(T, C, seed=2), rand(T, D, seed=3), rand(T, D, seed=4)
    a, skip, gate, bias = -rand(C, D, seed=5).abs(), rand(C, seed=6), rand(T, C, seed=7), rand(C, seed=8)
    states = rand(3, C, D, seed=9)
    first = states[1].clone()
    y = selective_scan(x, dt, a, b, c, skip, gate, bias, True, states, *one(T, known=True), T)
    step = torch.log1p(torch.exp(dt + bias))
    for t in range(T):
        total = torch.exp(step[: t + 1].sum(0).unsqueeze(1) * a) * first
        for s in range(t + 1):
            decay = torch.exp(step[s + 1 : t + 1].sum(0).unsqueeze(1) * a)
            total = total + decay * (step[s] * x[s]).unsqueeze(1) * b[s]
        expected = ((total * c[t]).sum(1) + skip * x[t]) * gate[t] * torch.sigmoid(gate[t])
        torch.testing.assert_close(y[t], expected)
    torch.testing.assert_close(states[1], total)


def test_ssd_is_the_selective_scan_of_equal_decays() -> None:
    x, dt, b, c = rand(T, H, P, seed=1), rand(T, H, seed=2), rand(T, 2, D, seed=3), rand(T, 2, D, seed=4)
    a, skip, bias = -rand(H, seed=5).abs(), rand(H, seed=6), rand(H, seed=7)
    states = torch.zeros(2, H, P, D, dtype=torch.float64)
    y = ssd_scan(x, dt, a, b, c, skip, None, bias, True, states, *one(T), T)
    for head in range(H):
        wide = torch.zeros(2, P, D, dtype=torch.float64)
        expected = selective_scan(
            x[:, head], dt[:, head, None].expand(T, P), a[head].expand(P, D), b[:, head // 2], c[:, head // 2],
            skip[head].expand(P), None, bias[head].expand(P), True, wide, *one(T), T,
        )  # fmt: skip
        torch.testing.assert_close(y[:, head], expected)
        torch.testing.assert_close(states[1, head], wide[1])


@pytest.mark.parametrize("silu", [False, True])
def test_causal_conv_is_a_padded_convolution(silu: bool) -> None:
    x, weight, bias = rand(T, C, seed=1), rand(C, 4, seed=2), rand(C, seed=3)
    states = rand(2, C, 3, seed=4)
    y = causal_conv(x, weight, bias, states, *one(T), silu, T)
    expected = F.conv1d(F.pad(x.t(), (3, 0)).unsqueeze(0), weight.unsqueeze(1), bias, groups=C)[0].t()
    torch.testing.assert_close(y, F.silu(expected) if silu else expected)
    torch.testing.assert_close(states[1], x[-3:].t())


def test_pieces_give_what_the_whole_gives() -> None:
    x, weight = rand(T, C, seed=1), rand(C, 4, seed=2)
    whole, cut = torch.zeros(2, C, 3, dtype=torch.float64), torch.full((2, C, 3), 7.0, dtype=torch.float64)
    expected = causal_conv(x, weight, None, whole, *one(T), False, T)
    parts, start = [], 0
    for length in (2, 1, 1, 3):
        piece = x[start : start + length]
        parts.append(causal_conv(piece, weight, None, cut, *one(length, known=start > 0), False, length))
        start += length
    torch.testing.assert_close(torch.cat(parts), expected)
    torch.testing.assert_close(cut[1], whole[1])
    assert (cut[0] == 7).all()


def test_padding_stores_nothing_and_empty_sequences_keep_their_state() -> None:
    states = rand(2, C, 3, seed=1)
    kept = states.clone()
    places = torch.tensor([0, 2, 2]), torch.tensor([-1, 1]), torch.tensor([True, True])
    causal_conv(rand(2, C, seed=2), rand(C, 4, seed=3), None, states, *places, False, 2)
    assert torch.equal(states, kept)
