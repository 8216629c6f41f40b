"""Paged attention for a few tokens of each sequence, its context cut into parts that run side by side.

One program takes the query heads of one key-value head, for all tokens of the sequence in this step, over one part of
the context: grouped heads share every load. With more than one part, each writes its own result and the logarithm of
its sum, and `merge_parts` joins them. (Flash-decoding: Dao and others, 2023.)

    context   |---- part 0 ----|---- part 1 ----|-- part 2 --|     equal parts of the sequence's own length
    programs  (K, part, sequence): neighbours in the launch read neighbouring heads of the same blocks

Shape suffixes: T tokens, S sequences, H query heads, K key-value heads, D head size, M rows (tokens x grouped heads).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, power_of_two
from enginecore_triton.ops import _attention_aot
from enginecore_triton.ops._call import AttentionCall
from enginecore_triton.ops._tile import LOG2E, attend_tiles, first_visible, load_scale
from enginecore_triton.ops.merge_parts import merge_parts, part_length

#: Tokens of one sequence in a step up to which this kernel takes it: a token, or a token and its drafts.
MAX_QUERY = 8
#: A part shorter than this costs more to merge than it gains.
LEAST_PART = 128


@triton.jit(do_not_specialize=["num_parts", "window", "stride_table"])
def _paged_decode(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, part_ptr, log_ptr, key_scale_ptr, value_scale_ptr,
    sinks_ptr, slopes_ptr, scale, soft_cap, window, num_parts,
    stride_q_token, stride_q_head, stride_block, stride_side, stride_head, stride_table, stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, SPLIT: tl.constexpr, CAUSAL: tl.constexpr, HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    length = tl.load(lengths_ptr + sequence)
    if (queries == 0) | (queries > QUERIES):
        return  # nothing to do, or the prefill kernel's
    first_position = length - queries
    begin = first_visible(first_position, window, BLOCK_N)
    if SPLIT:
        size = part_length(length - begin, num_parts, LEAST, BLOCK_N)
        begin += part * size
        end = tl.minimum(begin + size, length)
        if begin >= length:
            return
    else:
        end = length

    row_M = tl.arange(0, BLOCK_M)
    query_M, head_M = row_M // GROUP, kv_head * GROUP + row_M % GROUP
    valid_M = query_M < queries
    position_M = first_position + query_M
    offs_D = tl.arange(0, BLOCK_D)
    mask_MD = valid_M[:, None] & (offs_D < HEAD_SIZE)[None, :]
    token_M = (first_token + query_M).to(tl.int64)
    q_pointers = q_ptr + (token_M * stride_q_token + head_M * stride_q_head)[:, None] + offs_D[None, :]
    q_MD = tl.load(q_pointers, mask=mask_MD, other=0.0)

    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (the first is settled when this is compiled)
        if part == 0:  # a sink is one more key without a value, and must count once
            top_M = tl.load(sinks_ptr + head_M, mask=valid_M, other=0.0).to(tl.float32) * LOG2E
            total_M += 1.0
    slope_M = None
    if slopes_ptr is not None:
        slope_M = tl.load(slopes_ptr + head_M, mask=valid_M, other=0.0).to(tl.float32)
    scale *= load_scale(key_scale_ptr, kv_head, FORMAT, NATIVE_FP8)

    sum_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key_ptr = cache_ptr + kv_head.to(tl.int64) * stride_head
    value_ptr = key_ptr + stride_side
    table_ptr += sequence.to(tl.int64) * stride_table
    if window is None:
        # What the first token sees, all tokens see: whole tiles of that need no mask.
        open_end = (first_position + 1 if CAUSAL else length) // BLOCK_N * BLOCK_N
        open_end = tl.minimum(open_end, end)
        sum_MD, top_M, total_M = attend_tiles(
            q_MD, sum_MD, top_M, total_M, key_ptr, value_ptr, table_ptr, stride_block, begin, open_end, length,
            position_M, scale, soft_cap, window, slope_M, False, CAUSAL, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, FORMAT,
            NATIVE_FP8, BLOCK_N, False,
        )  # fmt: skip
        begin = tl.maximum(open_end, begin)
    sum_MD, top_M, total_M = attend_tiles(
        q_MD, sum_MD, top_M, total_M, key_ptr, value_ptr, table_ptr, stride_block, begin, end, length, position_M,
        scale, soft_cap, window, slope_M, True, CAUSAL, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, FORMAT, NATIVE_FP8, BLOCK_N,
        window is None,
    )  # fmt: skip

    value_scale = load_scale(value_scale_ptr, kv_head, FORMAT, NATIVE_FP8)
    # A part that a row sees nothing of has the sum 0 and a maximum of minus infinity: it weighs nothing in the merge.
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    out_MD = sum_MD * (value_scale / total_M)[:, None]
    if SPLIT:
        # part_ptr [S, QUERIES, H, parts, D] and log_ptr [S, QUERIES, H, parts], float32
        heads = tl.num_programs(0) * GROUP
        at_M = ((sequence * QUERIES + query_M) * heads + head_M).to(tl.int64) * num_parts + part
        tl.store(part_ptr + at_M[:, None] * HEAD_SIZE + offs_D[None, :], out_MD, mask=mask_MD)
        tl.store(log_ptr + at_M, top_M + tl.log2(total_M), mask=valid_M)
    else:
        out_pointers = out_ptr + (token_M * stride_out_token + head_M * stride_out_head)[:, None] + offs_D[None, :]
        tl.store(out_pointers, out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


@cache
def parts_for(sequences: int, kv_heads: int, longest: int, group: int, itemsize: int, device: DeviceDescription) -> int:
    """Into how many parts to cut each context, from what the host knows.

    The cheapest of a simple model. Programs fill the multiprocessors in waves; those of a last, partial wave share the
    memory's bandwidth among fewer and are quicker, down to `_LONELY` of a wave. Every part adds what writing and
    reading its float32 result costs, as a fraction of the keys and values that are read anyway.
    """
    slots = device.multiprocessors * _RESIDENT
    most = max(1, min(cdiv(longest, LEAST_PART), _MOST_PARTS))
    merge = group * 8 / (max(longest, 1) * 2 * itemsize)
    best, cheapest = 1, float("inf")
    for parts in range(1, most + 1):
        waves = sequences * kv_heads * parts / slots
        rest = waves % 1
        cost = (waves - rest + (max(rest, _LONELY) if rest else 0)) / waves + (parts * merge if parts > 1 else 0)
        if cost < cheapest * 0.98:  # more parts must be worth it
            best, cheapest = parts, cost
    return best


#: Programs of this kernel that a multiprocessor is expected to hold at once, and the most parts of a context.
_RESIDENT = 3
_MOST_PARTS = 64
#: How long a wave of a few programs takes, against a full one.
_LONELY = 0.6


def paged_decode(call: AttentionCall, out_THD: torch.Tensor, queries: int, *, device: DeviceDescription) -> None:
    """Attention of every sequence that has at most `queries` tokens in this step; the rows of others stay."""
    sequences, heads, kv_heads = call.num_seqs, call.num_heads, call.num_kv_heads
    group = heads // kv_heads
    block_m = power_of_two(group * queries, 16)
    config = configs.pick("paged_decode", device.architecture, **call.sizes, rows=block_m)
    parts = parts_for(sequences, kv_heads, call.max_seq_len, group, call.cache.element_size(), device)
    least = max(LEAST_PART, config.constants["BLOCK_N"])
    part = log = out_THD
    if parts > 1:
        shape = (sequences, queries, heads, parts)
        part = torch.empty((*shape, call.head_size), dtype=torch.float32, device=out_THD.device)
        log = torch.empty(shape, dtype=torch.float32, device=out_THD.device)
    _paged_decode[(kv_heads, parts, sequences)](
        call.query, call.cache, call.block_table, call.seq_lens, call.query_start_loc, out_THD, part, log,
        call.key_scale, call.value_scale, call.sinks, call.slopes, call.scale, call.soft_cap, call.window, parts,
        *call.strides, out_THD.stride(0), out_THD.stride(1),
        GROUP=group, QUERIES=queries, SPLIT=parts > 1, CAUSAL=call.causal, HEAD_SIZE=call.head_size,
        BLOCK_D=call.block_d, BLOCK_SIZE=call.block_size, FORMAT=call.format, NATIVE_FP8=device.native_fp8,
        LEAST=least, BLOCK_M=block_m, **config.keywords,
    )  # fmt: skip
    if parts > 1:
        tile = config.constants["BLOCK_N"]
        merge_parts(part, log, call.seq_lens, call.query_start_loc, out_THD, call.window, tile, least)


def aot_cases() -> list[AotCase]:
    return _attention_aot.decode_cases(_paged_decode, LEAST_PART)
