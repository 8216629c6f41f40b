"""Eight-bit weights with scales, number by number."""

from __future__ import annotations

import pytest
import torch
from enginecore.errors import ModelError
from enginecore.ops.scaled import join, scaled


def values(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)).mul(50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("count", [1, 6])
def test_scales_of_the_whole_or_of_rows(count: int) -> None:
    codes, scales = values(6, 9), torch.rand(count) + 0.5
    weight = scaled("fp8", codes, scales, torch.bfloat16)
    exact = weight.dequantize(torch.float64)
    for row in range(6):
        assert torch.equal(exact[row], codes[row].double() * scales[row % count].double())
    assert weight.dequantize().dtype == torch.bfloat16 and (weight.out_features, weight.in_features) == (6, 9)


def test_scales_of_blocks() -> None:
    codes, scales = values(6, 9), torch.rand(2, 3) + 0.5
    exact = scaled("fp8", codes, scales, torch.float32, (4, 4)).dequantize(torch.float64)
    for row in range(6):
        for column in range(9):
            assert exact[row, column] == codes[row, column].double() * scales[row // 4, column // 4].double()


def test_joined_rows() -> None:
    one, two = (scaled("fp8", values(4, 9, seed), torch.rand(4), torch.float32) for seed in (1, 2))
    both = join([one, two])
    assert both is not None and torch.equal(both.dequantize(), torch.cat([one.dequantize(), two.dequantize()]))
    blocks = [scaled("fp8", values(6, 8), torch.rand(2, 2), torch.float32, (4, 4)) for _ in range(2)]
    assert join(blocks) is None and join([one, blocks[0]]) is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="float8"):
        scaled("int8", values(4, 4), torch.ones(4), torch.float32)
    with pytest.raises(ModelError, match="3 scales"):
        scaled("fp8", values(4, 4), torch.ones(3), torch.float32)
    with pytest.raises(ModelError, match="need scales"):
        scaled("fp8", values(4, 4), torch.ones(1, 2), torch.float32, (2, 2))
