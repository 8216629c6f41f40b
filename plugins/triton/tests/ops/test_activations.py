"""Gated activations against float64, at the ends of the range too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from enginecore.testing import nmse
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import activations

DEVICE = DeviceDescription()
PLAIN = {
    "silu_and_mul": F.silu,
    "gelu_and_mul": F.gelu,
    "gelu_tanh_and_mul": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("op", PLAIN)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-11), (torch.float16, 1e-6)])
@pytest.mark.parametrize("shape", [(3, 2 * 1100), (2, 2, 14), (0, 6)])
def test_activation(op: str, dtype: torch.dtype, limit: float, shape: tuple[int, ...]) -> None:
    x = (torch.randn(*shape) * 3).to(dtype)
    out = getattr(activations, op)(x, device=DEVICE)
    gate, up = x.double().chunk(2, dim=-1)
    assert out.shape == gate.shape and out.dtype == dtype
    assert not x.numel() or nmse(out, PLAIN[op](gate) * up) < limit


@pytest.mark.parametrize("op", PLAIN)
def test_large_inputs(op: str) -> None:
    x = torch.tensor([[-80.0, -20.0, 0.0, 20.0, 80.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    out = getattr(activations, op)(x, device=DEVICE)
    assert torch.allclose(out, torch.tensor([[0.0, 0.0, 0.0, 20.0, 80.0]]), atol=1e-6)
