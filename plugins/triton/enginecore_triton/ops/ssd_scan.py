"""The recurrence of Mamba-2, where a head has one decay: whole chunks of tokens become products of matrices.

Within a chunk, with L the running sum of step * a, token t takes exp(L_t - L_s) (c_t . b_s) step_s x_s from each token
s <= t, and exp(L_t) c_t times the state from before the chunk; the state goes on with what the chunk adds to it. A
program has one head (and a part of its P) of one sequence, and goes through its chunks with the state in registers.

    _pairs    the products c_t . b_s of each chunk, once for all the heads of a group
    _chunks   prompts
    _step     decoding, one token a sequence: bound by reading and writing the states

Source: Dao and Gu, arXiv:2405.21060. Shape suffixes: T tokens, N sequences, S slots, H heads, P head size, G groups,
D state size.
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
from enginecore_triton.ops.selective_scan import MAX_STATE, check_states, dense_rows, softplus
from enginecore_triton.targets import TARGETS

#: Architectures whose registers do not hold the largest state.
_LESS = {"gfx1100": 128}


@triton.jit
def _finish(y, x, gate, skip, HAS_GATE: tl.constexpr):
    y += skip * x
    if HAS_GATE:
        y *= gate / (1.0 + tl.exp(-gate))
    return y


@triton.jit
def _pairs(
    b_TGD, c_TGD, starts_N1, out_TGT, stride_b, stride_c, chunks, groups, size,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out[t, g, j] is c_t . b_s with s the token j of t's chunk."""
    sequence, chunk, group = tl.program_id(0) // chunks, tl.program_id(0) % chunks, tl.program_id(1)
    start, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    first = start + chunk * BLOCK_T
    if first < end:
        line, within = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
        below, used = first + line < end, within < size
        at = group * size + within
        mask = below[:, None] & used[None, :]
        b_TD = tl.load(b_TGD + first * stride_b + line[:, None] * stride_b + at[None, :], mask=mask, other=0.0)
        c_TD = tl.load(c_TGD + first * stride_c + line[:, None] * stride_c + at[None, :], mask=mask, other=0.0)
        pairs_TT = tl.dot(c_TD, tl.trans(b_TD), input_precision="ieee")
        out = out_TGT + (first * groups + group) * BLOCK_T
        tl.store(out + line[:, None] * (groups * BLOCK_T) + line[None, :], pairs_TT, mask=below[:, None])


