"""Write the keys and values of a step into their slots, in the cache's dtype. One program a token.

The layout of the cache is that of `ops/_tile.py`. fp8 codes are rounded to nearest, ties to even, and saturate; int8
gets a scale of its own for each token and head.

Shape suffixes: T tokens, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from enginecore_triton.aot_case import AotCase
from enginecore_triton.launch import cdiv, power_of_two
from enginecore_triton.ops._call import block_size_of, cache_format

#: Numbers that one program holds at once.
_TILE = 4096


@triton.jit
def pack_fp8(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 to the bits of a sign, exponent and `MANTISSA` bits; NaN becomes all ones below the sign.

    Normal numbers are rounded in their bits; for the rest, adding a power of two whose last place is the format's
    smallest number makes the hardware round, and the code is what that adds to the power's bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), LARGEST)
    wide = size.to(tl.int32, bitcast=True)
    SHIFT: tl.constexpr = 23 - MANTISSA
    normal = ((wide + ((1 << (SHIFT - 1)) - 1) + ((wide >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    MAGIC: tl.constexpr = 2.0 ** (24 - MANTISSA - BIAS)
    small = (size + MAGIC).to(tl.int32, bitcast=True) - ((127 + 24 - MANTISSA - BIAS) << 23)
    code = tl.where(size < 2.0 ** (1 - BIAS), small, normal)
    return (sign | tl.where(x != x, 0x7F, code)).to(tl.uint8)


@triton.jit
def _put(
    x_ptr, side_ptr, scale_ptr, place, head_K, mask_KD, offs_D, stride_x_head, stride_head,
    HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    x_KD = tl.load(x_ptr + head_K[:, None] * stride_x_head + offs_D[None, :], mask=mask_KD, other=0.0)
    piece_K = head_K.to(tl.int64) * stride_head
    out_KD = side_ptr + (piece_K + place * HEAD_SIZE)[:, None] + offs_D[None, :]
    if FORMAT == "float":
        tl.store(out_KD, x_KD.to(side_ptr.dtype.element_ty), mask=mask_KD)
    elif FORMAT == "int8":
        x_KD = x_KD.to(tl.float32)
        scale_K = tl.max(tl.abs(x_KD), 1) * (1.0 / 127.0)
        codes_KD = x_KD / tl.where(scale_K == 0.0, 1.0, scale_K)[:, None]
        codes_KD = (codes_KD + 12582912.0) - 12582912.0  # 1.5 x 2^23: rounds to nearest, ties to even
        codes_KD = tl.minimum(tl.maximum(codes_KD, -127.0), 127.0)
        tl.store(out_KD, codes_KD.to(tl.int8), mask=mask_KD)
        scales = (side_ptr + piece_K + BLOCK_SIZE * HEAD_SIZE).to(tl.pointer_type(tl.float32)) + place
        tl.store(scales, scale_K, mask=tl.max(mask_KD.to(tl.int32), 1) > 0)
    else:
        scale_K = tl.load(scale_ptr + head_K, mask=tl.max(mask_KD.to(tl.int32), 1) > 0, other=1.0)
        x_KD = x_KD.to(tl.float32) / scale_K[:, None]
        if FORMAT == "float8_e4m3fn":
            tl.store(out_KD, pack_fp8(x_KD, 3, 7, 448.0), mask=mask_KD)
        else:
            tl.store(out_KD, pack_fp8(x_KD, 2, 15, 57344.0), mask=mask_KD)


@triton.jit
def _reshape_and_cache(
    key_ptr, value_ptr, cache_ptr, slots_ptr, key_scale_ptr, value_scale_ptr,
    stride_key_token, stride_key_head, stride_value_token, stride_value_head, stride_block, stride_side, stride_head,
    KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return  # padding
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    head_K = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    offs_D = tl.arange(0, BLOCK_D)
    mask_KD = (head_K < KV_HEADS)[:, None] & (offs_D < HEAD_SIZE)[None, :]
    side_ptr = cache_ptr + block * stride_block
    _put(
        key_ptr + token * stride_key_token, side_ptr, key_scale_ptr, place, head_K, mask_KD, offs_D, stride_key_head,
        stride_head, HEAD_SIZE, BLOCK_SIZE, FORMAT,
    )  # fmt: skip
    _put(
        value_ptr + token * stride_value_token, side_ptr + stride_side, value_scale_ptr, place, head_K, mask_KD, offs_D,
        stride_value_head, stride_head, HEAD_SIZE, BLOCK_SIZE, FORMAT,
    )  # fmt: skip


def reshape_and_cache(
    key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor,
    key_scale_K: torch.Tensor | None = None, value_scale_K: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Slots of -1 are skipped. The scales (float32, one a head) are what fp8 codes will be multiplied with."""
    tokens = slot_mapping_T.shape[0]
    _, kv_heads, head_size = key_TKD.shape
    if not tokens:
        return
    key_TKD, value_TKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (key_TKD, value_TKD))
    cache, name = cache_format(kv_cache)
    block_d = power_of_two(head_size)
    block_k = min(power_of_two(kv_heads), max(1, _TILE // block_d))
    _reshape_and_cache[(tokens, cdiv(kv_heads, block_k))](
        key_TKD, value_TKD, cache, slot_mapping_T, key_scale_K, value_scale_K,
        key_TKD.stride(0), key_TKD.stride(1), value_TKD.stride(0), value_TKD.stride(1), *cache.stride()[:3],
        KV_HEADS=kv_heads, HEAD_SIZE=head_size, BLOCK_D=block_d, BLOCK_SIZE=block_size_of(kv_cache, head_size),
        FORMAT=name, BLOCK_K=block_k, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def aot_cases() -> list[AotCase]:
    strides = ("key_token", "key_head", "value_token", "value_head", "block", "side", "head")

    def case(kind: str, name: str, size: int, heads: int) -> AotCase:
        scales = {"key_scale_ptr": "*fp32:16", "value_scale_ptr": "*fp32:16"} if name.startswith("float8") else {}
        block_d = power_of_two(size)
        return AotCase(
            name=f"{name if name != 'float' else kind}, head {size}, {heads} heads", kernel=_reshape_and_cache,
            signature={
                "key_ptr": "*bf16:16", "value_ptr": "*bf16:16", "cache_ptr": f"*{kind}:16", "slots_ptr": "*i64:16",
                **scales, **{f"stride_{stride}": "i32:16" for stride in strides},
            },
            constants={
                **({} if scales else {"key_scale_ptr": None, "value_scale_ptr": None}), "KV_HEADS": heads,
                "HEAD_SIZE": size, "BLOCK_D": block_d, "BLOCK_SIZE": 16, "FORMAT": name,
                "BLOCK_K": min(power_of_two(heads), _TILE // block_d),
            },
            options={"num_warps": 4},
        )  # fmt: skip

    return [
        case("bf16", "float", 128, 8), case("bf16", "float", 80, 32), case("u8", "float8_e4m3fn", 128, 8),
        case("u8", "float8_e5m2", 128, 8), case("i8", "int8", 128, 8), case("bf16", "float", 576, 1),
    ]  # fmt: skip
