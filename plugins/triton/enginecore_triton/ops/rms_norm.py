"""Root-mean-square norm, alone and fused with the addition of the residual. One program a row.

Shape suffixes: T rows, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton import configs
from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import power_of_two

#: The row is kept in registers.
MAX_SIZE = 32768


@triton.jit
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, eps, stride_x, stride_residual, stride_out, stride_sum,
    size, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ADD: x + residual, rounded to its dtype as torch rounds it, goes to `sum_ptr` and is what is normed."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < size
    x = tl.load(x_ptr + row * stride_x + offsets, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * stride_residual + offsets, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * stride_sum + offsets, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    weight = tl.load(weight_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offsets, (wide * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, *, device: DeviceDescription) -> torch.Tensor:
    """Schema `rms_norm`. Rows may be strided; any leading shape."""
    rows_TE = x_TE.reshape(-1, x_TE.shape[-1])  # copies only when the leading strides cannot be merged
    if rows_TE.stride(-1) != 1:
        rows_TE = rows_TE.contiguous()
    out_TE = torch.empty(rows_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    _launch(rows_TE, rows_TE, weight_E, out_TE, out_TE, eps, device, add=False)
    return out_TE.view(x_TE.shape)


def fused_add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, *, device: DeviceDescription
) -> tuple[torch.Tensor, torch.Tensor]:
    """Schema `fused_add_rms_norm`; neither input is overwritten."""
    size = x_TE.shape[-1]
    x, residual = x_TE.reshape(-1, size).contiguous(), residual_TE.reshape(-1, size).contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight_E, out, total, eps, device, add=True)
    return out.view(x_TE.shape), total.view(x_TE.shape)


def _launch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, total: torch.Tensor,
    eps: float, device: DeviceDescription, *, add: bool,
) -> None:  # fmt: skip
    rows, size = x.shape
    if not rows:
        return
    block = power_of_two(size)
    config = configs.pick("rms_norm", device.architecture, size=block)
    _rms_norm[(rows,)](
        x, residual, weight.contiguous(), out, total, eps, x.stride(0), residual.stride(0), out.stride(0),
        total.stride(0), size, ADD=add, BLOCK=block, **config.keywords,
    )  # fmt: skip


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size = query.attributes.get("size", 0)
    return [f"hidden size {size} is above {MAX_SIZE}"] if size > MAX_SIZE else []


def aot_cases() -> list[AotCase]:
    def case(dtype: str, size: int, add: bool) -> AotCase:
        pointers = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), f"*{dtype}:16")
        strides = dict.fromkeys(("stride_x", "stride_residual", "stride_out", "stride_sum", "size"), "i32:16")
        return AotCase(
            name=f"{'add, ' if add else ''}{dtype}, {size}", kernel=_rms_norm,
            signature={**pointers, **strides, "eps": "fp32"}, constants={"ADD": add, "BLOCK": power_of_two(size)},
            config="rms_norm", sizes={"size": power_of_two(size)},
        )  # fmt: skip

    sizes = ((1024, False), (2048, True), (4096, True), (8192, False), (16384, True))
    return [case("bf16", size, add) for size, add in sizes]
