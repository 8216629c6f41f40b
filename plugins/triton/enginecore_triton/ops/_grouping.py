"""Rows in the order of the expert that they go to, each expert's part filled up to whole tiles.

    order [tiles x BLOCK_M]   numbers of rows, by expert; `number` where a tile is not full
    expert [tiles]            of each tile; -1 for tiles that are not needed

One program an expert counts its rows, then another finds where its tiles start and puts them there: no atomic
additions, so the order is always the same, and the host need not know any count. Ids below 0 go nowhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from enginecore_triton.launch import cdiv, launch, power_of_two

CHUNK = 1024


@triton.jit
def count(ids, counts, number, CHUNK: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    found = tl.zeros((CHUNK,), tl.int32)
    for start in range(0, number, CHUNK):
        at = start + lane
        found += (tl.load(ids + at, mask=at < number, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit
def place(
    ids, counts, order, tile_expert, number, experts, tiles,
    BLOCK_M: tl.constexpr, BLOCK_X: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program `experts` marks the tiles behind the last expert's."""
    expert = tl.program_id(0)
    others = tl.arange(0, BLOCK_X)
    all_counts = tl.load(counts + others, mask=others < experts, other=0)
    first = tl.sum(tl.where(others < expert, (all_counts + BLOCK_M - 1) // BLOCK_M, 0), 0)
    mine = tl.sum(tl.where(others == expert, all_counts, 0), 0)
    end = first + (mine + BLOCK_M - 1) // BLOCK_M
    if expert == experts:
        for tile in range(first, tiles):
            tl.store(tile_expert + tile, -1)
    else:
        for tile in range(first, end):
            tl.store(tile_expert + tile, expert)
        lane = tl.arange(0, CHUNK)
        done = first * BLOCK_M
        if mine > 0:
            for start in range(0, number, CHUNK):
                at = start + lane
                found = (tl.load(ids + at, mask=at < number, other=-1) == expert).to(tl.int32)
                tl.store(order + done + tl.cumsum(found, 0) - 1, at, mask=found > 0)
                done += tl.sum(found, 0)
            rest = tl.arange(0, BLOCK_M)
            tl.store(order + done + rest, tl.zeros((BLOCK_M,), tl.int32) + number, mask=done + rest < end * BLOCK_M)


def most_tiles(number: int, experts: int, block_m: int) -> int:
    """How many tiles `number` rows can take: each expert that has any leaves at most one tile not full."""
    return (number + min(number, experts) * (block_m - 1)) // block_m


def grouped(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, tile_expert), int32, for flat `ids`."""
    number = ids.numel()
    tiles = most_tiles(number, experts, block_m)

    def empty(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids.device)

    counts, order, tile_expert = empty(experts), empty(tiles * block_m), empty(tiles)
    chunk = min(CHUNK, power_of_two(number, 32))
    launch(count, (experts,), ids, counts, number, CHUNK=chunk, num_warps=cdiv(chunk, 256))
    launch(place, (experts + 1,), ids, counts, order, tile_expert, number, experts, tiles, BLOCK_M=block_m,
           BLOCK_X=power_of_two(experts + 1), CHUNK=chunk, num_warps=cdiv(chunk, 256))  # fmt: skip
    return order, tile_expert
