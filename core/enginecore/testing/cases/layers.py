"""L1: the ops of experts, adapters and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from enginecore.testing import layer_references as right
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES

#: Lengths of sequences end to end, the slot of each (-1: padding) and whether it goes on from a state.
LENGTHS, SLOTS, KNOWN = (1, 5, 17, 1, 3), (2, 0, 4, 5, -1), (True, False, True, True, False)


def experts(activation: str, dtype: str) -> Case:
    """Experts that nobody asks for, that everybody asks for, and places that are empty (-1)."""

    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("moe_experts", dtype)
        x = ctx.normal(23, 64, dtype=dtype)
        gate_up, down = ctx.normal(6, 96, 64, dtype=dtype, scale=0.2), ctx.normal(6, 64, 48, dtype=dtype, scale=0.2)
        ids = torch.tensor([[ctx.integer(0, 3), 4, -1 if t % 5 == 0 else 3 - t % 3] for t in range(23)])
        weights = ctx.normal(23, 3).softmax(-1)
        expected = right.moe_experts(x, ids, weights, gate_up, down, activation)
        out = op(x, ids.to(ctx.device), weights, gate_up, down, activation)
        ctx.backend.synchronize()
        ctx.check(out.dtype == x.dtype, f"the result is {out.dtype}, the input {x.dtype}")
        ctx.close(out, expected, dtype, f"experts with {activation}")

    return Case(1, "moe_experts", f"{activation}[{dtype}]", run)


def adapters_of(ctx: CaseContext, tokens: int) -> torch.Tensor:
    """Some tokens without an adapter, the others in turn of three."""
    return torch.tensor([-1 if t % 4 == 3 else t % 3 for t in range(tokens)], device=ctx.device)


def shrink(dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("lora_shrink", dtype)
        x, a = ctx.normal(19, 80, dtype=dtype), ctx.normal(3, 3, 8, 80, dtype=dtype, scale=0.3)
        adapter = adapters_of(ctx, 19)
        out = op(x, a, adapter)
        ctx.backend.synchronize()
        ctx.check(out.dtype == torch.float32, f"the result is {out.dtype}: float32 is due")
        ctx.close(out.transpose(0, 1), right.lora_shrink(x, a, adapter).transpose(0, 1), "float32", "lora_shrink")
        ctx.check(not out[:, adapter < 0].any(), "tokens without an adapter must get zeros")

    return Case(1, "lora_shrink", f"three_slices[{dtype}]", run)


def expand(dtype: str) -> Case:
    """Slices of different widths, and columns behind them, which belong to nobody."""

    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("lora_expand", dtype)
        h, y = ctx.normal(3, 19, 8), ctx.normal(19, 100, dtype=dtype)
        b = [ctx.normal(3, width, 8, dtype=dtype, scale=0.3) for width in (48, 16, 16)]
        adapter, before = adapters_of(ctx, 19), y.clone()
        expected = right.lora_expand(h, b, adapter, y)
        out = op(h, b, adapter, y)
        ctx.backend.synchronize()
        ctx.check(out.data_ptr() == y.data_ptr(), "lora_expand must work in place")
        ctx.close(y, expected, dtype, "lora_expand")
        untouched = torch.equal(y[adapter < 0], before[adapter < 0]) and torch.equal(y[:, 80:], before[:, 80:])
        ctx.check(untouched, "rows without an adapter, or columns of no slice, were changed")

    return Case(1, "lora_expand", f"three_slices[{dtype}]", run)


def _places(ctx: CaseContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """(starts, slots, has_state, tokens) of the sequences above."""
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    slots, known = torch.tensor(SLOTS, dtype=torch.int32), torch.tensor(KNOWN)
    return starts.to(ctx.device), slots.to(ctx.device), known.to(ctx.device), int(starts[-1])


def _judge(
    ctx: CaseContext, out: torch.Tensor, states: torch.Tensor, before: torch.Tensor,
    expected: tuple[torch.Tensor, torch.Tensor], dtype: str,
) -> None:  # fmt: skip
    """Outputs of real sequences, states of their slots, and nothing anywhere else."""
    ctx.backend.synchronize()
    real = slice(0, sum(LENGTHS) - LENGTHS[-1])  # the last one is padding
    ctx.close(out[real], expected[0][real], dtype, f"{ctx.case.op}, outputs")
    used = [slot for slot in SLOTS if slot >= 0]
    kept = str(states.dtype).removeprefix("torch.")
    worse = kept if ctx.profile.tolerance(ctx.case.op, kept) > ctx.profile.tolerance(ctx.case.op, dtype) else dtype
    ctx.close(states[used], expected[1][used], worse, f"{ctx.case.op}, states afterwards")
    others = [slot for slot in range(len(states)) if slot not in used]
    ctx.check(torch.equal(states[others], before[others]), "states of slots that no sequence has were changed")


def conv(silu: bool, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("causal_conv", dtype)
        starts, slots, known, tokens = _places(ctx)
        x, states = ctx.normal(tokens, 40, dtype=dtype), ctx.normal(7, 40, 3, dtype=dtype)
        weight, bias = ctx.normal(40, 4, dtype=dtype), ctx.normal(40, dtype=dtype) if silu else None
        before = states.clone()
        expected = right.causal_conv(x, weight, bias, states, starts, slots, known, silu)
        out = op(x, weight, bias, states, starts, slots, known, silu, max(LENGTHS))
        _judge(ctx, out, states, before, expected, dtype)

    return Case(1, "causal_conv", f"{'silu_bias' if silu else 'plain'}[{dtype}]", run)


def scan(everything: bool, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("selective_scan", dtype)
        starts, slots, known, tokens = _places(ctx)
        channels, size = 24, 8
        x, dt = ctx.normal(tokens, channels, dtype=dtype), ctx.normal(tokens, channels, dtype=dtype)
        b, c = (ctx.normal(tokens, size, dtype=dtype) for _ in range(2))
        a, states = -ctx.normal(channels, size).abs() - 0.1, ctx.normal(7, channels, size)
        more: Any = (None, None, None, False)
        if everything:
            more = (ctx.normal(channels), ctx.normal(tokens, channels, dtype=dtype), ctx.normal(channels), True)
        else:
            dt = dt.abs() * 0.1
        before = states.clone()
        expected = right.selective_scan(x, dt, a, b, c, *more, states, starts, slots, known)  # type: ignore[call-arg]
        out = op(x, dt, a, b, c, *more, states, starts, slots, known, max(LENGTHS))
        _judge(ctx, out, states, before, expected, dtype)

    return Case(1, "selective_scan", f"{'skip_gate_bias' if everything else 'plain'}[{dtype}]", run)


def ssd(everything: bool, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("ssd_scan", dtype)
        starts, slots, known, tokens = _places(ctx)
        heads, width, groups, size = 4, 16, 2, 8
        x, dt = ctx.normal(tokens, heads, width, dtype=dtype), ctx.normal(tokens, heads, dtype=dtype)
        b, c = (ctx.normal(tokens, groups, size, dtype=dtype) for _ in range(2))
        a, states = -ctx.normal(heads).abs() - 0.1, ctx.normal(7, heads, width, size)
        more: Any = (None, None, None, False)
        if everything:
            more = (ctx.normal(heads), ctx.normal(tokens, heads, width, dtype=dtype), ctx.normal(heads), True)
        else:
            dt = dt.abs() * 0.1
        before = states.clone()
        expected = right.ssd_scan(x, dt, a, b, c, *more, states, starts, slots, known)  # type: ignore[call-arg]
        out = op(x, dt, a, b, c, *more, states, starts, slots, known, max(LENGTHS))
        _judge(ctx, out, states, before, expected, dtype)

    return Case(1, "ssd_scan", f"{'skip_gate_bias' if everything else 'plain'}[{dtype}]", run)


def cases() -> list[Case]:
    found = [experts(activation, dtype) for activation in ("silu", "gelu", "gelu_tanh") for dtype in DTYPES]
    found += [make(dtype) for make in (shrink, expand) for dtype in DTYPES]
    recurrent: tuple[Callable[[bool, str], Case], ...] = (conv, scan, ssd)
    return found + [make(way, dtype) for make in recurrent for way in (False, True) for dtype in DTYPES]
