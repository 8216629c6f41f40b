"""Experts grouped on the device against one after another in float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.experts import moe_experts as reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import _grouping
from enginecore_triton.ops.moe_experts import moe_experts

DEVICE = DeviceDescription()


@pytest.mark.parametrize(("number", "experts", "block"), [(1, 5, 16), (37, 4, 16), (1100, 3, 32), (8, 40, 16)])
def test_grouping(number, experts, block):
    ids = torch.randint(-1, experts, (number,), generator=torch.Generator().manual_seed(number))
    order, tile_expert = _grouping.grouped(ids, experts, block)
    seen = []
    for tile, expert in zip(order.view(-1, block), tile_expert.tolist(), strict=True):
        if expert >= 0:
            rows = tile[tile < number]
            assert len(rows) and (ids[rows.long()] == expert).all() and (tile[len(rows) :] == number).all()
            seen += rows.tolist()
    expected = sorted(range(number), key=lambda row: (int(ids[row]), row))
    assert seen == [row for row in expected if ids[row] >= 0]


def make(tokens: int, each: int, experts: int, size: int, inner: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(each).indices
    weights = torch.softmax(torch.randn(tokens, each, generator=generator), -1)
    x = torch.randn(tokens, size, generator=generator).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, size, generator=generator) / size**0.5).to(dtype)
    return [x, ids, weights, gate_up, (torch.randn(experts, size, inner, generator=generator) / inner**0.5).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "each", "experts", "size", "inner", "activation"),
    [(1, 2, 8, 128, 64, "silu"), (33, 3, 5, 72, 40, "gelu"), (60, 2, 3, 64, 96, "gelu_tanh"), (5, 1, 1, 64, 8, "silu")],
)
def test_product(tokens, each, experts, size, inner, activation, dtype):
    arguments = make(tokens, each, experts, size, inner, dtype)
    arguments[1][tokens // 2, 0] = -1
    exact = reference(*(part.double() if part.is_floating_point() else part for part in arguments), activation)
    got = moe_experts(*arguments, activation, device=DEVICE)
    near = 1e-5 if dtype == torch.float32 else 5e-3
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=near, rtol=near)


def test_tokens_without_experts_get_zeros_and_no_tokens_nothing():
    arguments = make(3, 2, 4, 64, 32, torch.float32)
    arguments[1][:] = -1
    assert (moe_experts(*arguments, "silu", device=DEVICE) == 0).all()
    assert moe_experts(*(part[:0] for part in arguments[:3]), *arguments[3:], "silu", device=DEVICE).shape == (0, 64)
    with pytest.raises(ValueError, match="relu"):
        moe_experts(*arguments, "relu", device=DEVICE)
