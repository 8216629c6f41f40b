"""Rotary embedding in place, against float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.testing import nmse
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.rotary_embedding import rotary_embedding

DEVICE = DeviceDescription()


def turned(x: torch.Tensor, angle_TN: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair as a complex number times e^(i angle)."""
    out, n = x.double().clone(), 2 * angle_TN.shape[1]
    pairs = (slice(0, n, 2), slice(1, n, 2)) if interleaved else (slice(0, n // 2), slice(n // 2, n))
    numbers = torch.complex(out[..., pairs[0]], out[..., pairs[1]])
    numbers = numbers * torch.polar(torch.ones_like(angle_TN), angle_TN)[:, None]
    out[..., pairs[0]], out[..., pairs[1]] = numbers.real, numbers.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True], ids=["neox", "interleaved"])
@pytest.mark.parametrize(("size", "dimensions"), [(64, 64), (80, 32), (48, 48)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-11), (torch.float16, 1e-6)])
def test_rotary(interleaved: bool, size: int, dimensions: int, dtype: torch.dtype, limit: float) -> None:
    positions = torch.tensor([0, 7, 3, 900])
    angle_PN = torch.arange(1000).double()[:, None] * (10000.0 ** -(torch.arange(dimensions // 2) / dimensions * 2))
    table = torch.cat([angle_PN.cos(), angle_PN.sin()], 1).float()
    fused = torch.randn(4, 7 + 2 + 2, size).to(dtype)
    query, key, rest = fused.split([7, 2, 2], 1)
    expected = [turned(x, angle_PN[positions], interleaved) for x in (query, key)]
    untouched = rest.clone()
    out = rotary_embedding(positions, query, key, table, interleaved, device=DEVICE)
    assert out[0].data_ptr() == query.data_ptr() and torch.equal(rest, untouched)
    for got, wanted in zip(out, expected, strict=True):
        assert nmse(got, wanted) < limit
        assert torch.equal(got[..., dimensions:].double(), wanted[..., dimensions:])


def test_more_heads_than_one_program_holds() -> None:
    query, key = torch.randn(2, 71, 64), torch.randn(2, 1, 64)
    angle = torch.rand(5, 32, dtype=torch.float64)
    expected = turned(query, angle[[4, 2]], False)
    table = torch.cat([angle.cos(), angle.sin()], 1).float()
    rotary_embedding(torch.tensor([4, 2]), query, key, table, False, device=DEVICE)
    assert nmse(query, expected) < 1e-11
