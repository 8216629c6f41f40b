"""L2: the core's block pool over the plugin's cache: sequences come, grow, fork, are swapped and go, each alone."""

from __future__ import annotations

import torch

from enginecore.kvcache.block_pool import BlockPool
from enginecore.kvcache.manager import BlockTable, KVCacheManager
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.paged import Paged, PagedSequence, Setting, slots_of


class Household:
    """Living sequences over one pool. Writes go to the plugin and to the logical copy; each step is checked."""

    def __init__(self, ctx: CaseContext, num_blocks: int) -> None:
        self.ctx = ctx
        self.paged = Paged(ctx, Setting(head_size=64, num_heads=2, num_kv_heads=1), num_blocks=num_blocks)
        self.pool = BlockPool(num_blocks)
        self.manager = KVCacheManager(self.pool, self.paged.block_size, prefix_caching=False)
        self.living: list[tuple[BlockTable, int]] = []
        self.paged.free = []
        self.parked: list[tuple[list[int], int]] = []
        self.host_free = list(range(num_blocks))
        self.host_logical = self.paged.new_logical()
        shape = self.paged.layout.shape_for(num_blocks)
        self.host = [ctx.memory.host_alloc_pinned(shape, cache.dtype) for cache in self.paged.caches]

    def start(self) -> None:
        table, tokens = BlockTable(root=b""), self.ctx.integer(1, 3 * self.paged.block_size)
        if self.manager.grow(table, self.manager.blocks_for(tokens)) is None:
            self.stop()
            return
        self.paged.write(slots_of(table.blocks, 0, tokens, self.paged.block_size))
        self.living.append((table, tokens))

    def extend(self) -> None:
        """Append tokens, copying first what is shared: the copy must be done before the write."""
        index = self.ctx.integer(0, len(self.living) - 1)
        table, tokens = self.living[index]
        last = tokens + self.ctx.integer(1, self.paged.block_size + 2) - 1
        copies = self.manager.make_writable(table, tokens, last)
        if copies is None:
            return
        pairs = [(source, target) for _, source, target in copies]
        if pairs:
            self.ctx.attention.copy_blocks(self.paged.caches, pairs)
            self.paged.logical[0].copy_blocks(pairs)
        if self.manager.grow(table, self.manager.blocks_for(last + 1)) is None:
            return
        self.paged.write(slots_of(table.blocks, tokens, last + 1, self.paged.block_size))
        self.living[index] = (table, last + 1)

    def fork(self) -> None:
        table, tokens = self.living[self.ctx.integer(0, len(self.living) - 1)]
        self.living.append((self.manager.fork(table), tokens))

    def stop(self) -> None:
        if self.living:
            table, _ = self.living.pop(self.ctx.integer(0, len(self.living) - 1))
            self.manager.free(table)

    def swap_out(self) -> None:
        """Preempt a sequence: its content goes to the host, its blocks to whoever needs them."""
        table, tokens = self.living[self.ctx.integer(0, len(self.living) - 1)]
        if len(table.blocks) > len(self.host_free):
            return
        kept = [self.host_free.pop() for _ in table.blocks]
        pairs = list(zip(table.blocks, kept, strict=True))
        self.ctx.attention.swap_blocks(self.paged.caches, self.host, pairs)
        self.ctx.backend.synchronize()
        self.host_logical.copy_blocks(pairs, self.paged.logical[0])
        self.living = [entry for entry in self.living if entry[0] is not table]
        self.manager.free(table)
        self.parked.append((kept, tokens))

    def swap_in(self) -> None:
        if not self.parked:
            return
        kept, tokens = self.parked[0]
        table = BlockTable(root=b"")
        if self.manager.grow(table, len(kept)) is None:
            return
        pairs = list(zip(kept, table.blocks, strict=True))
        self.ctx.attention.swap_blocks(self.host, self.paged.caches, pairs)
        self.paged.logical[0].copy_blocks(pairs, self.host_logical)
        self.parked.pop(0)
        self.host_free += kept
        self.living.append((table, tokens))

    def check(self, step: int) -> None:
        self.pool.check()
        seqs = [PagedSequence(list(table.blocks), min(2, tokens), tokens) for table, tokens in self.living]
        if seqs:
            self.paged.verify(seqs, f"step {step}, {len(seqs)} sequences")


def fuzz(ctx: CaseContext) -> None:
    home = Household(ctx, num_blocks=24)
    for step in range(150):
        grow = [home.start, home.extend, home.extend, home.extend, home.fork]
        actions = [*grow, home.stop, home.swap_out, home.swap_in]
        (actions[ctx.integer(0, len(actions) - 1)] if home.living else home.start)()
        home.check(step)
    while home.living:
        home.stop()
    home.pool.check()
    ctx.check(home.pool.num_free == home.pool.num_blocks, f"{home.pool.num_blocks - home.pool.num_free} blocks leaked")


def copy_on_write(ctx: CaseContext) -> None:
    """A fork in the middle of a block: both branches write their own tokens into what was one block."""
    home = Household(ctx, num_blocks=12)
    size = home.paged.block_size
    table = BlockTable(root=b"")
    home.manager.grow(table, 2)
    home.paged.write(slots_of(table.blocks, 0, size + 3, size))
    home.living = [(table, size + 3)]
    for _ in range(3):
        home.living.append((home.manager.fork(table), size + 3))
    for step in range(12):
        home.extend()
        home.check(step)


def shared_block_race(ctx: CaseContext) -> None:
    """Copy a shared block, then let both owners write at once: each call takes effect after those before it.

    The engine does not wait between the three. A copy that is still under way would take up what the first owner
    writes, or undo what the second one writes.
    """
    paged = Paged(ctx, Setting(head_size=64, num_heads=4, num_kv_heads=4), num_blocks=48, num_layers=2)
    size = paged.block_size
    parent = paged.sequence(1, 16 * size)
    child = paged.sequence(1, 16 * size)
    pairs = list(zip(parent.blocks, child.blocks, strict=True))
    for turn in range(8):
        for layer in range(2):
            paged.write(slots_of(parent.blocks, 0, parent.seq_len, size), layer)
        writes = [(seq, paged.make_kv(size // 2)) for seq in (parent, child)]
        ctx.attention.copy_blocks(paged.caches, pairs)
        for layer in range(2):
            for seq, (key, value) in writes:
                slots = slots_of(seq.blocks, seq.seq_len - size // 2, seq.seq_len, size)
                mapping = torch.tensor(slots, dtype=torch.int64, device=ctx.device)
                ctx.attention.reshape_and_cache(key, value, paged.caches[layer], mapping)
        ctx.backend.synchronize()
        for layer, logical in enumerate(paged.logical):
            logical.copy_blocks(pairs)
            for seq, (key, value) in writes:
                slots = slots_of(seq.blocks, seq.seq_len - size // 2, seq.seq_len, size)
                logical.write(key, value, torch.tensor(slots, dtype=torch.int64))
            paged.verify([parent], f"turn {turn}: the block's first owner after both wrote", layer)
            paged.verify([child], f"turn {turn}: the copy's owner after both wrote", layer)


def cases() -> list[Case]:
    return [Case(2, "blocks", check.__name__, check) for check in (copy_on_write, shared_block_race, fuzz)]
