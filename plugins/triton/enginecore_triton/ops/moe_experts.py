"""The experts of a mixture: rows grouped by expert, two grouped products, and the weighted sum of each token's parts.

    grouping (`_grouping.py`)   every tile of rows belongs to one expert
    _product, GATED             gate and up of a tile in one program, so that the activation is taken at once
    _product                    down
    _combine                    a token's parts, times their weights, in the order of its experts: results repeat

Programs that run side by side share the columns of an expert's weight, which is what memory traffic there is.

Shape suffixes: T tokens, K experts of a token, N = T x K, X experts, E hidden size, F inner size, I and O of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery
from enginecore.ops.expert_weights import ExpertWeights
from enginecore.ops.experts import ACTIVATIONS

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.configs import Config
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch
from enginecore_triton.ops import _grouping


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows to NaN nor loses its sign.
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up


@triton.jit
def _product(
    x, weight_XOI, out_NO, order, tile_expert, number, tiles, inputs, outputs, stride_x, divisor,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Row n of the answer is row n // divisor of x times its expert; GATED weights have `outputs` gates, then ups."""
    tile = tl.program_id(0) % tiles
    column = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert >= 0:
        row = tl.load(order + tile * BLOCK_M + tl.arange(0, BLOCK_M))
        below, inside = row < number, column < outputs
        line = tl.arange(0, BLOCK_K)
        x_row = x + (row // divisor).to(tl.int64)[:, None] * stride_x
        weight = weight_XOI + (expert * outputs * (2 if GATED else 1) + column)[:, None] * inputs
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            k = start + line
            x_mask, w_mask = below[:, None], inside[:, None]
            if not EVEN:
                x_mask, w_mask = x_mask & (k < inputs)[None, :], w_mask & (k < inputs)[None, :]
            rows = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
            block = tl.load(weight + k[None, :], mask=w_mask, other=0.0)
            total = tl.dot(rows, tl.trans(block), total, input_precision="ieee")
            if GATED:
                block = tl.load(weight + tl.cast(outputs, tl.int64) * inputs + k[None, :], mask=w_mask, other=0.0)
                up = tl.dot(rows, tl.trans(block), up, input_precision="ieee")
        if GATED:
            total = _activate(total, up, ACTIVATION)
        tl.store(out_NO + row.to(tl.int64)[:, None] * outputs + column[None, :], total.to(out_NO.dtype.element_ty),
                 mask=below[:, None] & inside[None, :])  # fmt: skip


@triton.jit
def _combine(parts_NE, ids_N, weights_N, out_TE, size, each, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(0, each):
        at = token * each + place
        # Nothing was written where there is no expert: whatever lies there must not count, not even times 0.
        written = (column < size) & (column * 0 + tl.load(ids_N + at) >= 0)
        part = tl.load(parts_NE + at * size + column, mask=written, other=0.0).to(tl.float32)
        total += tl.load(weights_N + at).to(tl.float32) * part
    tl.store(out_TE + token * size + column, total.to(out_TE.dtype.element_ty), mask=column < size)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, groups: tuple[torch.Tensor, torch.Tensor], divisor: int,
    config: Config, activation: str | None,
) -> None:  # fmt: skip
    order, tile_expert = groups
    inputs, outputs, tiles = weight.shape[2], out.shape[1], tile_expert.numel()
    launch(_product, (tiles * cdiv(outputs, config.constants["BLOCK_N"]),), x, weight, out, order, tile_expert,
           out.shape[0], tiles, inputs, outputs, x.stride(0), divisor, GATED=activation is not None,
           ACTIVATION=activation or "", EVEN=inputs % config.constants["BLOCK_K"] == 0, config=config)  # fmt: skip


def moe_experts(
    x_TE: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    expert_weights_TK: torch.Tensor,
    gate_up_X2FE: torch.Tensor,
    down_XEF: torch.Tensor,
    activation: str,
    *,
    device: DeviceDescription,
) -> torch.Tensor:
    """The core's op `moe_experts`. The host waits for nothing."""
    gate_up, down = gate_up_X2FE.contiguous(), down_XEF.contiguous()
    return routed("moe_experts", _launch, x_TE, expert_ids_TK, expert_weights_TK, gate_up, down, activation, device)


Weights = TypeVar("Weights", torch.Tensor, ExpertWeights)


def routed(
    op: str,
    launch_product: Callable[..., None],
    x_TE: torch.Tensor,
    expert_ids_TK: torch.Tensor,
    expert_weights_TK: torch.Tensor,
    gate_up: Weights,
    down: Weights,
    activation: str,
    device: DeviceDescription,
) -> torch.Tensor:
    """Both products of each token's experts and their weighted sum [T, E]. `launch_product(x, weights, out, groups,
    divisor, config, activation)` launches one: the first with the activation, the second with None."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    x_TE = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
    ids_TK, weights_TK = expert_ids_TK.contiguous(), expert_weights_TK.contiguous()
    experts, size, inner = down.shape
    number, each = ids_TK.numel(), ids_TK.shape[1]
    out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    if not number:
        return out_TE.zero_()
    config = configs.pick(op, device.architecture, rows=cdiv(number, experts), itemsize=x_TE.element_size())
    groups = _grouping.grouped(ids_TK, experts, config.constants["BLOCK_M"])
    inner_NF, parts_NE = x_TE.new_empty((number, inner)), x_TE.new_empty((number, size))
    launch_product(x_TE, gate_up, inner_NF, groups, each, config, activation)
    launch_product(inner_NF, down, parts_NE, groups, 1, config, None)
    launch(_combine, (x_TE.shape[0], cdiv(size, 512)), parts_NE, ids_TK, weights_TK, out_TE, size, each, BLOCK=512,
           num_warps=2)  # fmt: skip
    return out_TE


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    activation = query.attributes.get("activation", "silu")
    return [] if activation in ACTIVATIONS else [f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"]


def aot_cases() -> list[AotCase]:
    ids = {"order": "*i32:16", "tile_expert": "*i32:16", "number": "i32", "tiles": "i32"}
    sizes = dict.fromkeys(("inputs", "outputs", "stride_x"), "i32:16")
    signature = {"x": "*bf16:16", "weight_XOI": "*bf16:16", "out_NO": "*bf16:16", **ids, **sizes, "divisor": "i32"}

    def case(rows: int, gated: bool, dtype: str = "bf16") -> AotCase:
        constants = {"GATED": gated, "ACTIVATION": "silu" if gated else "", "EVEN": True}
        name = f"{'gate and up' if gated else 'down'}, {rows} rows an expert, {dtype}"
        kinds = {key: kind.replace("bf16", dtype) for key, kind in signature.items()}
        return AotCase(name=name, kernel=_product, signature=kinds, constants=constants, config="moe_experts",
                       sizes={"rows": rows, "itemsize": 2 if dtype == "bf16" else 4})  # fmt: skip

    counted = {"ids": "*i64:16", "counts": "*i32:16", "number": "i32"}
    return [
        *(case(rows, gated) for rows in (4, 64, 512) for gated in (True, False)),
        case(64, True, "fp32"),
        AotCase(name="count", kernel=_grouping.count, signature=counted, constants={"CHUNK": _grouping.CHUNK},
                options={"num_warps": 4}),
        AotCase(name="place", kernel=_grouping.place, signature={**counted, **ids, "experts": "i32"},
                constants={"BLOCK_M": 64, "BLOCK_X": 256, "CHUNK": _grouping.CHUNK}, options={"num_warps": 4}),
        AotCase(name="combine", kernel=_combine, constants={"BLOCK": 512}, options={"num_warps": 2},
                signature={"parts_NE": "*bf16:16", "ids_N": "*i64:16", "weights_N": "*fp32:16", "out_TE": "*bf16:16",
                           "size": "i32:16", "each": "i32"}),
    ]  # fmt: skip
