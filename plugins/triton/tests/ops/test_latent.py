"""Attention over latents in steps of every mix of prompts and single tokens, written and read, against float64."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import AttentionMetadata, OpQuery
from enginecore.ops.reference import REFERENCE
from enginecore.testing import nmse
from enginecore_triton import DeviceDescription
from enginecore_triton.ops import latent as ops

LATENT, ROPE, BLOCK, BLOCKS = 32, 16, 16, 24
DEVICE = DeviceDescription(multiprocessors=8)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-10), (torch.float16, 1e-5)])
@pytest.mark.parametrize(
    ("heads", "pairs"),
    [(5, [(20, 20)]), (3, [(1, 40), (0, 9), (12, 31), (1, 1), (33, 70)]), (16, [(9, 9), (17, 64)]), (4, [(2, 30)])],
)
def test_against_float64(dtype: torch.dtype, limit: float, heads: int, pairs: list[tuple[int, int]]) -> None:
    torch.manual_seed(7)
    order, width = torch.randperm(BLOCKS).tolist(), LATENT + ROPE
    cache = torch.full((BLOCKS, BLOCK, width), torch.nan, dtype=dtype)
    starts, slots, table = [0], [], torch.full((len(pairs), 6), 0x3FFFFFFF, dtype=torch.int32)
    rows, new = [], []
    for i, (queries, length) in enumerate(pairs):
        blocks = [order.pop() for _ in range(-(-length // BLOCK))]
        table[i, : len(blocks)] = torch.tensor(blocks)
        rows.append(torch.randn(length, width).to(dtype))
        for position, row in enumerate(rows[-1][: length - queries]):
            cache[blocks[position // BLOCK], position % BLOCK] = row
        slots += [blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(length - queries, length)]
        new.append(rows[-1][length - queries :])
        starts.append(starts[-1] + queries)
    query = torch.randn(starts[-1], heads, width).to(dtype)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32), block_table=table, slot_mapping=torch.tensor(slots),
        seq_lens=torch.tensor([length for _, length in pairs], dtype=torch.int32),
        max_query_len=max(queries for queries, _ in pairs), max_seq_len=max(length for _, length in pairs),
    )  # fmt: skip
    before = cache.clone()
    ops.latent_cache(torch.cat([*new, new[0][:1] + 1]), cache, torch.tensor([*slots, -1]), device=DEVICE)
    expected = before.clone()
    REFERENCE["latent_cache"](torch.cat(new), expected, torch.tensor(slots))
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), "every slot, and nothing beside"
    out = ops.latent_attention(query, cache, metadata, 0.11, LATENT, device=DEVICE)
    exact = REFERENCE["latent_attention"](query.double(), cache.double(), metadata, 0.11, LATENT)
    assert out.shape == exact.shape and nmse(out, exact) < limit


def test_sizes_that_do_not_fit() -> None:
    query = OpQuery(op="latent_attention", dtype="float16", attributes={"latent": 48, "rope": 8})
    assert len(ops.supports(query, DEVICE)) == 2
    assert "registers" in ops.supports(OpQuery(op="latent_attention", dtype="float16"),
                                       DeviceDescription(architecture="gfx1100"))[0]  # fmt: skip
