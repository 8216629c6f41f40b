"""Products of bytes against whole-number arithmetic."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.scaled import scaled
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import int8_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "rows", "cores"), [(80, 384, 1, 64), (40, 200, 20, 1), (64, 128, 70, 1)])
def test_product(outputs, inputs, rows, cores, dtype):
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    weight = scaled("int8", values, torch.rand(outputs, generator=generator) / 100, dtype)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    x[0, 3] = 0.0
    bias = torch.randn(outputs).to(dtype)
    scale = x.float().abs().amax(1, keepdim=True) / 127
    codes = (x.float() / scale).round().clamp(-127, 127)
    exact = (codes.long() @ values.long().t()).double() * scale.double() * weight.scales_AB.double().t() + bias.double()
    got = int8_linear.pack(weight, bias, DeviceDescription(multiprocessors=cores))(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=1e-5 if dtype == torch.float32 else 2e-3, atol=2e-3)


def test_a_row_of_zeros_stays_zeros():
    weight = scaled("int8", torch.full((8, 32), 3, dtype=torch.int8), torch.ones(1), torch.float32)
    assert (int8_linear.pack(weight, None, DeviceDescription())(torch.zeros(2, 32)) == 0).all()
