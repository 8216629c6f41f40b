"""L1: paged attention over block edges, shuffled tables, mixed batches, head sizes, GQA ratios and features."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.cases.made_up import Draw, made_up
from enginecore.testing.cases.paged import WILD_BLOCK, Paged, PagedSequence, Setting, slots_of

DTYPES = ("float32", "bfloat16", "float16")
HEAD_SIZES = (46, 48, 64, 72, 80, 96, 100, 112, 120, 128, 160, 192, 224, 256, 320, 384, 512)
GQA_RATIOS = (1, 2, 3, 5, 7, 8, 12, 16)
BLOCK_SIZES = (8, 16, 32, 64, 128)
KV_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")

Lengths = Callable[[int], list[tuple[int, int]]]


def edges(size: int) -> list[int]:
    return [1, 2, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size + 3]


#: Batches as (tokens in the step, tokens in all), for a block size.
BATCHES: dict[str, Lengths] = {
    "decode": lambda size: [(1, n) for n in edges(size)],
    "prefill": lambda size: [(n, n) for n in edges(size)],
    "chunked_prefill": lambda n: [(5, n + 5), (n, 3 * n), (n + 1, 4 * n - 1), (2, n), (3, n + 1)],
    "mixed": lambda n: [(2 * n + 1, 2 * n + 1), (1, n), (1, 3 * n + 1), (7, n + 6), (1, 1), (n, n)],
}


def standard(setting: Setting, lengths: Lengths) -> Callable[[CaseContext], None]:
    """Fill the cache of a batch, attend, compare, and see that no other block has changed."""

    def run(ctx: CaseContext) -> None:
        paged = Paged(ctx, setting)
        seqs = [paged.sequence(*pair) for pair in lengths(paged.block_size)]
        paged.fill(seqs)
        paged.verify(seqs)
        paged.check_unwritten()

    return run


def output_buffer(ctx: CaseContext) -> None:
    """With `out` given, exactly its rows are written: sentinels before and after stay, and no row is left out."""
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    paged.fill(seqs)
    count, guard, mark = sum(seq.query_len for seq in seqs), 8, -12345.0
    shape = (count + 2 * guard, paged.setting.num_heads, paged.setting.head_size)
    buffer = torch.full(shape, mark, dtype=getattr(torch, paged.setting.dtype), device=ctx.device)
    out = buffer[guard : guard + count]
    out.fill_(math.nan)
    query = paged.make_query(count)
    result = paged.forward(query, paged.metadata(seqs), out=out)
    ctx.check(result.data_ptr() == out.data_ptr(), "forward must return the buffer it was given as out_THD")
    ctx.check(bool((buffer[:guard] == mark).all()), "rows before out_THD were overwritten")
    ctx.check(bool((buffer[guard + count :] == mark).all()), "rows after out_THD were overwritten")
    paged.judge(out, query, seqs, "attention into a given buffer")


def inputs_unchanged(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    paged.fill(seqs)
    query = paged.make_query(sum(seq.query_len for seq in seqs), strided=False)
    before, blocks = query.clone(), [paged.raw(block) for block in range(paged.num_blocks)]
    metadata = paged.metadata(seqs)
    table = metadata.block_table.clone()
    paged.forward(query, metadata)
    ctx.check(torch.equal(query, before), "forward changed its query")
    ctx.check(torch.equal(metadata.block_table, table), "forward changed the block table")
    for block, content in enumerate(blocks):
        ctx.check(torch.equal(paged.raw(block), content), f"forward changed block {block} of the cache")


def padded_step(ctx: CaseContext) -> None:
    """Tokens past the last sequence (slot -1) are padding: not cached, and of no effect on the rows that count."""
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    for seq in seqs:
        paged.write(slots_of(seq.blocks, 0, seq.seq_len - seq.query_len, paged.block_size) or [-1])
    paged.write(paged.step_slots(seqs) + [-1] * 5)
    count = sum(seq.query_len for seq in seqs)
    query = paged.make_query(count + 5)
    out = paged.forward(query, paged.metadata(seqs, padding=5))
    ctx.check(out.shape[0] >= count, f"{out.shape[0]} rows for {count} tokens")
    paged.judge(out[:count], query[:count], seqs, "attention of a padded step")
    paged.check_unwritten()


def wild_table_entries(ctx: CaseContext) -> None:
    """Entries of the block table past a sequence's last block are undefined: following one would fault."""
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    paged.fill(seqs)
    query = paged.make_query(sum(seq.query_len for seq in seqs))
    for beyond in (-1, WILD_BLOCK):
        paged.judge(paged.forward(query, paged.metadata(seqs, beyond=beyond)), query, seqs, f"table ends in {beyond}")


