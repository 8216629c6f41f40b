"""Decode over latents against float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import AttentionMetadata
from enginecore.testing import nmse
from enginecore_triton import DeviceDescription
from enginecore_triton.ops.mla_decode import mla_decode

LATENT, ROPE, BLOCK = 64, 16, 16


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-10), (torch.float16, 1e-6)])
@pytest.mark.parametrize("multiprocessors", [1, 100])
@pytest.mark.parametrize(("heads", "pairs"), [(16, [(1, 1), (1, 16), (1, 270)]), (5, [(3, 3), (1, 40), (2, 150)])])
def test_against_float64(
    dtype: torch.dtype, limit: float, multiprocessors: int, heads: int, pairs: list[tuple[int, int]]
) -> None:
    torch.manual_seed(5)
    order, scale = torch.randperm(40).tolist(), 0.11
    cache = torch.full((40, BLOCK, LATENT + ROPE), torch.nan, dtype=dtype)
    starts = [0]
    for queries, _ in pairs:
        starts.append(starts[-1] + queries)
    query = torch.randn(starts[-1], heads, LATENT + ROPE).to(dtype)
    expected, tables = [], []
    for (queries, length), start in zip(pairs, starts, strict=False):
        rows = torch.randn(length, LATENT + ROPE).to(dtype)
        tables.append([order.pop() for _ in range(-(-length // BLOCK))])
        for i, row in enumerate(rows):
            cache[tables[-1][i // BLOCK], i % BLOCK] = row
        scores = torch.einsum("qhd,ld->hql", query[start : start + queries].double(), rows.double()) * scale
        hidden = torch.arange(length) > torch.arange(length - queries, length)[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected.append(torch.einsum("hql,ld->qhd", weights, rows[:, :LATENT].double()))
    table = torch.full((len(pairs), 20), 0x3FFFFFFF, dtype=torch.int32)
    for i, blocks in enumerate(tables):
        table[i, : len(blocks)] = torch.tensor(blocks)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32), block_table=table, slot_mapping=torch.zeros(1),
        seq_lens=torch.tensor([length for _, length in pairs], dtype=torch.int32),
        max_query_len=max(queries for queries, _ in pairs), max_seq_len=max(length for _, length in pairs),
    )  # fmt: skip
    out = mla_decode(query, cache, metadata, scale, LATENT, device=DeviceDescription(multiprocessors=multiprocessors))
    assert out.shape == (starts[-1], heads, LATENT) and nmse(out, torch.cat(expected)) < limit
