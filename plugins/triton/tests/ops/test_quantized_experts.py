"""Experts in few bits, grouped on the device, against one after another in float64 with their weights unpacked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginecore.device import OpQuery
from enginecore.ops.expert_weights import ExpertWeights, stack_experts
from enginecore.ops.experts import moe_experts as reference
from enginecore.ops.int4 import Int4Weight, pack_rows
from enginecore.ops.quantized import quantize_int8
from enginecore.ops.scaled import scaled
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.quantized_experts import quantized_experts, supports

DEVICE = DeviceDescription()


def weight(kind: str, outputs: int, inputs: int, generator: torch.Generator, dtype: torch.dtype) -> Any:
    plain_OI = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
    if kind == "int8":
        return quantize_int8(plain_OI)
    if kind.startswith("fp8"):
        block = (32, 64) if kind == "fp8, blocks" else None
        shape = (outputs, 1) if block is None else (-(-outputs // 32), -(-inputs // 64))
        scales = torch.rand(shape, generator=generator) / 50 + 0.01
        return scaled("fp8", (plain_OI * 40).to(torch.float8_e4m3fn), scales, dtype, block)
    groups = inputs // 32
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator).to(torch.uint8)
    scales = (torch.rand(groups, outputs, generator=generator) / 40 + 0.005).half()
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
    return Int4Weight(pack_rows(codes), scales, None if kind == "int4, even" else zeros, 32, dtype)


def stack(kind: str, experts: int, outputs: int, inputs: int, seed: int, dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    made = stack_experts([weight(kind, outputs, inputs, generator, dtype) for _ in range(experts)])
    assert made is not None and made.shape == (experts, outputs, inputs)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["fp8", "fp8, blocks", "int8", "int4", "int4, even"])
def test_product(kind: str, dtype: torch.dtype) -> None:
    experts, size, inner, tokens, activation = 4, 96, 64, 21, "gelu" if kind == "int8" else "silu"
    gate_up, down = stack(kind, experts, 2 * inner, size, 1, dtype), stack(kind, experts, size, inner, 2, dtype)
    assert gate_up.nbytes < 0.45 * 2 * 2 * inner * size * experts * (1 if kind.startswith("int4") else 2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, size, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).topk(2).indices
    ids[5, 1] = -1
    weights = torch.rand(tokens, 2, generator=generator)
    exact = reference(x.double(), ids, weights, gate_up, down, activation)
    dense = [
        torch.stack([part.expert(i).dequantize(torch.float64) for i in range(experts)]) for part in (gate_up, down)
    ]
    torch.testing.assert_close(exact, reference(x.double(), ids, weights, *dense, activation))
    got = quantized_experts(x, ids, weights, gate_up, down, activation, device=DEVICE)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, atol=near * exact.abs().max().item(), rtol=near)


def test_no_tokens_and_what_does_not_fit() -> None:
    parts = stack("fp8", 2, 64, 32, 1, torch.float32), stack("fp8", 2, 32, 32, 2, torch.float32)
    empty = torch.zeros(0, 32), torch.zeros(0, 1, dtype=torch.int64), torch.zeros(0, 1)
    assert quantized_experts(*empty, *parts, "silu", device=DEVICE).shape == (0, 32)

    def reasons(**asked: Any) -> list[str]:
        return supports(OpQuery(op="quantized_experts", dtype="float16", attributes=asked), DEVICE)

    assert reasons(**parts[0].attributes()) == reasons(scheme="int4", group=32, ordered=False) == []
    assert "blocks of 48" in reasons(scheme="fp8", group=48, blocked=True)[0]
    assert "order" in reasons(scheme="int4", group=32, ordered=True)[0]
    assert "q4_1" in reasons(scheme="q4_1")[0]
