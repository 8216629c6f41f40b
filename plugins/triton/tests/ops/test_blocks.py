"""Copies of blocks: one launch over all layers, chains of copies, and swaps."""

from __future__ import annotations

import pytest
import torch
from enginecore_triton.ops import blocks


def caches(dtype: torch.dtype = torch.float16, layers: int = 3, count: int = 6) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(count, 2, 3, 16, 40, generator=rng).to(dtype) for _ in range(layers)]


def test_copy_blocks_in_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_copy_one_by_one", None)
    before, after = caches(), caches()
    blocks.copy_blocks(after, [(0, 5), (0, 3), (2, 4)])
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[[0, 1, 2, 0, 2, 0]])


def test_a_block_that_is_read_and_written_is_read_first() -> None:
    before, after = caches(), caches()
    blocks.copy_blocks(after, [(0, 1), (1, 2)])
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old[[0, 0, 1, 3, 4, 5]])


def test_nothing_to_copy() -> None:
    after = caches()
    blocks.copy_blocks(after, [])
    blocks.swap_blocks(after, caches(), [])
    assert all(torch.equal(old, new) for old, new in zip(caches(), after, strict=True))


def test_swap_blocks() -> None:
    source, target = caches(), [torch.zeros(8, 2, 3, 16, 40, dtype=torch.float16) for _ in range(3)]
    blocks.swap_blocks(source, target, [(1, 6), (2, 7), (5, 0)])
    for old, new in zip(source, target, strict=True):
        assert torch.equal(new[[6, 7, 0]], old[[1, 2, 5]]) and not new[1:6].any()


def test_neighbours_are_one_copy() -> None:
    assert blocks.merge_runs([(1, 6), (2, 7), (3, 8), (5, 9), (6, 1), (7, 2)]) == [(1, 6, 3), (5, 9, 1), (6, 1, 2)]
    assert blocks.merge_runs([(2, 2), (1, 1)]) == [(2, 2, 1), (1, 1, 1)]
