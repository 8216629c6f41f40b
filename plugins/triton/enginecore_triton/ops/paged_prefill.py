"""Paged attention for prompts and their chunks: causal over a cached prefix, sequences of any length in one launch.

One program takes BLOCK_Q tokens of one sequence with all query heads of one key-value head: rows are (token, grouped
head), so grouped heads share every load. Sequence i has its blocks from query_start_loc[i] // BLOCK_Q + i on; the host,
which does not know the lengths, launches T // BLOCK_Q + S programs, and those past a sequence's end stop at once. The
last blocks of a prompt see most and are launched first.

A few tokens behind a long cached prefix (the next turn of a chat, the last chunk of a prompt) make fewer programs than
the device has multiprocessors. Where such a sequence is alone in its step, its context is cut into parts as in
`paged_decode`: see `parts_for_prompt`.

Shape suffixes: T tokens, S sequences, H query heads, K key-value heads, D head size, M rows (tokens x grouped heads).
"""

from __future__ import annotations

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


@triton.jit
def _find_sequence(starts_ptr, block, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first block is at most `block`."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "num_parts", "window", "stride_table"])
def _paged_prefill(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, part_ptr, log_ptr, key_scale_ptr, value_scale_ptr,
    sinks_ptr, slopes_ptr, scale, soft_cap, window, num_seqs, num_parts,
    stride_q_token, stride_q_head, stride_block, stride_side, stride_head, stride_table, stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr, FEWEST: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, CAUSAL: tl.constexpr,
    HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """FEWEST: sequences with fewer tokens in this step are the decode kernel's. SPLIT: there is one sequence, the third
    axis are parts of its context."""
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    block, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = _find_sequence(starts_ptr, block, num_seqs, BLOCK_Q)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    begin_query = (block - (first_token // BLOCK_Q + sequence)) * BLOCK_Q
    if (begin_query >= queries) | (queries < FEWEST):
        return
    length = tl.load(lengths_ptr + sequence)
    first_position = length - queries + begin_query
    part = tl.program_id(2)
    part_begin, part_end = 0, length
    if SPLIT:
        part_begin = first_visible(length - queries, window, BLOCK_N)
        part_size = part_length(length - part_begin, num_parts, LEAST, BLOCK_N)
        part_begin += part * part_size
        part_end = tl.minimum(part_begin + part_size, length)
        if part_begin >= length:
            return

    row_M = tl.arange(0, BLOCK_M)
    query_M, head_M = begin_query + row_M // GROUP, kv_head * GROUP + row_M % GROUP
    valid_M = (query_M < queries) & (row_M < BLOCK_Q * GROUP)
    position_M = first_position + row_M // GROUP
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
    begin = first_visible(first_position, window, BLOCK_N)
    end = tl.minimum(first_position + BLOCK_Q, length) if CAUSAL else length
    if SPLIT:
        begin, end = tl.maximum(begin, part_begin), tl.minimum(end, part_end)
    if window is None:
        # What the first token sees, all tokens see: whole tiles of that need no mask.
        open_end = (first_position + 1 if CAUSAL else length) // BLOCK_N * BLOCK_N
        if SPLIT:
            open_end = tl.maximum(tl.minimum(open_end, end), begin)
        sum_MD, top_M, total_M = attend_tiles(
            q_MD, sum_MD, top_M, total_M, key_ptr, value_ptr, table_ptr, stride_block, begin, open_end, length,
            position_M, scale, soft_cap, window, slope_M, False, CAUSAL, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, FORMAT,
            NATIVE_FP8, BLOCK_N, False,
        )  # fmt: skip
        begin = open_end
    sum_MD, top_M, total_M = attend_tiles(
        q_MD, sum_MD, top_M, total_M, key_ptr, value_ptr, table_ptr, stride_block, begin, end, length, position_M,
        scale, soft_cap, window, slope_M, True, CAUSAL, HEAD_SIZE, BLOCK_D, BLOCK_SIZE, FORMAT, NATIVE_FP8, BLOCK_N,
        False,
    )  # fmt: skip

    value_scale = load_scale(value_scale_ptr, kv_head, FORMAT, NATIVE_FP8)
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    out_MD = sum_MD * (value_scale / total_M)[:, None]
    if SPLIT:
        # part_ptr [1, T, H, parts, D] and log_ptr [1, T, H, parts], float32; what sees nothing of a part weighs nothing
        at_M = (query_M * (tl.num_programs(1) * GROUP) + head_M).to(tl.int64) * num_parts + part
        tl.store(part_ptr + at_M[:, None] * HEAD_SIZE + offs_D[None, :], out_MD, mask=mask_MD)
        tl.store(log_ptr + at_M, top_M + tl.log2(total_M), mask=valid_M)
    else:
        out_pointers = out_ptr + (token_M * stride_out_token + head_M * stride_out_head)[:, None] + offs_D[None, :]
        tl.store(out_pointers, out_MD.to(out_ptr.dtype.element_ty), mask=mask_MD)


#: A part shorter than this costs more to merge than it gains, and the most parts of a context.
LEAST_PART = 512
_MOST_PARTS = 16


def parts_for_prompt(programs: int, longest: int, device: DeviceDescription) -> int:
    """Into how many parts to cut the context of a prompt that makes so many programs: 1 unless they leave half of the
    multiprocessors or more without work."""
    return max(1, min(device.multiprocessors // max(programs, 1), cdiv(longest, LEAST_PART), _MOST_PARTS))


def paged_prefill(call: AttentionCall, out_THD: torch.Tensor, fewest: int, *, device: DeviceDescription) -> None:
    """Attention of every sequence that has at least `fewest` tokens in this step; the rows of others stay."""
    group = call.num_heads // call.num_kv_heads
    config = configs.pick("paged_prefill", device.architecture, **call.sizes)
    keywords = config.keywords
    block_m = keywords.pop("BLOCK_M")
    if group > block_m:
        block_m = power_of_two(group)
    tokens, tile = call.query.shape[0], config.constants["BLOCK_N"]
    blocks, parts = tokens // (block_m // group) + call.num_seqs, 1
    part = log = out_THD
    if call.num_seqs == 1:
        needed = cdiv(tokens, block_m // group)  # one sequence has no block but those that it fills
        blocks, parts = needed, parts_for_prompt(needed * call.num_kv_heads, call.max_seq_len, device)
    if parts > 1:
        shape = (1, power_of_two(tokens), call.num_heads, parts)
        part = torch.empty((*shape, call.head_size), dtype=torch.float32, device=out_THD.device)
        log = torch.empty(shape, dtype=torch.float32, device=out_THD.device)
    _paged_prefill[(blocks, call.num_kv_heads, parts)](
        call.query, call.cache, call.block_table, call.seq_lens, call.query_start_loc, out_THD, part, log,
        call.key_scale, call.value_scale, call.sinks, call.slopes, call.scale, call.soft_cap, call.window,
        call.num_seqs, parts, *call.strides, out_THD.stride(0), out_THD.stride(1),
        GROUP=group, FEWEST=fewest, SPLIT=parts > 1, LEAST=LEAST_PART, CAUSAL=call.causal, HEAD_SIZE=call.head_size,
        BLOCK_D=call.block_d, BLOCK_SIZE=call.block_size, FORMAT=call.format, NATIVE_FP8=device.native_fp8,
        BLOCK_M=block_m, **keywords,
    )  # fmt: skip
    if parts > 1:
        merge_parts(part, log, call.seq_lens, call.query_start_loc, out_THD, call.window, tile, LEAST_PART)


def aot_cases() -> list[AotCase]:
    return _attention_aot.prefill_cases(_paged_prefill, LEAST_PART)
