"""K-quants in simpler formats, against the gguf library's own reading of both."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from enginecore.models.quantization import SIMPLER
from enginecore.ops.kquants import simpler
from enginecore.ops.quantized import SCHEMES, QuantizedWeight


def random_weight(scheme: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Any bytes are a K-quant, but for the half-precision factors, which must be of a sane size."""
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (outputs * inputs // 256, SCHEMES[scheme][2]), np.uint8)
    factors = {"q4_k": (0, 2), "q5_k": (0, 2), "q2_k": (80, 2), "q3_k": (108, 1), "q6_k": (208, 1)}[scheme]
    start, count = factors
    halves = rng.uniform(1e-4, 2e-2, (len(blocks), count)).astype(np.float16)
    blocks[:, start : start + 2 * count] = halves.view(np.uint8)
    return QuantizedWeight(scheme, torch.from_numpy(blocks.reshape(outputs, -1)), inputs, torch.float32)


@pytest.mark.parametrize("scheme", sorted(SIMPLER))
def test_values_stay(scheme):
    weight = random_weight(scheme, 37, 512)
    other = simpler(weight, SIMPLER[scheme])
    assert other.scheme == SIMPLER[scheme] and other.data_OB.shape == (37, 512 // 32 * SCHEMES[other.scheme][2])
    before, after = (side.dequantize().reshape(-1, 32) for side in (weight, other))
    assert before.std() > 0
    # A rounded scale and minimum (2^-11 of each), or a step of 1/127 of the largest value.
    span = before.amax(1, keepdim=True) - before.amin(1, keepdim=True)
    bound = 2**-10 * (span + 2 * before.abs().amax(1, keepdim=True)) if scheme in ("q4_k", "q5_k") else (
        before.abs().amax(1, keepdim=True) / 220
    )  # fmt: skip
    assert bool(((before - after).abs() <= bound).all())


def test_simple_formats_have_no_simpler_one():
    with pytest.raises(ValueError, match="q4_1"):
        simpler(QuantizedWeight("q4_1", torch.zeros(1, 20, dtype=torch.uint8), 32, torch.float32), "q8_0")
