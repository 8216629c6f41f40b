"""Simple blocks as numbers, beside the format's own library."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enginecore.ops.blocks import UNPACKED, unpack_blocks
from enginecore.ops.quantized import SCHEMES
from gguf.quants import dequantize


@pytest.mark.parametrize("scheme", sorted(UNPACKED))
def test_numbers_are_those_of_the_formats_library_to_the_last_bit(scheme: str) -> None:
    number, _, size = SCHEMES[scheme]
    raw = np.random.default_rng(3).integers(0, 256, (500, size), dtype=np.uint8)
    raw[:, [1, 3]] &= 0x3F  # scales and minima are finite, some of them subnormal
    raw[:20, 1] = 0
    expected = torch.from_numpy(np.asarray(dequantize(raw, number)))  # type: ignore[arg-type]
    found = unpack_blocks(scheme, torch.from_numpy(raw))
    assert found.shape == (500, 32)
    assert torch.equal(found.view(torch.int32), expected.view(500, 32).view(torch.int32))
