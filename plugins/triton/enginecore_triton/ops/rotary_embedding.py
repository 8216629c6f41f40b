"""Rotary position embedding in place, from a table: plain, partial, and whatever scaling the table holds.

One program turns all heads of queries and keys of a token. Source: Su and others, arXiv:2104.09864.

Shape suffixes: T tokens, H query heads, K key-value heads, D head size, P positions, N rotary dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, power_of_two

#: Pairs that one program holds at once.
_TILE = 2048


@triton.jit
def _turn(
    x_ptr, stride_head, head_B, heads, cos_N, sin_N, HALF: tl.constexpr, BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    offs_N = tl.arange(0, BLOCK_N)
    mask_BN = (head_B < heads)[:, None] & (offs_N < HALF)[None, :]
    if INTERLEAVED:
        first, second = 2 * offs_N, 2 * offs_N + 1
    else:
        first, second = offs_N, offs_N + HALF
    first_BN = x_ptr + head_B[:, None] * stride_head + first[None, :]
    second_BN = x_ptr + head_B[:, None] * stride_head + second[None, :]
    a = tl.load(first_BN, mask=mask_BN, other=0.0).to(tl.float32)
    b = tl.load(second_BN, mask=mask_BN, other=0.0).to(tl.float32)
    tl.store(first_BN, (a * cos_N - b * sin_N).to(x_ptr.dtype.element_ty), mask=mask_BN)
    tl.store(second_BN, (b * cos_N + a * sin_N).to(x_ptr.dtype.element_ty), mask=mask_BN)


@triton.jit
def _rotary_embedding(
    positions_ptr, query_ptr, key_ptr, table_ptr, query_heads, key_heads, stride_query_token, stride_query_head,
    stride_key_token, stride_key_head, stride_table,
    HALF: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Programs along axis 1 take BLOCK_H heads each: first those of the queries, then those of the keys."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs_N = tl.arange(0, BLOCK_N)
    row = tl.load(positions_ptr + token).to(tl.int64) * stride_table
    cos_N = tl.load(table_ptr + row + offs_N, mask=offs_N < HALF, other=0.0)[None, :]
    sin_N = tl.load(table_ptr + row + HALF + offs_N, mask=offs_N < HALF, other=0.0)[None, :]
    query_parts = tl.cdiv(query_heads, BLOCK_H)
    if part < query_parts:
        head_B = part * BLOCK_H + tl.arange(0, BLOCK_H)
        query = query_ptr + token * stride_query_token
        _turn(query, stride_query_head, head_B, query_heads, cos_N, sin_N, HALF, BLOCK_N, INTERLEAVED)
    else:
        head_B = (part - query_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
        key = key_ptr + token * stride_key_token
        _turn(key, stride_key_head, head_B, key_heads, cos_N, sin_N, HALF, BLOCK_N, INTERLEAVED)


def rotary_embedding(
    positions_T: torch.Tensor, query_THD: torch.Tensor, key_TKD: torch.Tensor, cos_sin_PN: torch.Tensor,
    interleaved: bool, *, device: DeviceDescription,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Schema `rotary_embedding`: in place, inputs may be strided over T and heads."""
    half = cos_sin_PN.shape[-1] // 2
    tokens, heads, kv_heads = positions_T.shape[0], query_THD.shape[1], key_TKD.shape[1]
    block_n = power_of_two(half)
    block_h = min(power_of_two(max(heads, kv_heads)), max(1, _TILE // block_n))
    if tokens and half:
        grid = (tokens, cdiv(heads, block_h) + cdiv(kv_heads, block_h))
        _rotary_embedding[grid](
            positions_T, query_THD, key_TKD, cos_sin_PN, heads, kv_heads, query_THD.stride(0), query_THD.stride(1),
            key_TKD.stride(0), key_TKD.stride(1), cos_sin_PN.stride(0),
            HALF=half, BLOCK_N=block_n, BLOCK_H=block_h, INTERLEAVED=interleaved, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return query_THD, key_TKD


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    return []


def aot_cases() -> list[AotCase]:
    strides = ("query_token", "query_head", "key_token", "key_head", "table")

    def case(half: int, interleaved: bool) -> AotCase:
        return AotCase(
            name=f"{2 * half} dimensions, {'interleaved' if interleaved else 'neox'}", kernel=_rotary_embedding,
            signature={
                "positions_ptr": "*i64:16", "query_ptr": "*bf16:16", "key_ptr": "*bf16:16", "table_ptr": "*fp32:16",
                "query_heads": "i32:16", "key_heads": "i32", **{f"stride_{stride}": "i32:16" for stride in strides},
            },
            constants={
                "HALF": half, "BLOCK_N": power_of_two(half), "BLOCK_H": min(32, _TILE // power_of_two(half)),
                "INTERLEAVED": interleaved,
            },
            options={"num_warps": 4},
        )  # fmt: skip

    return [case(64, False), case(40, False), case(32, True)]
