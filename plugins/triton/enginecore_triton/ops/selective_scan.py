"""The recurrence of Mamba: a state of D numbers for each channel, carried from token to token.

A program has some channels of one sequence and goes through its tokens with the state in registers; the next tokens'
inputs are on their way meanwhile. Channels and sequences run side by side. Decoding is the same with one token.

Source: Gu and Dao, arXiv:2312.00752. Shape suffixes: T tokens, N sequences, S slots, C channels, D state size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch, power_of_two

MAX_STATE = 256


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which is x to the last bit from 20 on."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _scan(
    x_TC, dt_TC, a_CD, b_TD, c_TD, skip_C, gate_TC, dt_bias_C, states_SCD, starts_N1, slots_N, has_state_N, out_TC,
    stride_x, stride_dt, stride_b, stride_c, stride_gate, stride_slot, channels, size,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    if end > start:
        slot = tl.load(slots_N + sequence).to(tl.int64)
        known = (tl.load(has_state_N + sequence).to(tl.int32) > 0).to(tl.int32) * (slot >= 0).to(tl.int32)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        place = tl.arange(0, BLOCK_D)
        inside, within = channel < channels, place < size
        both = within[:, None] & inside[None, :]
        at = channel[None, :] * size + place[:, None]
        a = tl.load(a_CD + at, mask=both, other=0.0).to(tl.float32)
        kept = states_SCD + slot * stride_slot + at
        state = tl.load(kept, mask=both & (at * 0 + known > 0), other=0.0).to(tl.float32)
        skip = tl.zeros((BLOCK_C,), tl.float32)
        if HAS_SKIP:
            skip = tl.load(skip_C + channel, mask=inside, other=0.0).to(tl.float32)
        bias = tl.zeros((BLOCK_C,), tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(dt_bias_C + channel, mask=inside, other=0.0).to(tl.float32)
        for token in tl.range(0, (end - start).to(tl.int32), num_stages=STAGES):
            row = start + token
            x = tl.load(x_TC + row * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
            step = tl.load(dt_TC + row * stride_dt + channel, mask=inside, other=0.0).to(tl.float32) + bias
            b = tl.load(b_TD + row * stride_b + place, mask=within, other=0.0).to(tl.float32)
            c = tl.load(c_TD + row * stride_c + place, mask=within, other=0.0).to(tl.float32)
            if SOFTPLUS:
                step = softplus(step)
            state = tl.exp(step[None, :] * a) * state + (step * x)[None, :] * b[:, None]
            y = tl.sum(state * c[:, None], 0) + skip * x
            if HAS_GATE:
                gate = tl.load(gate_TC + row * stride_gate + channel, mask=inside, other=0.0).to(tl.float32)
                y *= gate / (1.0 + tl.exp(-gate))
            tl.store(out_TC + row * channels + channel, y.to(out_TC.dtype.element_ty), mask=inside)
        if slot >= 0:
            tl.store(kept, state.to(states_SCD.dtype.element_ty), mask=both)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x[0].is_contiguous() or not x.shape[0] else x.contiguous()


def check_states(states: torch.Tensor) -> None:
    if not states[0].is_contiguous():
        raise ValueError(f"a slot's state must be dense {list(states.shape[1:])}: it is changed in place")
    if states.shape[-1] > MAX_STATE:
        raise ValueError(f"a state of {states.shape[-1]} is above {MAX_STATE}")


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    a_CD: torch.Tensor,
    b_TD: torch.Tensor,
    c_TD: torch.Tensor,
    skip_C: torch.Tensor | None,
    gate_TC: torch.Tensor | None,
    dt_bias_C: torch.Tensor | None,
    dt_softplus: bool,
    states_SCD: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    max_query_len: int,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `selective_scan`. A slot's state must be dense; the host waits for nothing."""
    check_states(states_SCD)
    channels, size = a_CD.shape
    x_TC, dt_TC, b_TD, c_TD = (dense_rows(part) for part in (x_TC, dt_TC, b_TD, c_TD))
    gate = x_TC if gate_TC is None else dense_rows(gate_TC)
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    config = configs.pick("selective_scan", device.architecture, tokens=max_query_len, size=size)
    launch(_scan, (slots_N.shape[0], cdiv(channels, config.constants["BLOCK_C"])), x_TC, dt_TC, a_CD.contiguous(), b_TD,
           c_TD, a_CD if skip_C is None else skip_C, gate, a_CD if dt_bias_C is None else dt_bias_C, states_SCD,
           starts_N1, slots_N, has_state_N, out_TC, x_TC.stride(0), dt_TC.stride(0), b_TD.stride(0), c_TD.stride(0),
           gate.stride(0), states_SCD.stride(0), channels, size, HAS_SKIP=skip_C is not None,
           HAS_GATE=gate_TC is not None, HAS_DT_BIAS=dt_bias_C is not None, SOFTPLUS=dt_softplus,
           BLOCK_D=power_of_two(size), config=config)  # fmt: skip
    return out_TC


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size = query.attributes.get("state_size", 16)
    return [f"a state of {size} is above {MAX_STATE}"] if size > MAX_STATE else []


def aot_cases() -> list[AotCase]:
    inputs = dict.fromkeys(("x_TC", "dt_TC", "b_TD", "c_TD", "gate_TC", "out_TC"), "*bf16:16")
    weights = dict.fromkeys(("a_CD", "skip_C", "dt_bias_C", "states_SCD"), "*fp32:16")
    places = {"starts_N1": "*i32:16", "slots_N": "*i32:16", "has_state_N": "*i1:16"}
    strides = ("stride_x", "stride_dt", "stride_b", "stride_c", "stride_gate", "stride_slot", "channels", "size")
    flags = {"HAS_SKIP": True, "HAS_GATE": True, "HAS_DT_BIAS": True, "SOFTPLUS": True}
    return [
        AotCase(name=f"{tokens} tokens, state {size}", kernel=_scan, constants={**flags, "BLOCK_D": size},
                signature={**inputs, **weights, **places, **dict.fromkeys(strides, "i32:16")},
                config="selective_scan", sizes={"tokens": tokens, "size": size})
        for tokens, size in ((1, 16), (2048, 16), (2048, MAX_STATE))
    ]  # fmt: skip
