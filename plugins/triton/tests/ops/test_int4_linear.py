"""Four-bit products against the weight unpacked in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from enginecore.ops.int4 import Int4Weight, from_gptq, pack_rows
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import int4_linear

ALONE = DeviceDescription(multiprocessors=1)
WIDE = DeviceDescription(multiprocessors=64)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def make(inputs: int, outputs: int, group: int, dtype: torch.dtype, *, act_order=False, symmetric=False) -> Int4Weight:
    generator = torch.Generator().manual_seed(inputs + group)
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
    groups = inputs // group
    scales = torch.rand(groups, outputs, generator=generator).half() + 0.5
    zeros = torch.randint(-(2**31), 2**31 - 1, (groups, outputs // 8), generator=generator, dtype=torch.int32)
    g_idx = (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)] if act_order else None
    return from_gptq(pack_rows(codes), None if symmetric else zeros, scales, g_idx, dtype)


CASES = [
    # inputs, outputs, group, rows, device, act_order, symmetric
    (512, 80, 128, 1, WIDE, False, False),
    (1024, 64, 32, 5, WIDE, False, True),
    (288, 40, 32, 17, ALONE, True, False),
    (320, 72, 320, 3, ALONE, False, False),
    (512, 64, 64, 40, ALONE, True, True),
    (256, 40, 64, 256, ALONE, True, False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("inputs", "outputs", "group", "rows", "device", "act_order", "symmetric"), CASES)
def test_product(inputs, outputs, group, rows, device, act_order, symmetric, dtype):
    weight = make(inputs, outputs, group, dtype, act_order=act_order, symmetric=symmetric)
    assert (weight.permutation_I is not None) is act_order and (weight.zeros_GO is None) is symmetric
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)).to(dtype) / inputs**0.5
    bias = torch.randn(outputs).to(dtype)
    packed = int4_linear.Int4Linear(weight, bias, device)
    exact = x.double() @ weight.dequantize(torch.float64).t() + bias.double()
    got = packed(x)
    assert got.dtype == dtype
    near = {"atol": TOLERANCE[dtype] * 4, "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(got.double(), exact, **near)
    without = int4_linear.Int4Linear(weight, None, device)(x, out_dtype=torch.float32)
    torch.testing.assert_close(without.double(), exact - bias.double(), **near)


def test_rows_and_size():
    weight = make(288, 40, 32, torch.float32, act_order=True)
    packed = int4_linear.Int4Linear(weight, None, ALONE)
    ids = torch.tensor([3, 39, 0])
    torch.testing.assert_close(packed.rows(ids), weight.dequantize()[ids], rtol=0, atol=0)
    assert packed.nbytes < 40 * 512 / 2 + 9 * 40 * 3 + 288 * 4 + 1
    assert (packed.in_features, packed.out_features) == (288, 40)


def test_groups_that_end_within_a_row_of_words_are_refused():
    assert int4_linear.reasons_against(16, 256) and not int4_linear.reasons_against(16, 16)
    assert not int4_linear.reasons_against(64, 256) and not int4_linear.reasons_against(64, 256, "float16", "gfx1100")
    assert "registers" in int4_linear.reasons_against(64, 256, "float32", "gfx1100")[0]
    weight = replace(make(256, 40, 64, torch.float32), group_size=256)
    assert not int4_linear.reasons_against(weight.group_size, weight.in_features)
