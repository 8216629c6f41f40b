"""L1: a cache of latents, written and attended to.

Shape suffixes: T tokens, H query heads, W = L + R, L latent, N cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from enginecore.device import AttentionMetadata
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import DTYPES

LATENT, ROPE, BLOCK, BLOCKS, SCALE = 32, 16, 16, 24, 0.13

#: (tokens of this step, length after it) of each sequence; the last one of a step is padding of no tokens.
STEPS = {
    "decode": ((1, 1), (1, 16), (1, 70)),
    "several": ((3, 40), (1, 17), (4, 4)),
    "prompts": ((33, 33), (20, 52), (0, 5)),
    "mixed": ((1, 60), (25, 30), (1, 2), (17, 17)),
}


@dataclass(frozen=True)
class _Step:
    cache: torch.Tensor
    rows: torch.Tensor
    metadata: AttentionMetadata
    cached: list[torch.Tensor]


def _step(ctx: CaseContext, pairs: tuple[tuple[int, int], ...], dtype: str) -> _Step:
    """A cache full of what must not be read but for the rows before this step, and the rows of this step."""
    order, width = ctx.permutation(BLOCKS), LATENT + ROPE
    cache = torch.full((BLOCKS, BLOCK, width), torch.nan, dtype=getattr(torch, dtype), device=ctx.device)
    starts, slots, fresh, cached = [0], [], [], []
    table = torch.full((len(pairs), 8), 0x3FFFFFFF, dtype=torch.int32)
    for i, (count, length) in enumerate(pairs):
        blocks = [order.pop() for _ in range(-(-length // BLOCK))]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        rows_NW = ctx.normal(length, width, dtype=dtype)
        places = [(blocks[at // BLOCK], at % BLOCK) for at in range(length)]
        for at in range(length - count):
            cache[places[at]] = rows_NW[at]
        slots += [block * BLOCK + place for block, place in places[length - count :]]
        fresh.append(rows_NW[length - count :])
        cached.append(rows_NW)
        starts.append(starts[-1] + count)
    common: Any = {"dtype": torch.int32, "device": ctx.device}
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, **common),
        seq_lens=torch.tensor([length for _, length in pairs], **common),
        block_table=table.to(ctx.device),
        slot_mapping=torch.tensor(slots, device=ctx.device),
        max_query_len=max(count for count, _ in pairs),
        max_seq_len=max(length for _, length in pairs),
    )
    return _Step(cache, torch.cat(fresh), metadata, cached)


def write(dtype: str) -> Case:
    """A step's rows, one of them padding: every slot, and nothing beside."""

    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("latent_cache", dtype)
        step = _step(ctx, STEPS["mixed"], dtype)
        slots, expected = step.metadata.slot_mapping.clone(), step.cache.clone()
        slots[3] = -1
        for row, slot in zip(step.rows, slots.tolist(), strict=True):
            if slot >= 0:
                expected[slot // BLOCK, slot % BLOCK] = row
        op(step.rows, step.cache, slots)
        ctx.backend.synchronize()
        same = torch.equal(step.cache.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
        ctx.check(same, "the cache is not what was to be written")

    return Case(1, "latent_cache", f"padding[{dtype}]", run)


def attend(name: str, dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("latent_attention", dtype)
        step, heads = _step(ctx, STEPS[name], dtype), 5
        ctx.require_op("latent_cache", dtype)(step.rows, step.cache, step.metadata.slot_mapping)
        query_THW = ctx.normal(len(step.rows), heads, LATENT + ROPE, dtype=dtype)
        out_THL = op(query_THW, step.cache, step.metadata, SCALE, LATENT)
        ctx.backend.synchronize()
        expected, starts = [], step.metadata.query_start_loc.tolist()
        for i, rows_NW in enumerate(row.double().cpu() for row in step.cached):
            for token in range(starts[i], starts[i + 1]):
                seen_NW = rows_NW[: len(rows_NW) - (starts[i + 1] - 1 - token)]
                weights_HN = (query_THW[token].double().cpu() @ seen_NW.t() * SCALE).softmax(-1)
                expected.append(weights_HN @ seen_NW[:, :LATENT])
        ctx.check(out_THL.dtype == query_THW.dtype, f"the result is {out_THL.dtype}, queries are {query_THW.dtype}")
        ctx.close(out_THL.cpu(), torch.stack(expected), dtype, f"attention over latents, {name}")

    return Case(1, "latent_attention", f"{name}[{dtype}]", run)


def cases() -> list[Case]:
    return [write(dtype) for dtype in DTYPES] + [attend(name, dtype) for name in STEPS for dtype in DTYPES]
