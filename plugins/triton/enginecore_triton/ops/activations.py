"""Gated activations: act(gate) * up, where a row holds the gate and then the other half.

As in the core's references the activation is worked out in float32 and rounded to the dtype before it is multiplied.

Shape suffixes: T rows, F intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from enginecore.device.optable import OpQuery

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.launch import cdiv

_BLOCK = 1024


@triton.jit
def _act_and_mul(x_ptr, out_ptr, stride_x, stride_out, size, ACT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    gate = tl.load(x_ptr + row * stride_x + offsets, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * stride_x + size + offsets, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    if ACT == "silu":
        active = wide / (1.0 + tl.exp(-wide))
    elif ACT == "gelu":
        active = 0.5 * wide * (1.0 + tl.erf(wide * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is 1 long before the exponential overflows
        active = 0.5 * wide * (2.0 - 2.0 / (tl.exp(2.0 * tl.minimum(inner, 20.0)) + 1.0))
    product = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * stride_out + offsets, product.to(out_ptr.dtype.element_ty), mask=inside)


def _run(x_T2F: torch.Tensor, act: str) -> torch.Tensor:
    x = x_T2F.reshape(-1, x_T2F.shape[-1])
    if x.stride(-1) != 1:
        x = x.contiguous()
    rows, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    if rows and size:
        grid = (rows, cdiv(size, _BLOCK))
        _act_and_mul[grid](
            x, out, x.stride(0), out.stride(0), size, ACT=act, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True
        )  # fmt: skip
    return out.view(*x_T2F.shape[:-1], size)


def silu_and_mul(x_T2F: torch.Tensor, *, device: DeviceDescription) -> torch.Tensor:
    return _run(x_T2F, "silu")


def gelu_and_mul(x_T2F: torch.Tensor, *, device: DeviceDescription) -> torch.Tensor:
    return _run(x_T2F, "gelu")


def gelu_tanh_and_mul(x_T2F: torch.Tensor, *, device: DeviceDescription) -> torch.Tensor:
    return _run(x_T2F, "gelu_tanh")


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    return []


def aot_cases() -> list[AotCase]:
    sizes = dict.fromkeys(("stride_x", "stride_out", "size"), "i32:16")
    signature = {"x_ptr": "*bf16:16", "out_ptr": "*bf16:16", **sizes}
    return [
        AotCase(
            name=act, kernel=_act_and_mul, signature=signature, constants={"ACT": act, "BLOCK": _BLOCK},
            options={"num_warps": 4},
        )
        for act in ("silu", "gelu", "gelu_tanh")
    ]  # fmt: skip
