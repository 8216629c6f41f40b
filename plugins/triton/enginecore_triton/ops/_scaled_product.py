"""Products with weights of eight bits: activations quantised a row (or a block of a row) at a time, or as they are.

A weight's scale is one for each output, applied at the end, or one for each block, applied after each step over inputs;
steps never cross a block. Few rows are cut along the inputs until the device is full (`_parts.py`).

Shape suffixes: M rows, I inputs, O outputs, B blocks of inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from enginecore.ops.scaled import ScaledWeight

from enginecore_triton import configs
from enginecore_triton.configs import Config
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv, launch
from enginecore_triton.ops import _parts
from enginecore_triton.ops._tile import unpack

#: From this many rows on a weight is unpacked first, where activations stay as they are.
MANY_ROWS = 256
_BLOCK = 1024


@triton.jit
def _round(x):
    """The nearest whole number, halves to even, below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _round_e4m3(x):
    """The nearest number that e4m3 has, halves to even; the conversion is exact then, whoever does it."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.015625, _round(x * 512.0) * 0.001953125, normal)


@triton.jit
def quantize_rows(x_MI, out_MI, scales_MB, stride_x, inputs, blocks, size, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """Each `size` inputs of a row in eight bits with a scale of their own, the largest at the end of the range."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = block * size, tl.minimum(block * size + size, inputs)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, end, BLOCK):
        k = start + lane
        x = tl.load(x_MI + row * stride_x + k, mask=k < end, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    top: tl.constexpr = 448.0 if FP8 else 127.0
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / top
    tl.store(scales_MB + row * blocks + block, scale)
    for start in range(first, end, BLOCK):
        k = start + lane
        x = tl.load(x_MI + row * stride_x + k, mask=k < end, other=0.0).to(tl.float32) / scale
        x = tl.minimum(tl.maximum(x, -top), top)
        if FP8:
            tl.store(out_MI + row * inputs + k, _round_e4m3(x).to(tl.float8e4nv), mask=k < end)
        else:
            tl.store(out_MI + row * inputs + k, _round(x).to(tl.int8), mask=k < end)


@triton.jit
def product(
    x_MI, x_scales_MB, values_OI, scales_AB, bias_O, out_MO, parts_NMO,
    stride_x, rows, inputs, outputs, blocks, block_outputs, block_inputs, number,
    MODE: tl.constexpr, BLOCKED: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """MODE "int8" and "fp8" (given as bytes): both sides in eight bits; "weight": activations as they are."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    inside, below = column < outputs, row < rows
    line = tl.arange(0, BLOCK_K)
    if MODE == "int8" and not BLOCKED:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(part * BLOCK_K, inputs, number * BLOCK_K):
        k = start + line
        x_mask, w_mask = below[:, None], inside[:, None]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < inputs)[None, :], w_mask & (k < inputs)[None, :]
        x = tl.load(x_MI + row.to(tl.int64)[:, None] * stride_x + k[None, :], mask=x_mask, other=0)
        w = tl.load(values_OI + column.to(tl.int64)[:, None] * inputs + k[None, :], mask=w_mask, other=0)
        if MODE == "weight":
            w = unpack(w, "float8_e4m3fn", False, x.dtype)
        elif MODE == "fp8":
            x, w = x.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True)
        if BLOCKED:
            block = start // block_inputs
            scale = tl.load(scales_AB + (column // block_outputs) * blocks + block, mask=inside, other=0.0)[None, :]
            if MODE != "weight":
                scale = tl.load(x_scales_MB + row * blocks + block, mask=below, other=0.0)[:, None] * scale
            if MODE == "int8":
                total += tl.dot(x, tl.trans(w), out_dtype=tl.int32).to(tl.float32) * scale
            else:
                total += tl.dot(x, tl.trans(w), input_precision="ieee") * scale
        elif MODE == "int8":
            total = tl.dot(x, tl.trans(w), total, out_dtype=tl.int32)
        else:
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    result = total.to(tl.float32)
    if not BLOCKED:
        result = result * tl.load(scales_AB + column, mask=inside, other=0.0)[None, :]
        if MODE != "weight":
            result = result * tl.load(x_scales_MB + row, mask=below, other=0.0)[:, None]
    if MODE == "weight":
        result = result * 256.0  # what bytes of e4m3 lack when they are unpacked without the hardware
    mask = below[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    if IN_PARTS:
        tl.store(parts_NMO + part.to(tl.int64) * rows * outputs + at, result, mask=mask)
    else:
        if HAS_BIAS:
            result += tl.load(bias_O + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out_MO + at, result.to(out_MO.dtype.element_ty), mask=mask)


def quantized(x_MI: torch.Tensor, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in `dtype`, float32 scales [M, B]) of rows whose last dimension is dense."""
    rows, inputs = x_MI.shape
    blocks = cdiv(inputs, size)
    out_MI = torch.empty((rows, inputs), dtype=dtype, device=x_MI.device)
    scales_MB = torch.empty((rows, blocks), dtype=torch.float32, device=x_MI.device)
    launch(quantize_rows, (rows, blocks), x_MI, out_MI, scales_MB, x_MI.stride(0), inputs, blocks, size,
           FP8=dtype != torch.int8, BLOCK=_BLOCK if size > 128 else 128, num_warps=4 if size > 128 else 1)  # fmt: skip
    return out_MI, scales_MB


class ScaledLinear:
    """What `pack_linear` makes of a ScaledWeight. `mode` as in the kernel."""

    def __init__(
        self, weight: ScaledWeight, bias_O: torch.Tensor | None, device: DeviceDescription, mode: str, op: str
    ) -> None:
        self.in_features, self.out_features = weight.in_features, weight.out_features
        self._weight = replace(weight, values_OI=weight.values_OI.contiguous())
        self._bias_O, self._device, self._mode, self._op = bias_O, device, mode, op
        self._blocked = weight.block != (1, weight.in_features)
        self._bytes_OI = self._weight.values_OI.view(torch.int8 if mode == "int8" else torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias_O is None else int(self._bias_O.nbytes))

    def rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        values_MI = weight.values_OI.view(torch.uint8)[ids_M].view(weight.values_OI.dtype)
        scales_MB = weight.scales_AB[ids_M // weight.block[0]]
        return replace(weight, values_OI=values_MI, scales_AB=scales_MB, block=(1, weight.block[1])).dequantize()

    def __call__(self, x_MI: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        if self._mode == "weight" and x_MI.shape[0] >= MANY_ROWS:
            y_MO = F.linear(x_MI, self._weight.dequantize(x_MI.dtype), self._bias_O)
            return y_MO if out_dtype is None else y_MO.to(out_dtype)
        x_MI = x_MI if x_MI.stride(1) == 1 else x_MI.contiguous()
        out_MO = x_MI.new_empty((x_MI.shape[0], self.out_features), dtype=out_dtype or x_MI.dtype)
        x_scales_MB = self._weight.scales_AB
        if self._mode != "weight":
            size = min(self._weight.block[1], self.in_features)
            x_MI, x_scales_MB = quantized(x_MI, size, self._weight.values_OI.dtype)
            x_MI = x_MI.view(self._bytes_OI.dtype)
        config = configs.pick(self._op, self._device.architecture, rows=x_MI.shape[0], itemsize=x_MI.element_size())
        self._launch(x_MI, x_scales_MB, out_MO, config)
        return out_MO

    def _launch(self, x_MI: torch.Tensor, x_scales_MB: torch.Tensor, out_MO: torch.Tensor, config: Config) -> None:
        rows, outputs, weight, step = x_MI.shape[0], self.out_features, self._weight, config.constants["BLOCK_K"]
        grid = (cdiv(outputs, config.constants["BLOCK_N"]), cdiv(rows, config.constants["BLOCK_M"]))
        number = _parts.number_of_parts(grid[0] * grid[1], cdiv(self.in_features, step), self._device)
        parts = out_MO if number == 1 else x_MI.new_empty((number, rows, outputs), dtype=torch.float32)
        launch(product, (*grid, number), x_MI, x_scales_MB, self._bytes_OI, weight.scales_AB,
               weight.scales_AB if self._bias_O is None else self._bias_O, out_MO, parts, x_MI.stride(0), rows,
               self.in_features, outputs, weight.scales_AB.shape[1], weight.block[0], weight.block[1], number,
               MODE=self._mode, BLOCKED=self._blocked, EVEN=self.in_features % step == 0,
               HAS_BIAS=self._bias_O is not None, IN_PARTS=number > 1, config=config)  # fmt: skip
        if number > 1:
            _parts.reduce(parts, self._bias_O, out_MO)


def signature(x: str, values: str, out: str = "bf16") -> dict[str, str]:
    """For the ahead-of-time compiler: a product of `x` with `values`."""
    sizes = ("stride_x", "inputs", "outputs", "block_outputs", "block_inputs")
    pointers = {"x_MI": x, "x_scales_MB": "fp32", "values_OI": values, "scales_AB": "fp32", "bias_O": out,
                "out_MO": out, "parts_NMO": "fp32"}  # fmt: skip
    return {**{name: f"*{kind}:16" for name, kind in pointers.items()}, **dict.fromkeys(sizes, "i32:16"), "rows": "i32",
            "blocks": "i32", "number": "i32"}  # fmt: skip


def rows_signature(out: str) -> dict[str, str]:
    return {"x_MI": "*bf16:16", "out_MI": f"*{out}:16", "scales_MB": "*fp32:16", "stride_x": "i32:16",
            "inputs": "i32:16", "blocks": "i32", "size": "i32:16"}  # fmt: skip
