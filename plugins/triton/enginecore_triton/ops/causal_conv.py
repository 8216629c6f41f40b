"""The short causal convolution of hybrid models, over sequences that lie end to end, with the inputs before them kept.

    _convolve   a tile of one sequence's tokens by a tile of channels; the first W - 1 tokens reach into the kept inputs
    _keep       the last W - 1 inputs of each sequence, kept for the next step; after _convolve has read the old ones
    _step       decoding: one token a sequence; the answer and the shifted inputs in one program

Shape suffixes: T tokens, N sequences, S slots, C channels, W taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch

MAX_TAPS = 8


@triton.jit
def _finish(total, SILU: tl.constexpr):
    if SILU:
        return total / (1.0 + tl.exp(-total))
    return total


@triton.jit
def _convolve(
    x_TC, weight_CW, bias_C, states_SCP, starts_N1, slots_N, has_state_N, out_TC,
    stride_x, stride_slot, channels, tiles,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    sequence, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    length = end - start
    if tile * BLOCK_T < length:
        slot = tl.load(slots_N + sequence).to(tl.int64)
        known = (tl.load(has_state_N + sequence).to(tl.int32) > 0).to(tl.int32) * (slot >= 0).to(tl.int32)
        place = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside, below = channel < channels, place < length
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_C + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for tap in tl.static_range(TAPS):
            weight = tl.load(weight_CW + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            source = place + (tap - (TAPS - 1))
            at = x_TC + (start + source)[:, None] * stride_x + channel[None, :]
            x = tl.load(at, mask=(below & (source >= 0))[:, None] & inside[None, :], other=0.0).to(tl.float32)
            if tap < TAPS - 1:
                before = (source < 0) & below & ((source * 0 + known) > 0)
                kept = states_SCP + slot * stride_slot + channel[None, :] * (TAPS - 1) + (source + TAPS - 1)[:, None]
                x += tl.load(kept, mask=before[:, None] & inside[None, :], other=0.0).to(tl.float32)
            total += x * weight[None, :]
        out = out_TC + (start + place)[:, None] * channels + channel[None, :]
        tl.store(out, _finish(total, SILU).to(out_TC.dtype.element_ty), mask=below[:, None] & inside[None, :])


@triton.jit
def _keep(
    x_TC, states_SCP, starts_N1, slots_N, has_state_N, stride_x, stride_slot, channels,
    TAPS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    start, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    slot, length = tl.load(slots_N + sequence).to(tl.int64), end - start
    if (slot >= 0) & (length > 0):
        known = tl.load(has_state_N + sequence).to(tl.int32)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = channel < channels
        state = states_SCP + slot * stride_slot + channel * (TAPS - 1)
        # From the oldest input on, with a barrier before each store: nothing is read after it was written.
        for place in tl.static_range(TAPS - 1):
            source = length + place - (TAPS - 1)
            new, old = inside & (channel * 0 + source >= 0), inside & (channel * 0 + known * (source < 0) > 0)
            x = tl.load(x_TC + (start + source) * stride_x + channel, mask=new, other=0.0)
            kept = tl.load(state + length + place, mask=old, other=0.0).to(tl.float32)
            tl.debug_barrier()
            tl.store(state + place, (x.to(tl.float32) + kept).to(states_SCP.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    x_TC, weight_CW, bias_C, states_SCP, starts_N1, slots_N, has_state_N, out_TC,
    stride_x, stride_slot, channels,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    row, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    if end > row:
        slot = tl.load(slots_N + sequence).to(tl.int64)
        known = (tl.load(has_state_N + sequence).to(tl.int32) > 0).to(tl.int32) * (slot >= 0).to(tl.int32)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = channel < channels
        stored = inside & (channel * 0 + slot >= 0)
        state = states_SCP + slot * stride_slot + channel * (TAPS - 1)
        newest = tl.load(x_TC + row * stride_x + channel, mask=inside, other=0.0)
        total = tl.zeros((BLOCK_C,), tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_C + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            weight = tl.load(weight_CW + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            if tap < TAPS - 1:
                x = tl.load(state + tap, mask=inside & (channel * 0 + known > 0), other=0.0)
                if tap > 0:
                    tl.debug_barrier()  # what is overwritten now was read in the round before, by whatever thread
                    tl.store(state + tap - 1, x, mask=stored)
                total += x.to(tl.float32) * weight
            else:
                tl.debug_barrier()
                tl.store(state + tap - 1, newest.to(states_SCP.dtype.element_ty), mask=stored)
                total += newest.to(tl.float32) * weight
        out = _finish(total, SILU).to(out_TC.dtype.element_ty)
        tl.store(out_TC + row * channels + channel, out, mask=inside)


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCW: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    silu: bool,
    max_query_len: int,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `causal_conv`. A slot's state must be dense; the host waits for nothing."""
    channels, taps = weight_CW.shape
    if not 2 <= taps <= MAX_TAPS:
        raise ValueError(f"a convolution of {taps} taps is not between 2 and {MAX_TAPS}")
    if states_SCW.stride(2) != 1 or states_SCW.stride(1) != taps - 1:
        raise ValueError(f"a slot's state must be dense [{channels}, {taps - 1}]: it is changed in place")
    x_TC = x_TC if x_TC.stride(1) == 1 else x_TC.contiguous()
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    places = (starts_N1, slots_N, has_state_N)
    strides = (x_TC.stride(0), states_SCW.stride(0), channels)
    flags = {"TAPS": taps, "HAS_BIAS": bias_C is not None, "SILU": silu}
    weight_CW = weight_CW.contiguous()
    config = configs.pick("causal_conv", device.architecture, tokens=max_query_len)
    sequences, columns = slots_N.shape[0], cdiv(channels, config.constants["BLOCK_C"])
    bias = weight_CW if bias_C is None else bias_C
    if max_query_len == 1:
        launch(_step, (sequences, columns), x_TC, weight_CW, bias, states_SCW, *places, out_TC, *strides, **flags,
               config=config)  # fmt: skip
        return out_TC
    tiles = cdiv(max_query_len, config.constants["BLOCK_T"])
    launch(_convolve, (sequences * tiles, columns), x_TC, weight_CW, bias, states_SCW, *places, out_TC, *strides, tiles,
           **flags, config=config)  # fmt: skip
    keep = configs.pick("causal_conv", device.architecture, tokens=1)
    launch(_keep, (sequences, cdiv(channels, keep.constants["BLOCK_C"])), x_TC, states_SCW, *places, *strides,
           TAPS=taps, config=keep)  # fmt: skip
    return out_TC


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    taps = query.attributes.get("taps", 4)
    return [] if 2 <= taps <= MAX_TAPS else [f"a convolution of {taps} taps is not between 2 and {MAX_TAPS}"]


def aot_cases() -> list[AotCase]:
    places = {"starts_N1": "*i32:16", "slots_N": "*i32:16", "has_state_N": "*i1:16"}
    sizes = dict.fromkeys(("stride_x", "stride_slot", "channels"), "i32:16")
    kept = {"x_TC": "*bf16:16", "states_SCP": "*bf16:16", **places, **sizes}
    whole = {**kept, "weight_CW": "*bf16:16", "bias_C": "*bf16:16", "out_TC": "*bf16:16"}
    flags = {"TAPS": 4, "HAS_BIAS": True, "SILU": True}
    return [
        AotCase(name="step", kernel=_step, signature=whole, constants=flags, sizes={"tokens": 1}, config="causal_conv"),
        AotCase(name="convolve", kernel=_convolve, signature={**whole, "tiles": "i32"}, constants=flags,
                sizes={"tokens": 2048}, config="causal_conv"),
        AotCase(name="keep", kernel=_keep, signature=kept, constants={"TAPS": 4}, sizes={"tokens": 1},
                config="causal_conv"),
    ]  # fmt: skip
