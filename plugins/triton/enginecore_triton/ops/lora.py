"""The two products of low-rank adapters, each token with its own: h = x a^T (shrink) and y += h b^T (expand).

A program has a tile of consecutive tokens and goes through the adapters that occur in it, one after another: the rows
of the others count as zeros. A prompt's tokens share theirs, so that is once around; a decoding batch reads each of a
tile's adapters once, which is all there is to save. Nothing has to be sorted; no launch is needed beside the products.

Shape suffixes: T tokens, I inputs, P outputs of a slice, S slices, N adapters, R rank.
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
from enginecore_triton.ops import _parts

MAX_RANK = 256


@triton.jit
def _shrink(
    x_TI, a_SNRI, adapter_T, out_STR, stride_x, tokens, inputs, rank, adapters, slices, number,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`out_STR` has `number` parts in front of it, one for each piece of the inputs."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    part, slice_number = tl.program_id(1) // slices, tl.program_id(1) % slices
    place, line = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    below = row < tokens
    adapter = tl.load(adapter_T + row, mask=below, other=-1).to(tl.int32)
    x_row = x_TI + row.to(tl.int64)[:, None] * stride_x
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    current = tl.max(adapter, 0)
    while current >= 0:
        mine = adapter == current
        matrix = a_SNRI + ((slice_number * adapters + current).to(tl.int64) * rank + place)[:, None] * inputs
        for start in range(part * BLOCK_K, inputs, number * BLOCK_K):
            k = start + line
            x_mask, a_mask = mine[:, None], (place < rank)[:, None]
            if not EVEN:
                x_mask, a_mask = x_mask & (k < inputs)[None, :], a_mask & (k < inputs)[None, :]
            x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
            a = tl.load(matrix + k[None, :], mask=a_mask, other=0.0)
            total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
        current = tl.max(tl.where(adapter < current, adapter, -1), 0)
    at = (tl.program_id(1).to(tl.int64) * tokens + row)[:, None] * rank + place[None, :]
    tl.store(out_STR + at, total, mask=below[:, None] & (place < rank)[None, :])


@triton.jit
def _expand(
    h_TR, b_NPR, adapter_T, y_TO, stride_y, tokens, rank, outputs,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_R)
    below, inside = row < tokens, column < outputs
    adapter = tl.load(adapter_T + row, mask=below, other=-1).to(tl.int32)
    current = tl.max(adapter, 0)
    if current >= 0:
        h_mask = below[:, None] & (place < rank)[None, :]
        h = tl.load(h_TR + row.to(tl.int64)[:, None] * rank + place[None, :], mask=h_mask, other=0.0)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        while current >= 0:
            matrix = b_NPR + (current.to(tl.int64) * outputs + column)[:, None] * rank
            b = tl.load(matrix + place[None, :], mask=inside[:, None] & (place < rank)[None, :], other=0.0)
            mine = tl.where((adapter == current)[:, None], h, 0.0).to(b.dtype)
            total = tl.dot(mine, tl.trans(b), total, input_precision="ieee")
            current = tl.max(tl.where(adapter < current, adapter, -1), 0)
        at = y_TO + row.to(tl.int64)[:, None] * stride_y + column[None, :]
        mask = (adapter >= 0)[:, None] & inside[None, :]
        y = tl.load(at, mask=mask, other=0.0)
        tl.store(at, (y.to(tl.float32) + total).to(y.dtype), mask=mask)


def _check(rank: int) -> None:
    if rank > MAX_RANK:
        raise ValueError(f"an adapter's rank of {rank} is above {MAX_RANK}")


def lora_shrink(
    x_TI: torch.Tensor, a_SNRI: torch.Tensor, adapter_T: torch.Tensor, *, device: DeviceDescription
) -> torch.Tensor:
    """The core's op `lora_shrink`."""
    x_TI = x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
    slices, adapters, rank, inputs = a_SNRI.shape
    _check(rank)
    tokens = x_TI.shape[0]
    config = configs.pick("lora_shrink", device.architecture, tokens=tokens, rank=rank)
    tiles, step = cdiv(tokens, config.constants["BLOCK_M"]), config.constants["BLOCK_K"]
    number = _parts.number_of_parts(tiles * slices, cdiv(inputs, step), device)
    out_STR = torch.empty((slices, tokens, rank), dtype=torch.float32, device=x_TI.device)
    parts = out_STR if number == 1 else out_STR.new_empty((number, *out_STR.shape))
    launch(_shrink, (tiles, number * slices), x_TI, a_SNRI.contiguous(), adapter_T, parts, x_TI.stride(0), tokens,
           inputs, rank, adapters, slices, number, EVEN=inputs % step == 0, BLOCK_R=power_of_two(rank, 16),
           config=config)  # fmt: skip
    if number > 1 and tokens:
        _parts.reduce(parts.flatten(1, 2), None, out_STR.flatten(0, 1))
    return out_STR


def lora_expand(
    h_STR: torch.Tensor,
    b: list[torch.Tensor],
    adapter_T: torch.Tensor,
    y_TO: torch.Tensor,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `lora_expand`: one launch a slice."""
    if y_TO.stride(1) != 1:
        raise ValueError("y must have dense rows: it is changed in place")
    tokens, rank = h_STR.shape[1:]
    _check(rank)
    config = configs.pick("lora_expand", device.architecture, tokens=tokens, rank=rank)
    tiles, start = cdiv(tokens, config.constants["BLOCK_M"]), 0
    for h_TR, b_NPR in zip(h_STR, b, strict=True):
        outputs = b_NPR.shape[1]
        launch(_expand, (tiles, cdiv(outputs, config.constants["BLOCK_N"])), h_TR, b_NPR.contiguous(), adapter_T,
               y_TO[:, start:], y_TO.stride(0), tokens, rank, outputs, BLOCK_R=power_of_two(rank, 16),
               config=config)  # fmt: skip
        start += outputs
    return y_TO


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    rank = query.attributes.get("rank", 1)
    return [f"an adapter's rank of {rank} is above {MAX_RANK}"] if rank > MAX_RANK else []


def aot_cases() -> list[AotCase]:
    shrink = {
        "x_TI": "*bf16:16", "a_SNRI": "*bf16:16", "adapter_T": "*i64:16", "out_STR": "*fp32:16", "stride_x": "i32:16",
        "tokens": "i32", "inputs": "i32:16", "rank": "i32:16", "adapters": "i32", "slices": "i32", "number": "i32",
    }  # fmt: skip
    expand = {
        "h_TR": "*fp32:16", "b_NPR": "*bf16:16", "adapter_T": "*i64:16", "y_TO": "*bf16:16", "stride_y": "i32:16",
        "tokens": "i32", "rank": "i32:16", "outputs": "i32:16",
    }  # fmt: skip
    return [
        AotCase(name=f"{name}, rank {rank}, {tokens} tokens", kernel=kernel, signature=signature,
                constants={"BLOCK_R": rank, **more}, config=config, sizes={"tokens": tokens, "rank": rank})
        for name, kernel, signature, config, more in (
            ("shrink", _shrink, shrink, "lora_shrink", {"EVEN": True}),
            ("expand", _expand, expand, "lora_expand", {}),
        )
        for rank, tokens in ((16, 16), (64, 2048), (MAX_RANK, 16), (MAX_RANK, 2048))
    ]  # fmt: skip
