"""Join what the parts of a context gave: the second half of `paged_decode` and `mla_decode`.

Shape suffixes: S sequences, Q tokens of one sequence, H query heads, P parts, D head size, T tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from enginecore_triton.aot_case import AotCase
from enginecore_triton.launch import power_of_two
from enginecore_triton.ops._tile import first_visible


@triton.jit
def part_length(span, num_parts, LEAST: tl.constexpr, BLOCK_N: tl.constexpr):
    """Positions in a part of a context of `span`: equal parts in whole tiles, LEAST (a multiple of BLOCK_N) or more."""
    return tl.maximum(tl.cdiv(tl.cdiv(span, num_parts), BLOCK_N) * BLOCK_N, LEAST)


@triton.jit(do_not_specialize=["num_parts", "window"])
def _merge_parts(
    part_ptr, log_ptr, lengths_ptr, starts_ptr, out_ptr, window, num_parts, stride_out_token, stride_out_head,
    QUERIES: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    head, query, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(starts_ptr + sequence)
    queries = tl.load(starts_ptr + sequence + 1) - first_token
    length = tl.load(lengths_ptr + sequence)
    if (query >= queries) | (queries > QUERIES):
        return
    span = length - first_visible(length - queries, window, BLOCK_N)
    used = tl.cdiv(span, part_length(span, num_parts, LEAST, BLOCK_N))
    offs_D = tl.arange(0, BLOCK_D)
    inside_D = offs_D < HEAD_SIZE
    base = ((sequence * QUERIES + query) * tl.num_programs(0) + head).to(tl.int64) * num_parts
    top, total = float("-inf"), 0.0
    sum_D = tl.zeros([BLOCK_D], tl.float32)
    for part in range(0, used):
        log = tl.load(log_ptr + base + part)
        part_D = tl.load(part_ptr + (base + part) * HEAD_SIZE + offs_D, mask=inside_D, other=0.0)
        new = tl.maximum(top, log)
        anchor = tl.where(new == float("-inf"), 0.0, new)  # nothing visible so far
        past, weight = tl.exp2(top - anchor), tl.exp2(log - anchor)
        sum_D, total, top = sum_D * past + part_D * weight, total * past + weight, new
    out = out_ptr + (first_token + query).to(tl.int64) * stride_out_token + head * stride_out_head + offs_D
    tl.store(out, (sum_D / tl.where(total == 0.0, 1.0, total)).to(out_ptr.dtype.element_ty), mask=inside_D)


def merge_parts(
    part_SQHPD: torch.Tensor, log_SQHP: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor,
    out_THD: torch.Tensor, window: int | None, tile: int, least: int,
) -> None:  # fmt: skip
    """Weighted mean of the parts that each sequence has; `log` is in units of log2. Parts past those are never read.

    `tile` and `least` are what the kernel that wrote the parts cut them by.
    """
    sequences, queries, heads, parts, size = part_SQHPD.shape
    _merge_parts[(heads, queries, sequences)](
        part_SQHPD, log_SQHP, seq_lens, query_start_loc, out_THD, window, parts, out_THD.stride(0), out_THD.stride(1),
        QUERIES=queries, HEAD_SIZE=size, BLOCK_D=power_of_two(size), BLOCK_N=tile, LEAST=least, num_warps=2,
        enable_fp_fusion=True,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    signature = {
        "part_ptr": "*fp32:16", "log_ptr": "*fp32:16", "lengths_ptr": "*i32:16", "starts_ptr": "*i32:16",
        "out_ptr": "*bf16:16", "window": "i32", "num_parts": "i32", "stride_out_token": "i32:16",
        "stride_out_head": "i32:16",
    }  # fmt: skip

    def case(size: int, window: bool) -> AotCase:
        constants = {
            "QUERIES": 1, "HEAD_SIZE": size, "BLOCK_D": power_of_two(size), "BLOCK_N": 64, "LEAST": 256,
            **({} if window else {"window": None}),
        }  # fmt: skip
        return AotCase(
            name=f"{size}{', window' if window else ''}", kernel=_merge_parts, signature=signature, constants=constants,
            options={"num_warps": 2},
        )  # fmt: skip

    return [case(128, False), case(256, True), case(512, False)]
