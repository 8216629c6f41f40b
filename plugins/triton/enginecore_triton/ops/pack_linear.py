"""Linear layers, by what their weight is: plain ones are the library's product, quantised ones the kernels here.

A quantised weight whose groups or blocks do not fit a kernel is unpacked at load, which costs memory and nothing else.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from enginecore.device.optable import OpQuery
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.quantized import INT8, QuantizedWeight
from enginecore.ops.reference import PackedLinear
from enginecore.ops.scaled import ScaledWeight, scaled

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.ops import fp8_linear, int4_linear, int8_linear

logger = logging.getLogger(__name__)

#: What a backend with these kernels may put into its capabilities' `quantizations`.
SCHEMES = frozenset({"int4", "fp8", "int8"})


def pack_linear(weight_OI: Any, bias_O: torch.Tensor | None, *, device: DeviceDescription) -> Any:
    """The core's op `pack_linear`; a weight is a tensor or one of the core's quantised forms."""
    if isinstance(weight_OI, torch.Tensor):
        return PackedLinear(weight_OI, bias_O)
    if isinstance(weight_OI, QuantizedWeight) and weight_OI.scheme == INT8:
        weight_OI = scaled(INT8, *weight_OI.parts(), weight_OI.dtype)
    reasons: list[str] = []
    if isinstance(weight_OI, Int4Weight):
        size, dtype = weight_OI.group_size, str(weight_OI.dtype).removeprefix("torch.")
        reasons = int4_linear.reasons_against(size, weight_OI.in_features, dtype, device.architecture)
        if not reasons:
            return int4_linear.Int4Linear(weight_OI, bias_O, device)
    elif isinstance(weight_OI, ScaledWeight):
        module = fp8_linear if weight_OI.scheme == "fp8" else int8_linear
        reasons = module.reasons_against(weight_OI.block, weight_OI.in_features)
        if not reasons:
            return module.pack(weight_OI, bias_O, device)
    if reasons:
        logger.warning("a weight is unpacked: %s", "; ".join(reasons))
    return PackedLinear(weight_OI.dequantize(), bias_O)


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    return []


def aot_cases() -> list[AotCase]:
    """None of its own: those of the modules that it chooses from."""
    return []
