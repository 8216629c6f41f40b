"""Adapters of mixed batches against one token after another in float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.device.optable import OpQuery
from enginecore.ops.adapters import lora_expand as expand_reference
from enginecore.ops.adapters import lora_shrink as shrink_reference
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.lora import lora_expand, lora_shrink, supports


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "inputs", "rank", "widths", "cores"),
    [(1, 300, 8, (40,), 64), (20, 128, 16, (72, 24, 24), 1), (150, 64, 5, (33, 8), 1)],
)
def test_mixed_batches(tokens, inputs, rank, widths, cores, dtype):
    device = DeviceDescription(multiprocessors=cores)
    generator = torch.Generator().manual_seed(tokens)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Runs of one adapter as prompts have them, then one of their own for each token; some have none.
    adapter = torch.randint(-1, 4, (tokens,), generator=generator)
    adapter[: tokens // 2] = 2
    x, a = rand(tokens, inputs), rand(len(widths), 4, rank, inputs) / inputs**0.5
    b, y = [rand(4, width, rank) / rank**0.5 for width in widths], rand(tokens, sum(widths))
    before = y.clone()
    h = lora_shrink(x, a, adapter, device=device)
    near = {"atol": 1e-5 if dtype == torch.float32 else 5e-3, "rtol": 5e-3}
    exact = shrink_reference(x.double(), a.double(), adapter)
    assert h.dtype == torch.float32 and (h[:, adapter < 0] == 0).all()
    torch.testing.assert_close(h.double(), exact, **near)
    wide = torch.cat([y, torch.zeros(tokens, 3, dtype=dtype)], 1)[:, : sum(widths)]  # rows with a stride
    assert lora_expand(h, b, adapter, wide, device=device) is wide
    torch.testing.assert_close(
        wide.double(), expand_reference(exact, [part.double() for part in b], adapter, y.double()), **near
    )
    assert torch.equal(wide[adapter < 0], before[adapter < 0])


def test_ranks_too_high_are_refused():
    query = OpQuery(op="lora_shrink", dtype="float16", attributes={"rank": 512})
    assert supports(query, DeviceDescription())
    with pytest.raises(ValueError, match="rank"):
        lora_shrink(torch.zeros(1, 8), torch.zeros(1, 1, 512, 8), torch.zeros(1).long(), device=DeviceDescription())
