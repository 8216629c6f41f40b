"""Which product a weight gets."""

from __future__ import annotations

from dataclasses import replace

import torch
from enginecore.ops.int4 import Int4Weight
from enginecore.ops.quantized import QuantizedWeight, quantize_int8
from enginecore.ops.reference import PackedLinear
from enginecore.ops.scaled import scaled
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.int4_linear import Int4Linear
from enginecore_triton.ops.pack_linear import pack_linear

DEVICE = DeviceDescription()


def test_each_weight_gets_its_product_and_all_agree_with_the_weight():
    words = torch.randint(-(2**31), 2**31 - 1, (8, 16), dtype=torch.int32)
    four = Int4Weight(words, torch.rand(2, 16).half(), None, 32, torch.float32)
    eight = torch.randint(-100, 100, (16, 64), dtype=torch.int8)
    weights = [
        four,
        replace(four, group_size=16, scales_GO=torch.rand(4, 16).half()),  # no kernel has such groups
        scaled("int8", eight, torch.ones(1), torch.float32),
        scaled("fp8", eight.float().to(torch.float8_e4m3fn), torch.rand(16), torch.float32),
        quantize_int8(torch.randn(16, 64)),
        QuantizedWeight("q8_0", torch.zeros(16, 68, dtype=torch.uint8), 64, torch.float32),
        torch.randn(16, 64),
    ]
    x, bias, kinds = torch.randn(3, 64), torch.randn(16), []
    for weight in weights:
        packed = pack_linear(weight, bias, device=DEVICE)
        kinds.append(type(packed))
        plain = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        expected = x @ plain.t() + bias
        assert (packed(x) - expected).abs().max() <= 0.02 * expected.abs().max()
        assert (packed.in_features, packed.out_features) == (64, 16) and packed.nbytes > 0
        torch.testing.assert_close(packed.rows(torch.tensor([3])), plain[3:4])
    assert kinds[0] is Int4Linear and kinds[1] is PackedLinear and kinds[-1] is kinds[-2] is PackedLinear
    assert PackedLinear not in kinds[2:5]
