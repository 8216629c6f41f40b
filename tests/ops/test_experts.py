"""Experts and adapters token by token, in plain loops and float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from enginecore.ops.adapters import lora_expand, lora_shrink
from enginecore.ops.experts import moe_experts


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("activation", "act"), [("silu", F.silu), ("gelu", F.gelu)])
def test_experts(activation, act) -> None:
    x, gate_up, down = rand(5, 6, seed=0), rand(4, 8, 6, seed=1), rand(4, 6, 4, seed=2)
    ids = torch.tensor([[0, 1], [3, 0], [2, 2], [-1, 1], [-1, -1]])
    weights = torch.rand(5, 2)
    got = moe_experts(x, ids, weights, gate_up, down, activation)
    for t in range(5):
        expected = torch.zeros(6, dtype=torch.float64)
        for place, expert in enumerate(ids[t].tolist()):
            if expert >= 0:
                inner = gate_up[expert] @ x[t]
                expected += weights[t, place].double() * (down[expert] @ (act(inner[:4]) * inner[4:]))
        torch.testing.assert_close(got[t], expected)
    with pytest.raises(ValueError, match="relu"):
        moe_experts(x, ids, weights, gate_up, down, "relu")


def test_adapters() -> None:
    x, a, b = rand(5, 6, seed=0), rand(2, 3, 2, 6, seed=1), [rand(3, 4, 2, seed=2), rand(3, 5, 2, seed=3)]
    adapter, y = torch.tensor([2, -1, 0, 2, 1]), rand(5, 9, seed=4)
    before = y.clone()
    h = lora_shrink(x, a, adapter)
    assert lora_expand(h, b, adapter, y) is y
    for t, n in enumerate(adapter.tolist()):
        added = torch.zeros(9, dtype=torch.float64)
        if n >= 0:
            added = torch.cat([b[s][n] @ (a[s, n] @ x[t]) for s in range(2)])
        torch.testing.assert_close(y[t], before[t] + added)
    assert (h[:, 1] == 0).all()
