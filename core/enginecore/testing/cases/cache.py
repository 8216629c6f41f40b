"""L1: cache writes, block copies, swaps and the merge of partial attention, seen through attention."""

from __future__ import annotations

import torch

from enginecore.testing import references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.attention import BATCHES, BLOCK_SIZES, DTYPES
from enginecore.testing.cases.paged import Paged, PagedSequence, Setting, poison, slots_of


def write_token_by_token(ctx: CaseContext) -> None:
    """Decode writes one slot a step: each keeps what the others wrote, across block edges."""
    paged = Paged(ctx, Setting())
    seq = paged.sequence(1, 2 * paged.block_size + 1)
    for slot in slots_of(seq.blocks, 0, seq.seq_len, paged.block_size):
        paged.write([slot])
    paged.verify([seq], "after writes of one token each")
    paged.check_unwritten()


def write_out_of_order(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(n, n) for n in (paged.block_size + 1, 3, 2 * paged.block_size)]
    slots = paged.step_slots(seqs)
    paged.write([slots[i] for i in ctx.permutation(len(slots))])
    paged.verify(seqs, "after a write in random order")
    paged.check_unwritten()


def overwrite(ctx: CaseContext) -> None:
    """A block that is reused holds the second owner's tokens and nothing of the first's."""
    paged = Paged(ctx, Setting())
    seq = paged.sequence(4, 2 * paged.block_size)
    paged.fill([seq])
    paged.fill([seq])
    paged.verify([seq], "after the blocks were written again")


def padding_is_skipped(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(n, n) for n in (paged.block_size - 1, paged.block_size + 2)]
    slots = paged.step_slots(seqs)
    paged.write([-1, *slots[:3], -1, -1, *slots[3:], -1])
    paged.verify(seqs, "after a write with padding slots (-1)")
    paged.check_unwritten()
    before = [paged.raw(block) for block in range(paged.num_blocks)]
    paged.write([-1] * 7)
    same = all(torch.equal(paged.raw(block), content) for block, content in enumerate(before))
    ctx.check(same, "a write of padding alone changed the cache")


def first_and_last_block(ctx: CaseContext) -> None:
    """The first slot and the last slot of the whole cache."""
    paged = Paged(ctx, Setting())
    paged.free = [0, paged.num_blocks - 1]
    seq = paged.sequence(2, 2 * paged.block_size)
    paged.fill([seq])
    paged.verify([seq], "in the first and last block of the cache")
    paged.check_unwritten()


def single_tokens(ctx: CaseContext) -> None:
    """Attention over one token is its value, to the last bits: nothing else has a part in it."""
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(1, 1) for _ in range(9)]
    _, value = paged.write(paged.step_slots(seqs))
    out = paged.forward(paged.make_query(9), paged.metadata(seqs))
    ratio = paged.setting.num_heads // paged.setting.num_kv_heads
    wanted = references.f64(value.repeat_interleave(ratio, dim=1))
    ctx.close(out, wanted, paged.setting.dtype, "attention over a single token", op="attention", slack=1e-3)


def contiguous_inputs(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting())
    seq = paged.sequence(1, paged.block_size + 1)
    paged.write(paged.step_slots([seq])[:0] or slots_of(seq.blocks, 0, seq.seq_len, paged.block_size), strided=False)
    paged.verify([seq])


def strided_over_heads(ctx: CaseContext) -> None:
    """Keys and values that lie transposed, [K, T, D] in memory, as some models produce them."""
    paged = Paged(ctx, Setting())
    seq = paged.sequence(1, paged.block_size + 3)
    shape = (paged.setting.num_kv_heads, seq.seq_len, paged.setting.head_size)
    key, value = (ctx.normal(*shape, dtype=paged.setting.dtype).transpose(0, 1) for _ in range(2))
    paged.store(key, value, slots_of(seq.blocks, 0, seq.seq_len, paged.block_size))
    paged.verify([seq], "after a write strided over heads")


def write_block_size(size: int) -> Case:
    def run(ctx: CaseContext) -> None:
        paged = Paged(ctx, Setting(block_size=size))
        seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](size)]
        paged.fill(seqs)
        paged.verify(seqs)
        paged.check_unwritten()

    return Case(1, "reshape_and_cache", f"block_size_{size}", run)


def _three_layers(ctx: CaseContext, dtype: str = "float32") -> tuple[Paged, list[PagedSequence]]:
    """Three attention calls with content of their own, two sequences of two blocks each."""
    paged = Paged(ctx, Setting(dtype=dtype), num_blocks=24, num_layers=3)
    seqs = [paged.sequence(1, 2 * paged.block_size) for _ in range(2)]
    for layer in range(3):
        paged.fill(seqs, layer)
    return paged, seqs


