"""Products in fp8 against float64: of the weight alone, and of activations put in fp8 the same way."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.scaled import ScaledWeight, scaled
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import fp8_linear

#: outputs, inputs, block of scales (None: one for each output), rows, multiprocessors
CASES = [(80, 384, None, 1, 64), (40, 200, None, 20, 1), (200, 300, (128, 128), 3, 1), (40, 256, (128, 128), 9, 4)]


def make(outputs: int, inputs: int, block: tuple[int, int] | None, dtype: torch.dtype) -> ScaledWeight:
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randn(outputs, inputs, generator=generator).mul(60).to(torch.float8_e4m3fn)
    shape = (outputs,) if block is None else (-(-outputs // block[0]), -(-inputs // block[1]))
    return scaled("fp8", values, torch.rand(shape, generator=generator) / 60 + 0.01, dtype, block)


def in_fp8(x: torch.Tensor, size: int) -> torch.Tensor:
    """Rows in e4m3, `size` inputs at a time, as float64."""
    parts = []
    for piece in x.float().split(size, dim=1):
        scale = piece.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        parts.append((piece / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double())
    return torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "block", "rows", "cores"), CASES)
def test_product(outputs, inputs, block, rows, cores, native, dtype):
    weight = make(outputs, inputs, block, dtype)
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    device = DeviceDescription(multiprocessors=cores, native_fp8=native)
    taken = in_fp8(x, weight.block[1]) if native else x.double()
    exact = taken @ weight.dequantize(torch.float64).t()
    # A number halfway between two codes may go either way where the scale is rounded otherwise.
    near = (2e-2 if native else 1e-5) if dtype == torch.float32 else 2e-2
    scale = exact.abs().max()
    for given, wanted in ((bias, exact + bias.double()), (None, exact)):
        got = fp8_linear.pack(weight, given, device)(x)
        assert got.dtype == dtype
        assert (got.double() - wanted).abs().max() / scale < near


def test_many_rows_and_single_ones():
    weight = make(40, 128, None, torch.float32)
    packed = fp8_linear.pack(weight, None, DeviceDescription())
    x = torch.randn(256, 128)
    torch.testing.assert_close(packed(x), x @ weight.dequantize().t())
    assert packed(x[:2], out_dtype=torch.float64).dtype == torch.float64
    ids = torch.tensor([39, 0])
    assert torch.equal(packed.rows(ids), weight.dequantize()[ids])
    blocks = make(200, 300, (128, 128), torch.float32)
    packed = fp8_linear.pack(blocks, None, DeviceDescription())
    assert torch.equal(packed.rows(torch.tensor([150, 3])), blocks.dequantize()[[150, 3]])
    assert packed.nbytes == 200 * 300 + 2 * 3 * 4


def test_blocks_that_steps_would_cross_are_refused():
    assert fp8_linear.reasons_against((128, 64), 256) and not fp8_linear.reasons_against((1, 64), 64)
    assert not fp8_linear.reasons_against((128, 128), 300)
