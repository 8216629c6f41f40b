"""The products of adapters against the references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from enginecore.ops.adapters import lora_expand, lora_shrink
from enginecore_cpu import native
from enginecore_cpu.ops import NativeOps

MODULE: Any = native.load()
pytestmark = pytest.mark.skipif(MODULE is None, reason="the plugin was installed without a compiler")

ISAS = ("", "generic")


def ops(isa: str = "") -> tuple[Any, Any]:
    table = NativeOps(MODULE.Kernels(2, isa))
    shrink, expand = table.get("lora_shrink"), table.get("lora_expand")
    assert shrink is not None and expand is not None
    return shrink.run, expand.run


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "inputs", "rank"), [(1, 576, 16), (37, 100, 8), (5, 33, 3), (0, 16, 8)])
def test_as_the_references_say(isa: str, dtype: torch.dtype, tokens: int, inputs: int, rank: int) -> None:
    shrink, expand = ops(isa)
    adapter = torch.arange(tokens) % 4 - 1
    x = random(tokens, inputs + 7, dtype=dtype)[:, :inputs]
    a = random(3, 3, rank, inputs, dtype=dtype)
    b = [random(3, outputs, rank, dtype=dtype) for outputs in (300, 17, 1)]
    h = shrink(x, a, adapter)
    torch.testing.assert_close(h, lora_shrink(x, a, adapter), rtol=1e-4, atol=1e-4)
    wide = random(tokens, 330, dtype=dtype)
    y, expected = wide.clone()[:, 2:320], wide.clone()[:, 2:320]
    assert expand(h, b, adapter, y) is y
    lora_expand(h, b, adapter, expected)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(y, expected, **close)
    assert torch.equal(y[adapter < 0], wide[:, 2:320][adapter < 0])


def test_a_row_does_not_depend_on_the_others() -> None:
    shrink, expand = ops()
    x, a, b = random(9, 64), random(1, 2, 16, 64), [random(2, 40, 16)]
    adapter = torch.tensor([0, 1, 1, -1, 0, 0, 1, -1, 0])
    together = expand(shrink(x, a, adapter), b, adapter, torch.zeros(9, 40))
    for row in range(9):
        one, its = x[row : row + 1], adapter[row : row + 1]
        assert torch.equal(expand(shrink(one, a, its), b, its, torch.zeros(1, 40))[0], together[row])


def test_what_does_not_fit_is_refused() -> None:
    shrink, expand = ops()
    x, a, one = random(2, 16), random(1, 2, 8, 16), torch.tensor([0, 1])
    with pytest.raises(IndexError, match="adapter 2 is not one of 2"):
        shrink(x, a, torch.tensor([0, 2]))
    for wrong in ((x, a.bfloat16(), one), (x, a[..., :8], one), (x, a, one[:1]), (x, a, one.int())):
        with pytest.raises((ValueError, TypeError)):
            shrink(*wrong)
    h, b = shrink(x, a, one), random(2, 12, 8)
    for args in ((h, [b], one, torch.zeros(2, 11)), (h, [b[..., :4]], one, torch.zeros(2, 12))):
        with pytest.raises((ValueError, TypeError)):
            expand(*args)
    with pytest.raises(IndexError, match="adapter 7"):
        expand(h, [b], torch.tensor([0, 7]), torch.zeros(2, 12))
