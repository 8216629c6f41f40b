"""Products with weights in e4m3, a scale for the weight, each output, or each block of 128 by 128.

Where the hardware multiplies fp8 ("native"), activations are put in fp8 too, with a scale for each row (or each 128 of
its inputs, where the weight has blocks). Elsewhere activations stay as they are and the weight saves memory traffic.
Which of the two it is depends on the device alone: a row's result does not change with the rows beside it for that.
"""

from __future__ import annotations

import torch
from enginecore.device.optable import OpQuery
from enginecore.ops.scaled import ScaledWeight

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.ops import _scaled_product
from enginecore_triton.ops._scaled_product import ScaledLinear

#: Steps over inputs must not cross a block; the longest step of the configs.
STEP = 128
_NATIVE = frozenset({"sm_89", "sm_90", "sm_100", "gfx950"})


def pack(weight: ScaledWeight, bias_O: torch.Tensor | None, device: DeviceDescription) -> ScaledLinear:
    return ScaledLinear(weight, bias_O, device, "fp8" if device.native_fp8 else "weight", "fp8_linear")


def reasons_against(block: tuple[int, int], in_features: int) -> list[str]:
    if block[1] < in_features and block[1] % STEP:
        return [f"scales for each {block[1]} inputs are not whole multiples of {STEP}"]
    return []


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size = query.attributes.get("block_inputs", STEP)
    return reasons_against((1, size), query.attributes.get("in_features", size))


def aot_cases() -> list[AotCase]:
    flags = {"EVEN": True, "HAS_BIAS": False, "IN_PARTS": True}

    def case(name: str, x: str, rows: int, itemsize: int, mode: str, blocked: bool, **more: bool) -> AotCase:
        return AotCase(
            name=name, kernel=_scaled_product.product, config="fp8_linear", sizes={"rows": rows, "itemsize": itemsize},
            signature=_scaled_product.signature(x, "u8"),
            constants={**flags, "MODE": mode, "BLOCKED": blocked, **more}, only=None if mode == "weight" else _NATIVE,
        )  # fmt: skip

    return [
        case("weight only, 1 row", "bf16", 1, 2, "weight", False),
        case("weight only, blocks, 128 rows", "bf16", 128, 2, "weight", True, IN_PARTS=False, HAS_BIAS=True),
        case("weight only, fp32", "fp32", 128, 4, "weight", False),
        case("native, 1 row", "u8", 1, 1, "fp8", False),
        case("native, 128 rows", "u8", 128, 1, "fp8", False, IN_PARTS=False),
        case("native, blocks, 4096 rows", "u8", 4096, 1, "fp8", True, IN_PARTS=False),
        AotCase(name="quantise rows", kernel=_scaled_product.quantize_rows, options={"num_warps": 4}, only=_NATIVE,
                signature=_scaled_product.rows_signature("fp8e4nv"), constants={"FP8": True, "BLOCK": 1024}),
    ]  # fmt: skip
