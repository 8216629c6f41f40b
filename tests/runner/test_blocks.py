"""Blocks move whole, wherever a layout has its blocks."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import BackendContext, KVCacheLayout
from enginecore.ops.torch_backend import TorchAttention, TorchBackend
from enginecore.runner.blocks import PagedMover


class OuterPlanes(TorchAttention):
    """Keys and values in planes of their own: blocks are the second dimension."""

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        for source, target in zip(src, dst, strict=True):
            for i, j in pairs:
                target[:, j] = source[:, i]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_down_as_bytes_and_up_again(axis: int, dtype: str) -> None:
    backend = TorchBackend(BackendContext(device="cpu", index=0))
    if axis:
        backend.attention = OuterPlanes()
    shape = (-1, 2, 4, 3) if axis == 0 else (2, -1, 4, 3)
    layout = KVCacheLayout(shape=shape, dtype=dtype, page_bytes=24 * getattr(torch, dtype).itemsize)
    caches = [torch.randn(layout.shape_for(5)).to(getattr(torch, dtype)) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    mover = PagedMover(backend, caches, [layout] * 3, 4)
    mover.fence()()
    mover.to_host([(0, 3), (4, 1)])
    saved = [bytes(view) for view in mover.views(3)]
    assert sum(map(len, saved)) == mover.block_bytes == 3 * layout.page_bytes
    for cache in caches:
        cache.zero_()
    for view, data in zip(mover.views(2), saved, strict=True):
        view[:] = data
    mover.to_device([(2, 0), (1, 2)])
    for cache, old in zip(caches, before, strict=True):
        blocks, wanted = cache.movedim(axis, 0), old.movedim(axis, 0)
        assert torch.equal(blocks[0], wanted[0]) and torch.equal(blocks[2], wanted[4])
        assert not blocks[1].any() and not blocks[3].any()
