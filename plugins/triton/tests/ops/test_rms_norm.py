"""Norms against float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.testing import nmse, references
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.rms_norm import fused_add_rms_norm, rms_norm

DEVICE = DeviceDescription()
LIMIT = {torch.float32: 1e-12, torch.float16: 1e-6}


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = references.f64(x)
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * references.f64(weight)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("shape", [(5, 64), (1, 1000), (3, 2, 130), (0, 8)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = (torch.randn(*shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    out = rms_norm(x, weight, 1e-5, device=DEVICE)
    assert out.shape == x.shape and out.dtype == dtype
    assert not x.numel() or nmse(out, normed(x, weight)) < LIMIT[dtype]


def test_rows_of_a_fused_projection_are_not_copied() -> None:
    x = torch.randn(4, 3, 96)[:, 1]
    assert nmse(rms_norm(x, torch.ones(96), 1e-5, device=DEVICE), normed(x, torch.ones(96))) < 1e-12
    heads = torch.randn(4, 10, 32)[:, 2:7]  # strides of the leading dimensions that do not merge
    assert nmse(rms_norm(heads, torch.ones(32), 1e-5, device=DEVICE), normed(heads, torch.ones(32))) < 1e-12


@pytest.mark.parametrize("dtype", LIMIT)
def test_fused_add(dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in [(7, 200), (7, 200), (200,)])
    kept = x.clone(), residual.clone()
    out, total = fused_add_rms_norm(x, residual, weight, 1e-5, device=DEVICE)
    assert torch.equal(total, kept[0] + kept[1]), "the sum is rounded as torch rounds it"
    assert nmse(out, normed(total, weight)) < LIMIT[dtype]
