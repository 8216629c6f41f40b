"""L1: weights in few bits, of linear layers and of experts, and caches in fp8 with scales.

What is compared with is the weight that the bits mean. Devices may put activations in eight bits, too, so products with
weights of eight bits are held to what that costs.
"""

from __future__ import annotations

from typing import Any

import torch

from enginecore.ops.expert_weights import ExpertWeights, stack_experts
from enginecore.ops.int4 import Int4Weight, pack_rows
from enginecore.ops.quantized import quantize_int8
from enginecore.ops.scaled import scaled
from enginecore.testing import layer_references, references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES
from enginecore.testing.cases.paged import Paged, Setting

#: What may be wrong with a product in this scheme, as a dtype of the tolerances; None: that of activations.
SCHEMES: dict[str, str | None] = {"int4": None, "fp8": "float8_e4m3fn", "fp8_blocks": "float8_e4m3fn", "int8": "int8"}
_GROUP, _BLOCK = 64, 128


def weight_of(ctx: CaseContext, kind: str, outputs: int, inputs: int, dtype: str) -> Any:
    """A weight of about 1 / sqrt(inputs) in a scheme, on the host: weights of a model go to the device when packed."""
    wide = torch.randn(outputs, inputs, generator=ctx.rng) * inputs**-0.5
    if kind == "int8":
        return quantize_int8(wide.to(getattr(torch, dtype)))
    if kind == "int4":
        codes = torch.randint(0, 16, (inputs, outputs), generator=ctx.rng)
        shape = (inputs // _GROUP, outputs)
        scales = ((torch.rand(shape, generator=ctx.rng) + 0.5) * inputs**-0.5 / 5).half()
        zeros = torch.randint(5, 11, shape, generator=ctx.rng).to(torch.uint8)
        return Int4Weight(pack_rows(codes), scales, zeros, _GROUP, getattr(torch, dtype))
    block = (_BLOCK, _BLOCK) if kind == "fp8_blocks" else None
    shape = (-(-outputs // _BLOCK), -(-inputs // _BLOCK)) if block else (outputs, 1)
    scales = (torch.rand(shape, generator=ctx.rng) + 0.5) / 300
    values = (wide * 300).to(torch.float8_e4m3fn)
    return scaled("fp8", values, scales, getattr(torch, dtype), block)


def _require(ctx: CaseContext, kind: str) -> None:
    scheme = kind.removesuffix("_blocks")
    if scheme not in ctx.backend.capabilities.quantizations:
        ctx.unsupported(f"weights in {scheme} are not claimed")


def linear(kind: str, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        _require(ctx, kind)
        pack = ctx.require_op("pack_linear", dtype)
        for outputs, inputs in ((48, 128), (272, 384)):
            weight = weight_of(ctx, kind, outputs, inputs, dtype)
            exact = weight.dequantize().double()
            packed = pack(weight.to(ctx.device), None)
            for rows in (1, 5, 33, 300):
                x = ctx.normal(rows, inputs, dtype=dtype)
                y = packed(x)
                ctx.backend.synchronize()
                ctx.check(y.dtype == x.dtype, f"the result is {y.dtype}, the input {x.dtype}")
                expected = references.f64(x) @ exact.t()
                ctx.close(y, expected, SCHEMES[kind] or dtype, f"{rows} rows by [{outputs}, {inputs}]")

    return Case(1, "pack_linear", f"{kind}[{dtype}]", run)


def experts(kind: str, dtype: str) -> Case:
    """Experts that nobody asks for, and places that are empty (-1)."""

    def run(ctx: CaseContext) -> None:
        _require(ctx, kind)
        op = ctx.require_op("quantized_experts", dtype)
        size, inner, number, tokens = 128, 128, 5, 23
        sides = []
        for outputs, inputs in ((2 * inner, size), (size, inner)):
            made = stack_experts([weight_of(ctx, kind, outputs, inputs, dtype) for _ in range(number)])
            assert made is not None
            sides.append(made)
        x = ctx.normal(tokens, size, dtype=dtype)
        ids = torch.tensor([[ctx.integer(0, 2), 3, -1 if t % 5 == 0 else 2 - t % 2] for t in range(tokens)])
        weights = ctx.normal(tokens, 3).softmax(-1)
        gate_up, down = (_dense(side) for side in sides)
        expected = layer_references.moe_experts(x, ids, weights, gate_up, down, "silu")
        out = op(x, ids.to(ctx.device), weights, *(side.to(ctx.device) for side in sides), "silu")
        ctx.backend.synchronize()
        ctx.check(out.dtype == x.dtype, f"the result is {out.dtype}, the input {x.dtype}")
        ctx.close(out, expected, SCHEMES[kind] or dtype, f"experts in {kind}")

    return Case(1, "quantized_experts", f"{kind}[{dtype}]", run)


def _dense(side: ExpertWeights) -> torch.Tensor:
    return torch.stack([side.expert(number).dequantize(torch.float64) for number in range(side.shape[0])])


def scales_of_a_cache(kv_dtype: str, dtype: str) -> Case:
    """Keys and values far beyond what fp8 holds by itself: they come back whole when they are divided by their scales,
    each head by its own."""

    def run(ctx: CaseContext) -> None:
        paged = Paged(ctx, Setting(dtype=dtype, kv_dtype=kv_dtype))
        kv_heads, large = paged.setting.num_kv_heads, 1e4
        scales_K = torch.linspace(1.0, 2.0, kv_heads, device=ctx.device) * 300
        attention = ctx.attention.with_kv_scales(scales_K, scales_K * 2)
        if attention is None:
            ctx.unsupported("scales of keys and values are not taken")
        seqs = [paged.sequence(21, 21), paged.sequence(1, 1)]
        slots = torch.tensor(paged.step_slots(seqs), dtype=torch.int64)
        key, value = (states * large for states in paged.make_kv(len(slots)))
        attention.reshape_and_cache(key, value, paged.caches[0], slots.to(ctx.device))
        paged.logical[0].write(key, value, slots)
        query, (params, rule) = paged.make_query(len(slots)) / large, paged.params()
        out = attention.forward(query, paged.caches[0], paged.metadata(seqs), params)
        ctx.backend.synchronize()
        ctx.close(out, paged.expected(query, seqs, rule), kv_dtype, "attention over scaled fp8")

    return Case(1, "attention", f"kv_scales_{kv_dtype}[{dtype}]", run)


def cases() -> list[Case]:
    found = [make(kind, dtype) for make in (linear, experts) for kind in SCHEMES for dtype in DTYPES]
    return found + [scales_of_a_cache(kv, dtype) for kv in ("float8_e4m3fn", "float8_e5m2") for dtype in DTYPES]