@triton.jit
def _chunks(
    x_THP, dt_TH, a_H, b_TGD, c_TGD, skip_H, gate_THP, dt_bias_H, states_SHPD, starts_N1, slots_N, has_state_N, out_THP,
    pairs_TGT, groups,
    stride_x, stride_dt, stride_b, stride_c, stride_gate, stride_slot, heads, heads_per_group, head_size, size,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    if end > start:
        slot = tl.load(slots_N + sequence).to(tl.int64)
        known = (tl.load(has_state_N + sequence).to(tl.int32) > 0).to(tl.int32) * (slot >= 0).to(tl.int32)
        place, within = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        inside, used = place < head_size, within < size
        a = tl.load(a_H + head).to(tl.float32)
        skip, bias = 0.0, 0.0
        if HAS_SKIP:
            skip = tl.load(skip_H + head).to(tl.float32)
        if HAS_DT_BIAS:
            bias = tl.load(dt_bias_H + head).to(tl.float32)
        at_DP = place[None, :] * size + within[:, None]
        kept, both = states_SHPD + slot * stride_slot + head * head_size * size, used[:, None] & inside[None, :]
        state_DP = tl.load(kept + at_DP, mask=both & (at_DP * 0 + known > 0), other=0.0).to(tl.float32)
        line = tl.arange(0, BLOCK_T)
        # Addresses are one 64-bit number for the chunk and 32-bit ones within it: wide ones would fill the registers.
        at_TP, at_TD = line[:, None] * stride_x + place[None, :], line[:, None] * stride_b + within[None, :]
        at_c, at_out = line[:, None] * stride_c + within[None, :], line[:, None] * (heads * head_size) + place[None, :]
        at_TT = line[:, None] * (groups * BLOCK_T) + line[None, :]
        column, group = head * head_size, head // heads_per_group * size
        length = (end - start).to(tl.int32)
        for first in range(0, length, BLOCK_T):
            row = start + first
            below = line < length - first
            x_mask, d_mask = below[:, None] & inside[None, :], below[:, None] & used[None, :]
            x_TP = tl.load(x_THP + row * stride_x + column + at_TP, mask=x_mask, other=0.0)
            b_TD = tl.load(b_TGD + row * stride_b + group + at_TD, mask=d_mask, other=0.0)
            c_TD = tl.load(c_TGD + row * stride_c + group + at_c, mask=d_mask, other=0.0)
            step_T = tl.load(dt_TH + row * stride_dt + head + line * stride_dt, mask=below, other=0.0).to(tl.float32)
            step_T += bias
            if SOFTPLUS:
                step_T = softplus(step_T)
            step_T = tl.where(below, step_T, 0.0)
            run_T = tl.cumsum(step_T * a, 0)
            last = tl.sum(step_T * a, 0)
            pairs = pairs_TGT + (row * groups + head // heads_per_group) * BLOCK_T
            mix_TT = tl.load(pairs + at_TT, mask=below[:, None], other=0.0)
            gap_TT = tl.where(line[:, None] >= line[None, :], run_T[:, None] - run_T[None, :], float("-inf"))
            mix_TT *= tl.exp(gap_TT) * step_T[None, :]
            before_TP = tl.dot(c_TD, state_DP.to(c_TD.dtype), input_precision="ieee") * tl.exp(run_T)[:, None]
            y_TP = tl.dot(mix_TT.to(x_TP.dtype), x_TP, before_TP, input_precision="ieee")
            part_TP = (x_TP.to(tl.float32) * (step_T * tl.exp(last - run_T))[:, None]).to(b_TD.dtype)
            state_DP = tl.dot(tl.trans(b_TD), part_TP, state_DP * tl.exp(last), input_precision="ieee")
            gate_TP = x_TP.to(tl.float32)
            if HAS_GATE:
                at_gate = line[:, None] * stride_gate + place[None, :]
                gate = gate_THP + row * stride_gate + column
                gate_TP = tl.load(gate + at_gate, mask=x_mask, other=0.0).to(tl.float32)
            y_TP = _finish(y_TP, x_TP.to(tl.float32), gate_TP, skip, HAS_GATE)
            out = out_THP + (row * heads + head) * head_size
            tl.store(out + at_out, y_TP.to(out_THP.dtype.element_ty), mask=x_mask)
        if slot >= 0:
            tl.store(kept + at_DP, state_DP.to(states_SHPD.dtype.element_ty), mask=both)


@triton.jit
def _step(
    x_THP, dt_TH, a_H, b_TGD, c_TGD, skip_H, gate_THP, dt_bias_H, states_SHPD, starts_N1, slots_N, has_state_N, out_THP,
    stride_x, stride_dt, stride_b, stride_c, stride_gate, stride_slot, heads, heads_per_group, head_size, size,
    HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr, HAS_DT_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, end = tl.load(starts_N1 + sequence).to(tl.int64), tl.load(starts_N1 + sequence + 1).to(tl.int64)
    if end > row:
        slot = tl.load(slots_N + sequence).to(tl.int64)
        known = (tl.load(has_state_N + sequence).to(tl.int32) > 0).to(tl.int32) * (slot >= 0).to(tl.int32)
        place, within = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
        inside, used = place < head_size, within < size
        at_PD = (head * head_size + place)[:, None] * size + within[None, :]
        kept, both = states_SHPD + slot * stride_slot + at_PD, inside[:, None] & used[None, :]
        state_PD = tl.load(kept, mask=both & (at_PD * 0 + known > 0), other=0.0).to(tl.float32)
        step = tl.load(dt_TH + row * stride_dt + head).to(tl.float32)
        if HAS_DT_BIAS:
            step += tl.load(dt_bias_H + head).to(tl.float32)
        if SOFTPLUS:
            step = softplus(step)
        skip = 0.0
        if HAS_SKIP:
            skip = tl.load(skip_H + head).to(tl.float32)
        column, group = head * head_size + place, head // heads_per_group * size
        x_P = tl.load(x_THP + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
        b_D = tl.load(b_TGD + row * stride_b + group + within, mask=used, other=0.0).to(tl.float32)
        c_D = tl.load(c_TGD + row * stride_c + group + within, mask=used, other=0.0).to(tl.float32)
        state_PD = tl.exp(step * tl.load(a_H + head).to(tl.float32)) * state_PD + (step * x_P)[:, None] * b_D[None, :]
        y_P = tl.sum(state_PD * c_D[None, :], 1)
        gate_P = x_P
        if HAS_GATE:
            gate_P = tl.load(gate_THP + row * stride_gate + column, mask=inside, other=0.0).to(tl.float32)
        y_P = _finish(y_P, x_P, gate_P, skip, HAS_GATE)
        tl.store(out_THP + (row * heads + head) * head_size + place, y_P.to(out_THP.dtype.element_ty), mask=inside)
        if slot >= 0:
            tl.store(kept, state_PD.to(states_SHPD.dtype.element_ty), mask=both)


def ssd_scan(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGD: torch.Tensor,
    c_TGD: torch.Tensor,
    skip_H: torch.Tensor | None,
    gate_THP: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    dt_softplus: bool,
    states_SHPD: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    max_query_len: int,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `ssd_scan`. A slot's state must be dense; the host waits for nothing."""
    check_states(states_SHPD)
    (heads, head_size, size), groups = states_SHPD.shape[1:], b_TGD.shape[1]
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups")
    x_THP, dt_TH, b_TGD, c_TGD = (dense_rows(part) for part in (x_THP, dt_TH, b_TGD, c_TGD))
    gate = x_THP if gate_THP is None else dense_rows(gate_THP)
    out_THP = torch.empty(x_THP.shape, dtype=x_THP.dtype, device=x_THP.device)
    decoding = max_query_len == 1
    block_d = power_of_two(size, 16)
    config = configs.pick(
        "ssd_step" if decoding else "ssd_scan", device.architecture, size=block_d, itemsize=x_THP.element_size()
    )
    grid = (slots_N.shape[0], heads, cdiv(head_size, config.constants["BLOCK_P"]))
    skip, bias = (a_H if part is None else part for part in (skip_H, dt_bias_H))
    inputs = (x_THP, dt_TH, a_H, b_TGD, c_TGD, skip, gate, bias)
    tensors = (*inputs, states_SHPD, starts_N1, slots_N, has_state_N, out_THP)
    strides = [part.stride(0) for part in (x_THP, dt_TH, b_TGD, c_TGD, gate, states_SHPD)]
    sizes = (heads, heads // groups, head_size, size)
    flags = {"HAS_SKIP": skip_H is not None, "HAS_GATE": gate_THP is not None, "HAS_DT_BIAS": dt_bias_H is not None,
             "SOFTPLUS": dt_softplus, "BLOCK_D": block_d}  # fmt: skip
    if decoding:
        launch(_step, grid, *tensors, *strides, *sizes, **flags, config=config)
        return out_THP
    block_t = config.constants["BLOCK_T"]
    chunks = cdiv(max_query_len, block_t)
    pairs_TGT = torch.empty((x_THP.shape[0], groups, block_t), dtype=torch.float32, device=x_THP.device)
    launch(_pairs, (slots_N.shape[0] * chunks, groups), b_TGD, c_TGD, starts_N1, pairs_TGT, b_TGD.stride(0),
           c_TGD.stride(0), chunks, groups, size, BLOCK_D=block_d, BLOCK_T=block_t, num_warps=4)  # fmt: skip
    launch(_chunks, grid, *tensors, pairs_TGT, groups, *strides, *sizes, **flags, config=config)
    return out_THP


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size, most = query.attributes.get("state_size", 128), _LESS.get(device.architecture, MAX_STATE)
    return [f"a state of {size} is above {most}"] if size > most else []


def aot_cases() -> list[AotCase]:
    inputs = dict.fromkeys(("x_THP", "dt_TH", "b_TGD", "c_TGD", "gate_THP", "out_THP"), "*bf16:16")
    weights = dict.fromkeys(("a_H", "skip_H", "dt_bias_H", "states_SHPD"), "*fp32:16")
    places = {"starts_N1": "*i32:16", "slots_N": "*i32:16", "has_state_N": "*i1:16", "heads_per_group": "i32"}
    strides = dict.fromkeys(("stride_x", "stride_dt", "stride_b", "stride_c", "stride_gate", "stride_slot"), "i32:16")
    signature = {**inputs, **weights, **places, **strides, **dict.fromkeys(("heads", "head_size", "size"), "i32:16")}
    flags = {"HAS_SKIP": True, "HAS_GATE": True, "HAS_DT_BIAS": True, "SOFTPLUS": True}
    chunks = {**signature, "pairs_TGT": "*fp32:16", "groups": "i32"}
    kinds = (("chunks", _chunks, chunks, "ssd_scan"), ("step", _step, signature, "ssd_step"))
    pairs = {
        **{name: signature[name] for name in ("b_TGD", "c_TGD", "starts_N1", "stride_b", "stride_c", "size")},
        "out_TGT": "*fp32:16", "chunks": "i32", "groups": "i32",
    }  # fmt: skip
    block_t = configs.pick("ssd_scan", "default", size=128, itemsize=2).constants["BLOCK_T"]
    return [
        *(AotCase(name=f"{name}, state {size}", kernel=kernel, signature=names, constants={**flags, "BLOCK_D": size},
                  config=config, sizes={"size": size, "itemsize": 2},
                  only=None if size <= 128 else frozenset(TARGETS) - frozenset(_LESS))
          for name, kernel, names, config in kinds for size in (128, MAX_STATE)),
        AotCase(name="pairs, state 128", kernel=_pairs, signature=pairs, options={"num_warps": 4},
                constants={"BLOCK_D": 128, "BLOCK_T": block_t}),
    ]  # fmt: skip
