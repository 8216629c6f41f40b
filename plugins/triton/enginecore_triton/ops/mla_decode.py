"""Decode over a cache of latents (multi-head latent attention with the up-projections absorbed into the queries).

All heads share one cached row a token: LATENT numbers, which are key and value both, then ROPE numbers, which are key
only (DeepSeek-V2, arXiv:2405.04434: 512 and 64). So a tile is loaded once and serves twice. Contexts are cut into parts
as in `paged_decode`.

Shape suffixes: T tokens, S sequences, H query heads, M rows (tokens x heads of one program), N cached positions,
L latent, R rotary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.attention import AttentionMetadata
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, power_of_two
from enginecore_triton.ops._tile import LOG2E, load_blocks, softmax_step
from enginecore_triton.ops.merge_parts import merge_parts, part_length
from enginecore_triton.ops.paged_decode import LEAST_PART, MAX_QUERY, parts_for
from enginecore_triton.targets import TARGETS

#: Matrix instructions there want every operand twice: sixteen rows of 512 alone fill the registers.
_TOO_FEW_REGISTERS = frozenset({"gfx1100"})


@triton.jit
def _attend_latents(
    latent_ML, rope_MR, sum_ML, top_M, total_M, cache_ptr, table_ptr, stride_block, start, end, length, position_M,
    scale,
    MASKED: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_L, offs_R = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    block_N = load_blocks(table_ptr, start, length, BLOCK_SIZE, BLOCK_N)  # one tile ahead, as in ops/_tile.py
    for tile in tl.range(start, end, BLOCK_N, num_stages=1 if MASKED else None):  # masked: the last tile or two
        position_N = tile + tl.arange(0, BLOCK_N)
        row_N = block_N.to(tl.int64) * stride_block + (position_N % BLOCK_SIZE) * (LATENT + ROPE)
        block_N = load_blocks(table_ptr, tile + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        if MASKED:
            inside_N1 = (position_N < length)[:, None]
            latent_NL = tl.load(cache_ptr + row_N[:, None] + offs_L[None, :], mask=inside_N1, other=0.0)
            rope_NR = tl.load(cache_ptr + row_N[:, None] + offs_R[None, :], mask=inside_N1, other=0.0)
        else:
            latent_NL = tl.load(cache_ptr + row_N[:, None] + offs_L[None, :])
            rope_NR = tl.load(cache_ptr + row_N[:, None] + offs_R[None, :])
        latent_NL, rope_NR = latent_NL.to(latent_ML.dtype), rope_NR.to(rope_MR.dtype)
        scores_MN = tl.dot(latent_ML, tl.trans(latent_NL), input_precision="ieee")
        scores_MN = tl.dot(rope_MR, tl.trans(rope_NR), scores_MN, input_precision="ieee")
        scores_MN *= scale * LOG2E
        if MASKED:
            scores_MN = tl.where(position_N[None, :] <= position_M[:, None], scores_MN, float("-inf"))
        weights_MN, past_M, top_M, total_M = softmax_step(scores_MN, top_M, total_M, MASKED)
        weights_MN = weights_MN.to(latent_ML.dtype)
        sum_ML = tl.dot(weights_MN, latent_NL, sum_ML * past_M[:, None], input_precision="ieee")
    return sum_ML, top_M, total_M


@triton.jit(do_not_specialize=["num_parts", "stride_table"])
def _mla_decode(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, part_ptr, log_ptr, scale, num_parts, heads,
    stride_q_token, stride_q_head, stride_block, stride_table, stride_out_token, stride_out_head,
    QUERIES: tl.constexpr, SPLIT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    LEAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Axes: rows (token, head) in pieces of BLOCK_M; parts; sequences. LATENT and ROPE are powers of two."""
    piece, part, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    length = tl.load(lengths_ptr + sequence)
    if (queries == 0) | (queries > QUERIES):
        return
    first_position, begin, end = length - queries, 0, length
    if SPLIT:
        size = part_length(length, num_parts, LEAST, BLOCK_N)
        begin = part * size
        end = tl.minimum(begin + size, length)
        if begin >= length:
            return
    row_M = piece * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M, head_M = row_M // heads, row_M % heads
    valid_M = query_M < queries
    token_M = (first_token + query_M).to(tl.int64)
    offs_L, offs_R = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    q_M1 = (q_ptr + token_M * stride_q_token + head_M * stride_q_head)[:, None]
    latent_ML = tl.load(q_M1 + offs_L[None, :], mask=valid_M[:, None], other=0.0)
    rope_MR = tl.load(q_M1 + offs_R[None, :], mask=valid_M[:, None], other=0.0)
    position_M = first_position + query_M
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sum_ML = tl.zeros([BLOCK_M, LATENT], tl.float32)
    table_ptr += sequence.to(tl.int64) * stride_table
    open_end = tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, end)
    sum_ML, top_M, total_M = _attend_latents(
        latent_ML, rope_MR, sum_ML, top_M, total_M, cache_ptr, table_ptr, stride_block, begin, open_end, length,
        position_M, scale, False, LATENT, ROPE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    sum_ML, top_M, total_M = _attend_latents(
        latent_ML, rope_MR, sum_ML, top_M, total_M, cache_ptr, table_ptr, stride_block, tl.maximum(open_end, begin),
        end, length, position_M, scale, True, LATENT, ROPE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    total_M = tl.where(total_M == 0.0, 1.0, total_M)
    out_ML = sum_ML * (1.0 / total_M)[:, None]
    if SPLIT:
        at_M = ((sequence * QUERIES + query_M) * heads + head_M).to(tl.int64) * num_parts + part
        tl.store(part_ptr + at_M[:, None] * LATENT + offs_L[None, :], out_ML, mask=valid_M[:, None])
        tl.store(log_ptr + at_M, top_M + tl.log2(total_M), mask=valid_M)
    else:
        out_M1 = (out_ptr + token_M * stride_out_token + head_M * stride_out_head)[:, None]
        tl.store(out_M1 + offs_L[None, :], out_ML.to(out_ptr.dtype.element_ty), mask=valid_M[:, None])


def mla_decode(
    query_THD: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, scale: float, latent: int,
    out_THL: torch.Tensor | None = None, *, queries: int | None = None, device: DeviceDescription,
) -> torch.Tensor:  # fmt: skip
    """Attention [T, H, latent] of queries [T, H, latent + rope] over a cache [blocks, block_size, latent + rope].

    Causal, for steps of at most MAX_QUERY tokens of each sequence; both sizes must be powers of two of at least 16.
    `queries` (a power of two): sequences with more tokens than that are left to others.
    """
    tokens, heads, width = query_THD.shape
    queries = power_of_two(metadata.max_query_len) if queries is None else queries
    if queries > MAX_QUERY:
        raise ValueError(f"mla_decode takes up to {MAX_QUERY} tokens of a sequence, got {metadata.max_query_len}")
    out = query_THD.new_empty(tokens, heads, latent) if out_THL is None else out_THL
    sequences, rope = metadata.seq_lens.shape[0], width - latent
    if not tokens or not sequences:
        return out
    sizes = {"rows": power_of_two(queries * heads, 16)}
    config = configs.pick("mla_decode", device.architecture, **sizes)
    block_m, block_n = config.constants["BLOCK_M"], config.constants["BLOCK_N"]
    pieces = cdiv(queries * heads, block_m)
    parts = parts_for(sequences, pieces, metadata.max_seq_len, block_m, cache.element_size(), device)
    part = log = out
    if parts > 1:
        part = torch.empty(sequences, queries, heads, parts, latent, dtype=torch.float32, device=out.device)
        log = torch.empty(sequences, queries, heads, parts, dtype=torch.float32, device=out.device)
    _mla_decode[(pieces, parts, sequences)](
        query_THD, cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc, out, part, log, scale,
        parts, heads, *query_THD.stride()[:2], cache.stride(0), metadata.block_table.stride(0), *out.stride()[:2],
        QUERIES=queries, SPLIT=parts > 1, LATENT=latent, ROPE=rope, BLOCK_SIZE=cache.shape[1],
        LEAST=LEAST_PART, **config.keywords,
    )  # fmt: skip
    if parts > 1:
        merge_parts(part, log, metadata.seq_lens, metadata.query_start_loc, out, None, block_n, LEAST_PART)
    return out


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    if device.architecture in _TOO_FEW_REGISTERS:
        return [f"{device.architecture} has too few registers for latents of 512"]
    return []


def aot_cases() -> list[AotCase]:
    pointers = dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16:16")
    pointers |= {"table_ptr": "*i32:16", "lengths_ptr": "*i32:16", "starts_ptr": "*i32:16"}
    pointers |= {"part_ptr": "*fp32:16", "log_ptr": "*fp32:16"}
    strides = {f"stride_{name}": "i32:16" for name in ("q_token", "q_head", "block", "out_token", "out_head")}
    scalars = {"scale": "fp32", "num_parts": "i32", "heads": "i32:16", "stride_table": "i32"}

    def case(rows: int, block_size: int) -> AotCase:
        return AotCase(
            name=f"bf16, 512 and 64, {rows} heads, blocks of {block_size}", kernel=_mla_decode,
            signature={**pointers, **strides, **scalars}, config="mla_decode",
            sizes={"rows": rows}, only=frozenset(TARGETS) - _TOO_FEW_REGISTERS,
            constants={
                "QUERIES": 1, "SPLIT": True, "LATENT": 512, "ROPE": 64, "BLOCK_SIZE": block_size, "LEAST": LEAST_PART,
            },
        )  # fmt: skip

    return [case(16, 16), case(128, 64)]