def table_changes(ctx: CaseContext) -> None:
    """The same shapes twice in the same tensors, but other blocks: nothing may be remembered from the first step."""
    paged = Paged(ctx, Setting())
    size = paged.block_size
    pairs = [(1, 2 * size + 1), (1, 2 * size - 1), (3, size + 2)]
    first, second = ([paged.sequence(*pair) for pair in pairs] for _ in range(2))
    paged.fill(first)
    paged.fill(second)
    query = paged.make_query(5)
    held = paged.metadata(first)
    paged.judge(paged.forward(query, held), query, first, "first step")
    fresh = paged.metadata(second)
    for name in ("block_table", "slot_mapping"):
        getattr(held, name).copy_(getattr(fresh, name))
    again = ctx.attention.build_metadata(held)
    paged.judge(paged.forward(query, again), query, second, "second step, on other blocks")


def neighbours_do_not_mix(ctx: CaseContext) -> None:
    """A sequence whose cache is NaN spoils its own rows alone."""
    paged = Paged(ctx, Setting())
    size = paged.block_size
    seqs = [paged.sequence(*pair) for pair in [(1, size), (4, size + 4), (1, 2 * size + 1), (size, size)]]
    paged.fill(seqs)
    sick = paged.sequence(2, size + 2)
    key, value = paged.make_kv(sick.seq_len)
    slots = slots_of(sick.blocks, 0, sick.seq_len, size)
    paged.store(torch.full_like(key, math.nan), torch.full_like(value, math.nan), slots)
    batch = [seqs[0], sick, *seqs[1:]]
    query = paged.make_query(sum(seq.query_len for seq in batch))
    out = paged.forward(query, paged.metadata(batch))
    keep = [row for row in range(query.shape[0]) if not 1 <= row < 3]
    paged.judge(out[keep], query[keep], seqs, "rows beside a sequence that holds NaN")


def shared_blocks(ctx: CaseContext) -> None:
    """Sequences that share their first blocks, as prefix hits do, read the same content."""
    paged = Paged(ctx, Setting())
    size = paged.block_size
    seqs = [paged.sequence(*pair) for pair in [(1, 3 * size + 2), (4, 3 * size + 4), (1, 3 * size + 1)]]
    for seq in seqs[1:]:
        seq.blocks[:2] = seqs[0].blocks[:2]
    paged.fill(seqs)
    paged.verify(seqs, "attention over shared blocks")


def large_scores(ctx: CaseContext) -> None:
    """Scores in the hundreds: a softmax that does not subtract the largest overflows."""
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    paged.fill(seqs)
    paged.verify(seqs, "attention with large scores", scale=60.0)


def long_context(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting(head_size=64, num_heads=3, num_kv_heads=1), num_blocks=220)
    seqs = [paged.sequence(*pair) for pair in [(1, 1537), (33, 1000), (1, 257)]]
    paged.fill(seqs)
    paged.verify(seqs, "attention over a long context")


def many_sequences(ctx: CaseContext) -> None:
    paged = Paged(ctx, Setting(head_size=64), num_blocks=160)
    seqs = [paged.sequence(1, ctx.integer(1, 2 * paged.block_size)) for _ in range(65)]
    paged.fill(seqs)
    paged.verify(seqs, "a decode batch of 65")


def batch_invariance(ctx: CaseContext) -> None:
    """A sequence alone, and each of its tokens as a row of its own over the same blocks, give the very bits."""
    if not ctx.backend.capabilities.batch_invariant:
        ctx.unsupported("batch_invariant is not claimed")
    paged = Paged(ctx, Setting())
    seqs = [paged.sequence(*pair) for pair in BATCHES["mixed"](paged.block_size)]
    paged.fill(seqs)
    query = paged.make_query(sum(seq.query_len for seq in seqs))
    together, row = paged.forward(query, paged.metadata(seqs)), 0
    for index, seq in enumerate(seqs):
        alone = paged.forward(query[row : row + seq.query_len], paged.metadata([seq]))
        if not torch.equal(alone, together[row : row + seq.query_len]):
            raise FalseClaim(f"batch_invariant is claimed, but sequence {index} alone differs from itself in a batch")
        row += seq.query_len
    single = [
        PagedSequence(seq.blocks, 1, length + 1)
        for seq in seqs
        for length in range(seq.seq_len - seq.query_len, seq.seq_len)
    ]
    different_T = (paged.forward(query, paged.metadata(single)) != together).flatten(1).any(1)
    if different := different_T.nonzero().flatten().tolist():
        raise FalseClaim(f"batch_invariant is claimed, but token by token, rows {different} of {len(query)} differ")


