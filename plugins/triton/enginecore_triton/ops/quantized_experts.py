"""The experts of a mixture with weights that stay in four or eight bits, activations as they are.

Rows are grouped as in `moe_experts`; a tile of the weight is unpacked on its way into the product:

    fp8, int8   [X, O, I] bytes; the scale of an output is applied at the end, that of a block after each step of inputs
    int4        [X, I/8, O] words of eight inputs, lowest nibble first, as `Int4Weight` has them; each row of the tile
                takes its nibble of a word, which the cache gives eight times and memory once

Shape suffixes: T tokens, K experts of a token, N = T x K rows, X experts, I and O of a product, E hidden, F inner size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery
from enginecore.ops.expert_weights import ExpertWeights
from enginecore.ops.int4 import Int4Weight

from enginecore_triton.aot_case import AotCase
from enginecore_triton.configs import Config
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch
from enginecore_triton.ops import moe_experts
from enginecore_triton.ops._tile import unpack
from enginecore_triton.ops.moe_experts import _activate

#: Steps over inputs must not cross a block; the longest step of the configs.
STEP = 64
_FORMATS = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "int4"}


@triton.jit
def _step(
    total, x, values, scales, zeros, expert, column, inside, k, start, inputs, columns, rows_of_scales, blocks,
    block_outputs, group,
    FORMAT: tl.constexpr, BLOCKED: tl.constexpr, HAS_ZEROS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`total` [M, N] and the product of x [M, K] with one tile of the expert's weight. `columns`: outputs of it."""
    if FORMAT == "int4":
        mask = inside[None, :]
        if not EVEN:
            mask = mask & (k < inputs)[:, None]
        at = (expert * (inputs // 8) + k // 8)[:, None] * columns + column[None, :]
        words = tl.load(values + at, mask=mask, other=0)
        codes = ((words >> ((k % 8) * 4)[:, None]) & 15).to(tl.float32)
        at = (expert * rows_of_scales + k // group)[:, None] * columns + column[None, :]
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            codes -= tl.load(zeros + at, mask=mask, other=0).to(tl.float32)
        else:
            codes -= 8.0
        total = tl.dot(x, (codes * scale).to(x.dtype), total, input_precision="ieee")
    else:
        mask = inside[:, None]
        if not EVEN:
            mask = mask & (k < inputs)[None, :]
        raw = tl.load(values + (expert * columns + column)[:, None] * inputs + k[None, :], mask=mask, other=0)
        block = tl.trans(unpack(raw, FORMAT, False, x.dtype))
        if BLOCKED:
            at = (expert * rows_of_scales + column // block_outputs) * blocks + start // group
            scale = tl.load(scales + at, mask=inside, other=0.0)
            total += tl.dot(x, block, input_precision="ieee") * scale[None, :]
        else:
            total = tl.dot(x, block, total, input_precision="ieee")
    return total


@triton.jit
def _finish(
    total, scales, expert, column, inside, rows_of_scales, FORMAT: tl.constexpr, BLOCKED: tl.constexpr
):  # fmt: skip
    if FORMAT != "int4" and not BLOCKED:
        total *= tl.load(scales + expert * rows_of_scales + column, mask=inside, other=0.0)[None, :]
    if FORMAT == "float8_e4m3fn":
        total *= 256.0  # what bytes of e4m3 lack when they are unpacked without the hardware
    return total


@triton.jit
def _product(
    x, values, scales, zeros, out_NO, order, tile_expert, number, tiles, inputs, outputs, stride_x, divisor,
    rows_of_scales, blocks, block_outputs, group,
    FORMAT: tl.constexpr, BLOCKED: tl.constexpr, HAS_ZEROS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As in `moe_experts`: row n is row n // divisor of x times its expert; GATED weights are `outputs` gates and ups.
    `rows_of_scales`: those of one expert; `blocks`: scales in such a row."""
    tile = tl.program_id(0) % tiles
    column = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        row = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        below, inside = row < number, column < outputs
        columns = outputs * (2 if GATED else 1)
        x_row = x + (row // divisor).to(tl.int64)[:, None] * stride_x
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            mask = below[:, None]
            if not EVEN:
                mask = mask & (k < inputs)[None, :]
            rows = tl.load(x_row + k[None, :], mask=mask, other=0.0)
            total = _step(
                total, rows, values, scales, zeros, expert, column, inside, k, start, inputs, columns, rows_of_scales,
                blocks, block_outputs, group, FORMAT, BLOCKED, HAS_ZEROS, EVEN,
            )  # fmt: skip
            if GATED:
                up = _step(
                    up, rows, values, scales, zeros, expert, column + outputs, inside, k, start, inputs, columns,
                    rows_of_scales, blocks, block_outputs, group, FORMAT, BLOCKED, HAS_ZEROS, EVEN,
                )  # fmt: skip
        total = _finish(total, scales, expert, column, inside, rows_of_scales, FORMAT, BLOCKED)
        if GATED:
            up = _finish(up, scales, expert, column + outputs, inside, rows_of_scales, FORMAT, BLOCKED)
            total = _activate(total, up, ACTIVATION)
        tl.store(out_NO + row.to(tl.int64)[:, None] * outputs + column[None, :], total.to(out_NO.dtype.element_ty),
                 mask=below[:, None] & inside[None, :])  # fmt: skip


def _launch(
    x: torch.Tensor, weights: ExpertWeights, out: torch.Tensor, groups: tuple[torch.Tensor, torch.Tensor], divisor: int,
    config: Config, activation: str | None,
) -> None:  # fmt: skip
    order, tile_expert = groups
    inputs, outputs, tiles, weight = weights.shape[2], out.shape[1], tile_expert.numel(), weights.stacked
    if isinstance(weight, Int4Weight):
        values, scales, zeros = weight.words_WO, weight.scales_GO, weight.zeros_GO
        block_outputs, group, blocked = 1, weight.group_size, False
    else:
        values, scales, zeros = weight.values_OI, weight.scales_AB, None
        values = values.view(torch.uint8) if weight.scheme == "fp8" else values
        block_outputs, group, blocked = *weight.block, weight.block != (1, inputs)
    launch(_product, (tiles * cdiv(outputs, config.constants["BLOCK_N"]),), x, values, scales,
           scales if zeros is None else zeros, out, order, tile_expert, out.shape[0], tiles, inputs, outputs,
           x.stride(0), divisor, scales.shape[1], scales.shape[2], block_outputs, group,
           FORMAT=_FORMATS[weights.scheme], BLOCKED=blocked, HAS_ZEROS=zeros is not None,
           GATED=activation is not None, ACTIVATION=activation or "", EVEN=inputs % config.constants["BLOCK_K"] == 0,
           config=config)  # fmt: skip


def quantized_experts(
    x_TE: torch.Tensor, expert_ids_TK: torch.Tensor, expert_weights_TK: torch.Tensor, gate_up: ExpertWeights,
    down: ExpertWeights, activation: str, *, device: DeviceDescription,
) -> torch.Tensor:  # fmt: skip
    """The core's op `quantized_experts`. The host waits for nothing."""
    return moe_experts.routed(
        "quantized_experts", _launch, x_TE, expert_ids_TK, expert_weights_TK, gate_up, down, activation, device
    )


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    asked = query.attributes
    scheme, group = asked.get("scheme", "fp8"), int(asked.get("group", STEP))
    reasons = moe_experts.supports(query, device)
    if scheme not in _FORMATS:
        reasons.append(f"scheme {scheme!r} is not one of {', '.join(_FORMATS)}")
    if asked.get("ordered"):
        reasons.append("inputs in an order of each expert's own")
    if asked.get("blocked") and group % STEP:
        reasons.append(f"blocks of {group} inputs are not whole multiples of {STEP}")
    return reasons


def aot_cases() -> list[AotCase]:
    ids = {"order": "*i32:16", "tile_expert": "*i32:16", "number": "i32", "tiles": "i32"}
    sizes = dict.fromkeys(("inputs", "outputs", "stride_x", "group"), "i32:16")
    counts = dict.fromkeys(("divisor", "rows_of_scales", "blocks", "block_outputs"), "i32")

    def case(scheme: str, rows: int, gated: bool, blocked: bool = False, dtype: str = "bf16") -> AotCase:
        values = {"fp8": "*u8:16", "int8": "*i8:16", "int4": "*i32:16"}[scheme]
        scales = "*fp16:16" if scheme == "int4" else "*fp32:16"
        pointers = {"x": f"*{dtype}:16", "values": values, "scales": scales, "zeros": "*u8:16",
                    "out_NO": f"*{dtype}:16"}  # fmt: skip
        name = f"{scheme}{' in blocks' if blocked else ''}, {'gate and up' if gated else 'down'}, {rows} rows an expert"
        return AotCase(
            name=f"{name}, {dtype}", kernel=_product, signature={**pointers, **ids, **sizes, **counts},
            constants={"FORMAT": _FORMATS[scheme], "BLOCKED": blocked, "HAS_ZEROS": scheme == "int4", "GATED": gated,
                       "ACTIVATION": "silu" if gated else "", "EVEN": True},
            config="quantized_experts", sizes={"rows": rows, "itemsize": 2 if dtype == "bf16" else 4},
        )  # fmt: skip

    return [
        *(case(scheme, rows, True) for scheme in _FORMATS for rows in (4, 64)),
        case("fp8", 64, True, True),
        case("int4", 64, False),
        case("int4", 64, True, False, "fp32"),
    ]
