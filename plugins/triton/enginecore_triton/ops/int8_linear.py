"""Products of signed bytes: a scale for each output of the weight, and one for each row of activations, found here."""

from __future__ import annotations

import torch
from enginecore.device.optable import OpQuery
from enginecore.ops.scaled import ScaledWeight

from enginecore_triton.aot_case import AotCase
from enginecore_triton.device import DeviceDescription
from enginecore_triton.ops import _scaled_product
from enginecore_triton.ops._scaled_product import ScaledLinear

STEP = 128


def pack(weight: ScaledWeight, bias_O: torch.Tensor | None, device: DeviceDescription) -> ScaledLinear:
    return ScaledLinear(weight, bias_O, device, "int8", "int8_linear")


def reasons_against(block: tuple[int, int], in_features: int) -> list[str]:
    if block[1] < in_features and block[1] % STEP:
        return [f"scales for each {block[1]} inputs are not whole multiples of {STEP}"]
    return []


def supports(query: OpQuery, device: DeviceDescription) -> list[str]:
    size = query.attributes.get("block_inputs", STEP)
    return reasons_against((1, size), query.attributes.get("in_features", size))


def aot_cases() -> list[AotCase]:
    def case(name: str, rows: int, **flags: bool) -> AotCase:
        constants = {"MODE": "int8", "BLOCKED": False, "EVEN": True, "HAS_BIAS": False, "IN_PARTS": False, **flags}
        return AotCase(name=name, kernel=_scaled_product.product, signature=_scaled_product.signature("i8", "i8"),
                       constants=constants, config="int8_linear", sizes={"rows": rows, "itemsize": 1})  # fmt: skip

    return [
        case("1 row", 1, IN_PARTS=True),
        case("128 rows", 128, HAS_BIAS=True),
        case("4096 rows", 4096),
        AotCase(name="quantise rows", kernel=_scaled_product.quantize_rows, options={"num_warps": 4},
                signature=_scaled_product.rows_signature("i8"), constants={"FP8": False, "BLOCK": 1024}),
    ]  # fmt: skip
