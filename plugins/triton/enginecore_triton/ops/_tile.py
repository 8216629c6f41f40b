"""What all attention kernels share: one pass of online softmax over tiles of a paged cache.

The cache of one attention call is [blocks, 2 (keys, values), K, block_size, D], so what one program reads of a block is
one contiguous piece. For int8 each of those pieces is block_size rows of D codes, then block_size float32 scales.

Shape suffixes: M rows (tokens of the step x query heads of one key-value head), N cached positions, D head size.
Online softmax: Milakov and Gimelshein, arXiv:1805.02867; tiles: Dao, arXiv:2307.08691. Scores are kept in units of
log2, because exp2 is what the hardware has.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def unpack(raw, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, dtype: tl.constexpr):
    """Cached numbers as `dtype`. In software e4m3 comes out 2^-8 too small: see `load_scale`.

    An e4m3 moved into the bits of a float16 keeps its value, denormals included, but for the difference of the biases
    of the exponents (15 - 7); an e5m2 is the upper half of a float16.
    """
    if FORMAT == "float8_e4m3fn":
        if NATIVE_FP8:
            return raw.to(tl.float8e4nv, bitcast=True).to(dtype)
        wide = raw.to(tl.uint16)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    elif FORMAT == "float8_e5m2":
        return (raw.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        return raw.to(dtype)


@triton.jit
def load_scale(scale_ptr, head, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr):
    """What unpacked numbers of `head` are to be multiplied with, 1 where the format has no scale."""
    if FORMAT == "float8_e4m3fn" or FORMAT == "float8_e5m2":
        scale = tl.load(scale_ptr + head)
        return scale * 256.0 if FORMAT == "float8_e4m3fn" and not NATIVE_FP8 else scale
    else:
        return 1.0


@triton.jit
def load_rows(
    side_ptr, row_N, inside_N, offs_D, MASKED: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """[N, D] of the cache; 0 where MASKED and not `inside_N`: what lies there may be NaN."""
    pointers = side_ptr + row_N[:, None] + offs_D[None, :]
    if MASKED:
        if BLOCK_D == HEAD_SIZE:
            return tl.load(pointers, mask=inside_N[:, None], other=0)
        else:
            return tl.load(pointers, mask=inside_N[:, None] & (offs_D < HEAD_SIZE)[None, :], other=0)
    else:
        if BLOCK_D == HEAD_SIZE:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(offs_D < HEAD_SIZE)[None, :], other=0)


@triton.jit
def load_row_scales(side_ptr, row_N, inside_N, place_N, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The float32 scale of each cached row of an int8 cache; `row_N` is where its codes start."""
    start_N = row_N - place_N * HEAD_SIZE + BLOCK_SIZE * HEAD_SIZE
    return tl.load((side_ptr + start_N).to(tl.pointer_type(tl.float32)) + place_N, mask=inside_N, other=0.0)


@triton.jit
def bend(scores_MN, scale, soft_cap, slope_M, distance_MN):
    """Scores in units of log2 from dot products: scaled, capped, biased."""
    if soft_cap is not None:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is 1 long before the exponential overflows.
        scores_MN = tl.minimum(scores_MN * (2.0 * LOG2E * scale / soft_cap), 60.0)
        scores_MN = (1.0 - 2.0 / (tl.exp2(scores_MN) + 1.0)) * (soft_cap * LOG2E)
    else:
        scores_MN = scores_MN * (scale * LOG2E)
    if slope_M is not None:
        scores_MN += (slope_M * LOG2E)[:, None] * distance_MN
    return scores_MN


@triton.jit
def softmax_step(scores_MN, top_M, total_M, MASKED: tl.constexpr):
    """(weights, what the past is worth now, new maximum, new sum)."""
    new_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    # A row that has seen no visible key yet stays at minus infinity; its weights are 0, not NaN.
    base_M = tl.where(new_M == float("-inf"), 0.0, new_M) if MASKED else new_M
    weights_MN = tl.exp2(scores_MN - base_M[:, None])
    past_M = tl.exp2(top_M - base_M)
    return weights_MN, past_M, new_M, total_M * past_M + tl.sum(weights_MN, 1)