def copy_blocks(dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        paged, seqs = _three_layers(ctx, dtype)
        copies = [paged.sequence(seq.query_len, seq.seq_len) for seq in seqs]
        pairs = [pair for s, c in zip(seqs, copies, strict=True) for pair in zip(s.blocks, c.blocks, strict=True)]
        _copy_and_check(ctx, paged, pairs)
        for layer in range(3):
            paged.verify(copies, f"copied blocks of layer {layer}", layer)
            paged.verify(seqs, f"the originals of layer {layer}", layer)

    return Case(1, "copy_blocks", f"all_layers[{dtype}]", run)


def _copy_and_check(ctx: CaseContext, paged: Paged, pairs: list[tuple[int, int]]) -> None:
    targets = {dst for _, dst in pairs}
    others = [block for block in range(paged.num_blocks) if block not in targets]
    before = {(layer, block): paged.raw(block, layer) for layer in range(len(paged.caches)) for block in others}
    ctx.attention.copy_blocks(paged.caches, pairs)
    ctx.backend.synchronize()
    for logical in paged.logical:
        logical.copy_blocks(pairs)
    for (layer, block), content in before.items():
        same = torch.equal(paged.raw(block, layer), content)
        ctx.check(same, f"block {block} of layer {layer} changed, but it is no target of the copies {pairs}")


def copy_one_source_twice(ctx: CaseContext) -> None:
    """Two children of one parent get a copy each of its last block."""
    paged, (seq, _) = _three_layers(ctx)
    children = [paged.sequence(1, seq.seq_len) for _ in range(2)]
    for child in children:
        child.blocks[0] = seq.blocks[0]
    _copy_and_check(ctx, paged, [(seq.blocks[1], child.blocks[1]) for child in children])
    paged.verify([*children, seq], "two copies of one block")


def copy_nothing(ctx: CaseContext) -> None:
    paged, _ = _three_layers(ctx)
    _copy_and_check(ctx, paged, [])


def copy_is_independent(ctx: CaseContext) -> None:
    """After the copy, writes to one side do not show on the other."""
    paged, (seq, _) = _three_layers(ctx)
    child = paged.sequence(1, seq.seq_len)
    _copy_and_check(ctx, paged, list(zip(seq.blocks, child.blocks, strict=True)))
    paged.write(slots_of(child.blocks, seq.seq_len - 3, seq.seq_len, paged.block_size))
    paged.verify([seq, child], "parent and child after the child wrote")


def swap_through_host(ctx: CaseContext) -> None:
    """Out to host memory, the device's blocks reused meanwhile, and back into other blocks."""
    paged, seqs = _three_layers(ctx)
    shape = paged.layout.shape_for(8)
    host = [ctx.memory.host_alloc_pinned(shape, cache.dtype) for cache in paged.caches]
    held = paged.new_logical(), paged.new_logical(), paged.new_logical()
    out = list(zip(seqs[0].blocks, (5, 2), strict=True))
    ctx.attention.swap_blocks(paged.caches, host, out)
    ctx.backend.synchronize()
    for layer, logical in enumerate(held):
        logical.copy_blocks(out, paged.logical[layer])
        paged.write(slots_of(seqs[0].blocks, 0, seqs[0].seq_len, paged.block_size), layer)
    back = paged.sequence(1, seqs[0].seq_len)
    pairs = list(zip((5, 2), back.blocks, strict=True))
    ctx.attention.swap_blocks(host, paged.caches, pairs)
    ctx.backend.synchronize()
    for layer, logical in enumerate(held):
        paged.logical[layer].copy_blocks(pairs, logical)
        paged.verify([back, seqs[1], seqs[0]], f"layer {layer} after a swap out and in", layer)


def swap_between_caches(ctx: CaseContext) -> None:
    """From one device cache to another, other blocks of the target unchanged."""
    paged, (seq, _) = _three_layers(ctx)
    other = Paged(ctx, Setting(), num_blocks=24, num_layers=3)
    target = other.sequence(1, seq.seq_len)
    pairs = list(zip(seq.blocks, target.blocks, strict=True))
    ctx.attention.swap_blocks(paged.caches, other.caches, pairs)
    ctx.backend.synchronize()
    other.written |= set(target.blocks)
    for layer in range(3):
        other.logical[layer].copy_blocks(pairs, paged.logical[layer])
        other.verify([target], f"layer {layer} of the target", layer)
        other.check_unwritten(layer)


def merge_states(dtype: str) -> Case:
    def run(ctx: CaseContext) -> None:
        ctx.require_dtype(dtype)
        out_a, out_b = (ctx.normal(13, 6, 64, dtype=dtype) for _ in range(2))
        lse_a, lse_b = ctx.normal(13, 6, scale=8.0), ctx.normal(13, 6, scale=8.0)
        out, lse = ctx.attention.merge_attn_states(out_a, lse_a, out_b, lse_b)
        expected, expected_lse = references.merge_attn_states(out_a, lse_a, out_b, lse_b)
        ctx.close(out, expected, dtype, "merged attention")
        ctx.close(lse, expected_lse, "float32", "merged log-sum-exp")

    return Case(1, "merge_attn_states", f"random[{dtype}]", run)


def poisoned_host_side(ctx: CaseContext) -> None:
    """Swapping nothing touches neither side."""
    paged, _ = _three_layers(ctx)
    host = [ctx.memory.host_alloc_pinned(paged.layout.shape_for(4), cache.dtype) for cache in paged.caches]
    for tensor in host:
        poison(tensor)
    before = [tensor.view(torch.uint8).clone() for tensor in host]
    ctx.attention.swap_blocks(paged.caches, host, [])
    for tensor, content in zip(host, before, strict=True):
        ctx.check(torch.equal(tensor.view(torch.uint8), content), "an empty swap changed the host side")


def cases() -> list[Case]:
    writes = (
        write_token_by_token, write_out_of_order, overwrite, padding_is_skipped, first_and_last_block,
        single_tokens, contiguous_inputs, strided_over_heads,
    )  # fmt: skip
    found = [Case(1, "reshape_and_cache", check.__name__, check) for check in writes]
    found += [write_block_size(size) for size in BLOCK_SIZES]
    found += [copy_blocks(dtype) for dtype in DTYPES]
    copies = (copy_one_source_twice, copy_nothing, copy_is_independent)
    found += [Case(1, "copy_blocks", check.__name__, check) for check in copies]
    swaps = (swap_through_host, swap_between_caches, poisoned_host_side)
    found += [Case(1, "swap_blocks", check.__name__, check) for check in swaps]
    return found + [merge_states(dtype) for dtype in DTYPES]