def shapes_made_up(ctx: CaseContext) -> None:
    """Shapes that nobody thought of, within what is claimed."""
    caps = ctx.backend.capabilities
    dtypes = [d for d in DTYPES if d in caps.dtypes and d in caps.kv_dtypes]
    sizes = [d for d in HEAD_SIZES if caps.supports_head_size(d) and d <= 128]
    blocks = [size for size in BLOCK_SIZES if size in caps.block_sizes and size <= 32]
    if not (dtypes and sizes and blocks):
        ctx.unsupported("no common dtype, head size up to 128 or block size up to 32 is claimed")

    def attempt(draw: Draw) -> None:
        ctx.rng.manual_seed(0)  # the same shape gives the same numbers, so that a failure can be made smaller
        ratio = draw.integer(1, max(1, min(caps.max_gqa_ratio, 9)))
        kv_heads = draw.integer(1, 3)
        size = draw.choice(blocks)
        setting = Setting(
            dtype=draw.choice(dtypes), head_size=draw.choice(sizes), num_kv_heads=kv_heads, num_heads=kv_heads * ratio,
            block_size=size,
        )  # fmt: skip
        paged = Paged(ctx, setting, num_blocks=32)
        pairs = []
        for _ in range(draw.integer(1, 5)):
            total = max(1, draw.integer(1, 5) * size + draw.choice([-1, 0, 1, -(size // 2)]))
            pairs.append((draw.choice([1, total, draw.integer(1, total)]), total))
        seqs = [paged.sequence(*pair) for pair in pairs]
        paged.fill(seqs)
        paged.verify(seqs, f"{setting} with (tokens in the step, in all) {pairs}")
        paged.check_unwritten()
        ctx.memory.release_kv(paged.caches)

    made_up(attempt, examples=25)


def _feature_settings() -> dict[str, Setting]:
    return {
        "window_1": Setting(sliding_window=1), "window_15": Setting(sliding_window=15),
        "window_16": Setting(sliding_window=16), "window_35": Setting(sliding_window=35),
        "window_500": Setting(sliding_window=500), "soft_cap_2": Setting(soft_cap=2.0),
        "soft_cap_50": Setting(soft_cap=50.0), "sinks": Setting(sinks=True), "alibi": Setting(alibi=True),
        "non_causal": Setting(causal=False), "window_soft_cap": Setting(sliding_window=19, soft_cap=2.0),
        "window_sinks": Setting(sliding_window=19, sinks=True), "alibi_gqa_1": Setting(alibi=True, num_kv_heads=4),
    }  # fmt: skip


def cases() -> list[Case]:
    import dataclasses

    found: list[Case] = []

    def add(name: str, setting: Setting, lengths: Lengths = BATCHES["mixed"]) -> None:
        found.append(Case(1, "attention", name, standard(setting, lengths)))

    for dtype in DTYPES:
        for batch, lengths in BATCHES.items():
            add(f"{batch}[{dtype}]", Setting(dtype=dtype), lengths)
        for size in HEAD_SIZES:
            add(f"head_size_{size}[{dtype}]", Setting(dtype=dtype, head_size=size))
        for ratio in GQA_RATIOS:
            add(f"gqa_{ratio}[{dtype}]", Setting(dtype=dtype, num_heads=2 * ratio, num_kv_heads=2))
        for name, setting in _feature_settings().items():
            add(f"{name}[{dtype}]", dataclasses.replace(setting, dtype=dtype))
        for kv_dtype in KV_DTYPES:
            if kv_dtype != dtype:
                add(f"kv_{kv_dtype}[{dtype}]", Setting(dtype=dtype, kv_dtype=kv_dtype))
    for size in BLOCK_SIZES:
        for batch, lengths in BATCHES.items():
            setting = Setting(block_size=size, head_size=64, num_heads=3, num_kv_heads=1)
            add(f"block_size_{size}_{batch}", setting, lengths)
    for heads in (1, 3, 9, 71):
        add(f"mqa_{heads}", Setting(num_heads=heads, num_kv_heads=1))
    checks = (
        output_buffer, inputs_unchanged, padded_step, wild_table_entries, table_changes, neighbours_do_not_mix,
        shared_blocks, large_scores, long_context, many_sequences, batch_invariance, shapes_made_up,
    )  # fmt: skip
    return found + [Case(1, "attention", check.__name__, check) for check in checks]