@triton.jit
def load_blocks(table_ptr, tile, length, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block of each position of a tile: one number where the tile lies in one block (both are powers of two)."""
    if BLOCK_N <= BLOCK_SIZE:
        return tl.load(table_ptr + tile // BLOCK_SIZE, mask=tile < length, other=0)
    else:
        position_N = tile + tl.arange(0, BLOCK_N)
        return tl.load(table_ptr + position_N // BLOCK_SIZE, mask=position_N < length, other=0)


@triton.jit
def attend_tiles(
    q_MD, sum_MD, top_M, total_M, key_ptr, value_ptr, table_ptr, stride_block, start, end, length, position_M,
    scale, soft_cap, window, slope_M,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8: tl.constexpr, BLOCK_N: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Attend positions `start` (a multiple of BLOCK_N) to `end`; without MASKED all of them are visible to all rows.

    `key_ptr`, `value_ptr`: the head's piece of block 0; `table_ptr`: the sequence's row of the block table; `length`:
    positions that are filled; `position_M`: where each row's token stands. Products of float32 stay float32.
    ONE: a tile or two, for which it is not worth having several in flight.
    """
    offs_D = tl.arange(0, BLOCK_D)
    # A tile's place in the table is read one tile ahead: a load whose address comes from another load of the same round
    # keeps the compiler from having several rounds in flight.
    block_N = load_blocks(table_ptr, start, length, BLOCK_SIZE, BLOCK_N)
    for tile in tl.range(start, end, BLOCK_N, num_stages=1 if ONE else None):
        position_N = tile + tl.arange(0, BLOCK_N)
        inside_N = position_N < length
        place_N = position_N % BLOCK_SIZE
        row_N = block_N.to(tl.int64) * stride_block + place_N * HEAD_SIZE
        block_N = load_blocks(table_ptr, tile + BLOCK_N, length, BLOCK_SIZE, BLOCK_N)
        raw_ND = load_rows(key_ptr, row_N, inside_N, offs_D, MASKED, HEAD_SIZE, BLOCK_D)
        key_ND = unpack(raw_ND, FORMAT, NATIVE_FP8, q_MD.dtype)
        scores_MN = tl.dot(q_MD, tl.trans(key_ND), input_precision="ieee")
        if FORMAT == "int8":
            scores_MN *= load_row_scales(key_ptr, row_N, inside_N, place_N, HEAD_SIZE, BLOCK_SIZE)[None, :]
        distance_MN = (position_N[None, :] - position_M[:, None]).to(tl.float32)
        scores_MN = bend(scores_MN, scale, soft_cap, slope_M, distance_MN)
        if MASKED:
            seen_MN = inside_N[None, :]
            if CAUSAL:
                seen_MN = seen_MN & (position_N[None, :] <= position_M[:, None])
            if window is not None:
                seen_MN = seen_MN & (position_N[None, :] > position_M[:, None] - window)
            scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))
        weights_MN, past_M, top_M, total_M = softmax_step(scores_MN, top_M, total_M, MASKED)
        sum_MD = sum_MD * past_M[:, None]
        if FORMAT == "int8":
            weights_MN *= load_row_scales(value_ptr, row_N, inside_N, place_N, HEAD_SIZE, BLOCK_SIZE)[None, :]
        raw_ND = load_rows(value_ptr, row_N, inside_N, offs_D, MASKED, HEAD_SIZE, BLOCK_D)
        value_ND = unpack(raw_ND, FORMAT, NATIVE_FP8, q_MD.dtype)
        sum_MD = tl.dot(weights_MN.to(q_MD.dtype), value_ND, sum_MD, input_precision="ieee")
    return sum_MD, top_M, total_M


@triton.jit
def first_visible(first_position, window, BLOCK_N: tl.constexpr):
    """Where tiles start: 0, or the tile in which the window of the first token begins."""
    if window is not None:
        return tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
    else:
        return 0
