"""Prompts over a cache of latents, with the tiles of `mla_decode`.

Rows are (token, head) pairs of a sequence, heads fastest, cut into pieces of BLOCK_M, since all heads share the cached
rows. A piece reads up to its own last token.

Queries are in the latents' space here as in decoding, which costs (2 L + R) / (N + R + V) times the arithmetic of heads
that are expanded (3.4 for DeepSeek-V3) and no memory for expanded keys and values.

Shape suffixes: T tokens, S sequences, H query heads, M rows, L latent, R rotary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.attention import AttentionMetadata

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.ops import mla_decode as decode
from enginecore_triton.ops.mla_decode import _attend_latents
from enginecore_triton.targets import TARGETS


@triton.jit
def _find_rows(starts_ptr, heads, block, num_seqs, BLOCK_M: tl.constexpr):
    """The last sequence whose first piece is at most `block`; each may have one piece more than its rows fill."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle) * heads // BLOCK_M + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def _mla_prefill(
    q_ptr, cache_ptr, table_ptr, lengths_ptr, starts_ptr, out_ptr, scale, num_seqs, heads,
    stride_q_token, stride_q_head, stride_block, stride_table, stride_out_token, stride_out_head,
    FEWEST: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """FEWEST: sequences with fewer tokens in this step are the decode kernel's."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    sequence = _find_rows(starts_ptr, heads, block, num_seqs, BLOCK_M)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    begin_row = (block - (first_token * heads // BLOCK_M + sequence)) * BLOCK_M
    if (begin_row >= queries * heads) | (queries < FEWEST):
        return
    length = tl.load(lengths_ptr + sequence)
    row_M = begin_row + tl.arange(0, BLOCK_M)
    query_M, head_M = row_M // heads, row_M % heads
    valid_M = query_M < queries
    token_M = (first_token + query_M).to(tl.int64)
    offs_L, offs_R = tl.arange(0, LATENT), LATENT + tl.arange(0, ROPE)
    q_M1 = (q_ptr + token_M * stride_q_token + head_M * stride_q_head)[:, None]
    latent_ML = tl.load(q_M1 + offs_L[None, :], mask=valid_M[:, None], other=0.0)
    rope_MR = tl.load(q_M1 + offs_R[None, :], mask=valid_M[:, None], other=0.0)
    position_M = length - queries + query_M
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sum_ML = tl.zeros([BLOCK_M, LATENT], tl.float32)
    table_ptr += sequence.to(tl.int64) * stride_table
    # What the first token of the piece sees all of them see, and nobody sees past the last.
    open_end = (length - queries + begin_row // heads + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length - queries + (begin_row + BLOCK_M - 1) // heads + 1, length)
    sum_ML, top_M, total_M = _attend_latents(
        latent_ML, rope_MR, sum_ML, top_M, total_M, cache_ptr, table_ptr, stride_block, 0, open_end, length,
        position_M, scale, False, LATENT, ROPE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    sum_ML, top_M, total_M = _attend_latents(
        latent_ML, rope_MR, sum_ML, top_M, total_M, cache_ptr, table_ptr, stride_block, open_end, end, length,
        position_M, scale, True, LATENT, ROPE, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    out_ML = sum_ML * (1.0 / tl.where(total_M == 0.0, 1.0, total_M))[:, None]
    out_M1 = (out_ptr + token_M * stride_out_token + head_M * stride_out_head)[:, None]
    tl.store(out_M1 + offs_L[None, :], out_ML.to(out_ptr.dtype.element_ty), mask=valid_M[:, None])


def mla_prefill(
    query_THW: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, scale: float, out_THL: torch.Tensor,
    fewest: int, *, device: DeviceDescription,
) -> None:  # fmt: skip
    """Attention of every sequence with at least `fewest` tokens in this step; the rows of others stay."""
    tokens, heads, width = query_THW.shape
    sequences, latent = metadata.seq_lens.shape[0], out_THL.shape[2]
    config = configs.pick("mla_decode", device.architecture, rows=tokens * heads)
    blocks = tokens * heads // config.constants["BLOCK_M"] + sequences
    _mla_prefill[(blocks,)](
        query_THW, cache, metadata.block_table, metadata.seq_lens, metadata.query_start_loc, out_THL, scale, sequences,
        heads, *query_THW.stride()[:2], cache.stride(0), metadata.block_table.stride(0), *out_THL.stride()[:2],
        FEWEST=fewest, LATENT=latent, ROPE=width - latent, BLOCK_SIZE=cache.shape[1], **config.keywords,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    pointers = dict.fromkeys(("q_ptr", "cache_ptr", "out_ptr"), "*bf16:16")
    pointers |= {"table_ptr": "*i32:16", "lengths_ptr": "*i32:16", "starts_ptr": "*i32:16"}
    strides = {f"stride_{name}": "i32:16" for name in ("q_token", "q_head", "block", "out_token", "out_head")}
    scalars = {"scale": "fp32", "num_seqs": "i32", "heads": "i32:16", "stride_table": "i32"}
    return [
        AotCase(
            name="bf16, 512 and 64, prompts, blocks of 64", kernel=_mla_prefill, config="mla_decode",
            signature={**pointers, **strides, **scalars}, sizes={"rows": 1 << 20},
            only=frozenset(TARGETS) - decode._TOO_FEW_REGISTERS,
            constants={"FEWEST": 2, "LATENT": 512, "ROPE": 64, "BLOCK_SIZE": 64},
        )
    ]  # fmt: skip
