"""Copy blocks within caches (one launch for all layers), and between a device and the host.

    copy_blocks   grid (pairs, caches, pieces of a block): caches are reached through a table of their addresses
    swap_blocks   torch's copies, neighbouring blocks in one; asynchronous where the host's side is pinned

Both move bytes, whatever the layout.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from enginecore_triton.aot_case import AotCase
from enginecore_triton.launch import cdiv

#: Four-byte words that one program copies.
_WORDS = 4096


@triton.jit
def _copy_blocks(caches_ptr, pairs_ptr, words, BLOCK: tl.constexpr):
    """`words`: four-byte words of one block. A block starts on a multiple of 16 bytes in every layout."""
    pair, cache, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(caches_ptr + cache).to(tl.pointer_type(tl.int32))
    base = tl.multiple_of(base, 16)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    offsets = piece * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < words
    content = tl.load(base + source * words + offsets, mask=inside)
    tl.store(base + target * words + offsets, content, mask=inside)


def copy_blocks(caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy block src to block dst in every cache. All caches must have the same block; it is copied as bytes."""
    if not pairs or not caches:
        return
    sources, targets = ({pair[side] for pair in pairs} for side in (0, 1))
    block = caches[0][0].nbytes
    alike = all(cache.is_contiguous() and cache[0].nbytes == block for cache in caches)
    if sources & targets or block % 16 or not alike:
        # A block that is read and written in one call must be read first: the launch has no order.
        _copy_one_by_one(caches, pairs)
        return
    device = caches[0].device
    addresses = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64).to(device)
    table = torch.tensor(pairs, dtype=torch.int64).to(device)
    words = block // 4
    grid = (len(pairs), len(caches), cdiv(words, _WORDS))
    _copy_blocks[grid](addresses, table, words, BLOCK=_WORDS, num_warps=8, enable_fp_fusion=True)


def _copy_one_by_one(caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    source, target = (list(side) for side in zip(*pairs, strict=True))
    for cache in caches:
        raw = cache.view(torch.uint8)
        raw[target] = raw[source]


def swap_blocks(src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy block i of `src` to block j of `dst`. With pinned host memory the copies are queued on the current stream:
    wait for an event before the host reads them or writes over their source."""
    runs = merge_runs(pairs)
    for from_cache, to_cache in zip(src, dst, strict=True):
        host = to_cache if to_cache.device.type == "cpu" else from_cache
        queued = from_cache.device != to_cache.device and host.is_pinned()
        for source, target, count in runs:
            to_cache[target : target + count].copy_(from_cache[source : source + count], non_blocking=queued)


def merge_runs(pairs: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first source, first target, blocks) of neighbours that follow each other on both sides."""
    runs: list[tuple[int, int, int]] = []
    for source, target in pairs:
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def aot_cases() -> list[AotCase]:
    signature = {"caches_ptr": "*i64:16", "pairs_ptr": "*i64:16", "words": "i32:16"}
    constants, options = {"BLOCK": _WORDS}, {"num_warps": 8}
    return [AotCase(name="copy", kernel=_copy_blocks, signature=signature, constants=constants, options=options)]
