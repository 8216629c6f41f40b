"""The workbench of the attention cases: a paged cache of the plugin beside a logical copy of what was written to it.

A plugin chooses its own cache layout, so its tensors are never interpreted. Everything goes in through
`reshape_and_cache` and comes out through `forward`; blocks are only ever compared as raw bytes, to see that those which
nobody wrote have not changed. The whole cache starts as NaN, so that reading an unused block or tail slot shows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from enginecore.device import AttentionMetadata, AttentionParams, AttentionQuery, KVCacheSpec
from enginecore.testing import references
from enginecore.testing.case import CaseContext, FalseClaim
from enginecore.testing.tolerance import deviation

#: Block-table entries past the end of a sequence in the cases that check that they are never followed.
WILD_BLOCK = 0x3FFFFFFF


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of attention call. `block_size` None takes 16 where it is claimed, else the smallest one claimed."""

    dtype: str = "float32"
    kv_dtype: str | None = None
    head_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    block_size: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    causal: bool = True

    @classmethod
    def from_query(cls, query: AttentionQuery) -> Setting:
        return cls(
            dtype=query.dtype, kv_dtype=query.kv_dtype, head_size=query.head_size, num_heads=query.num_heads,
            num_kv_heads=query.num_kv_heads, block_size=query.block_size,
        )  # fmt: skip

    def resolved(self, ctx: CaseContext) -> Setting:
        sizes = ctx.backend.capabilities.block_sizes
        block_size = self.block_size or (16 if 16 in sizes or not sizes else min(sizes))
        return dataclasses.replace(self, block_size=block_size, kv_dtype=self.kv_dtype or self.dtype)

    @property
    def features(self) -> frozenset[str]:
        used = {
            "sliding_window": self.sliding_window is not None, "soft_cap": self.soft_cap is not None,
            "sinks": self.sinks, "alibi": self.alibi, "non_causal": not self.causal,
        }  # fmt: skip
        return frozenset(name for name, wanted in used.items() if wanted)

    def without(self, feature: str) -> Setting:
        plain: dict[str, dict[str, Any]] = {
            "sliding_window": {"sliding_window": None}, "soft_cap": {"soft_cap": None}, "sinks": {"sinks": False},
            "alibi": {"alibi": False}, "non_causal": {"causal": True},
        }  # fmt: skip
        return dataclasses.replace(self, **plain[feature])

    def query(self) -> AttentionQuery:
        assert self.block_size and self.kv_dtype
        return AttentionQuery(
            dtype=self.dtype, kv_dtype=self.kv_dtype, head_size=self.head_size, num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads, block_size=self.block_size, features=self.features,
        )  # fmt: skip

    def spec(self, num_layers: int = 1) -> KVCacheSpec:
        assert self.block_size and self.kv_dtype
        return KVCacheSpec(
            num_layers=num_layers, num_kv_heads=self.num_kv_heads, head_size=self.head_size, dtype=self.kv_dtype,
            block_size=self.block_size,
        )  # fmt: skip


@dataclass
class PagedSequence:
    """A sequence of a step: its blocks in order, tokens in this step and tokens in all."""

    blocks: list[int]
    query_len: int
    seq_len: int


def poison(cache: torch.Tensor) -> None:
    """Fill with NaN, whatever the dtype; all ones in the bits for dtypes that have none."""
    if cache.is_floating_point() and cache.element_size() > 1:
        cache.fill_(math.nan)
    else:
        cache.view(torch.uint8).fill_(0xFF)


def slots_of(blocks: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    return [blocks[i // block_size] * block_size + i % block_size for i in range(start, end)]


class Paged:
    """A cache of `num_blocks` blocks, allocated by the plugin and poisoned, and its logical copy."""

    def __init__(self, ctx: CaseContext, setting: Setting, num_blocks: int = 64, num_layers: int = 1) -> None:
        self.ctx, self.setting = ctx, setting.resolved(ctx)
        ctx.require_attention(self.setting.query())
        assert self.setting.block_size and self.setting.kv_dtype
        self.block_size: int = self.setting.block_size
        self.num_blocks = num_blocks
        self.layout = ctx.attention.kv_cache_layout(self.setting.spec(num_layers))
        self.caches = ctx.memory.allocate_kv(self.layout, num_blocks, num_layers)
        self.logical = [self.new_logical() for _ in self.caches]
        for cache in self.caches:
            poison(cache)
        self.free = ctx.permutation(num_blocks)
        self.written: set[int] = set()

    def new_logical(self) -> references.LogicalCache:
        kv_heads, head_size = self.setting.num_kv_heads, self.setting.head_size
        return references.LogicalCache(self.num_blocks, self.block_size, kv_heads, head_size)

    # Blocks ------------------------------------------------------------------------------------------------------

    def sequence(self, query_len: int, seq_len: int) -> PagedSequence:
        """A sequence on blocks in shuffled order that nobody else has."""
        count = -(-seq_len // self.block_size)
        self.ctx.check(count <= len(self.free), "this case needs more blocks than it allocated")
        blocks, self.free = self.free[:count], self.free[count:]
        return PagedSequence(blocks, query_len, seq_len)

    def raw(self, block: int, layer: int = 0) -> torch.Tensor:
        """One block of the plugin's tensor as bytes."""
        dim = self.layout.shape.index(-1)
        return self.caches[layer].select(dim, block).detach().cpu().contiguous().view(torch.uint8).clone()

    def check_unwritten(self, layer: int = 0) -> None:
        """Blocks that were never written are still poison, every byte."""
        unwritten = [block for block in range(self.num_blocks) if block not in self.written]
        fresh = torch.empty(self.layout.shape_for(1), dtype=self.caches[layer].dtype)
        poison(fresh)
        blocks = self.caches[layer].detach().cpu().movedim(self.layout.shape.index(-1), 0)[unwritten]
        held = blocks.contiguous().view(torch.uint8).flatten(1)
        changed = (held != fresh.view(torch.uint8).flatten()).any(dim=1)
        for block, differs in zip(unwritten, changed.tolist(), strict=True):
            self.ctx.check(not differs, f"block {block} changed, but no slot of it was ever to be written")

    # Writing -----------------------------------------------------------------------------------------------------

    def make_kv(self, count: int, strided: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [T, K, D]; strided ones are slices of a fused projection, as a model produces them."""
        kv_heads, size, dtype = self.setting.num_kv_heads, self.setting.head_size, self.setting.dtype
        if not strided:
            shape = (count, kv_heads, size)
            return self.ctx.normal(*shape, dtype=dtype), self.ctx.normal(*shape, dtype=dtype)
        fused = self.ctx.normal(count, 3 * kv_heads * size, dtype=dtype)
        key, value = fused[:, kv_heads * size : 2 * kv_heads * size], fused[:, 2 * kv_heads * size :]
        return key.unflatten(1, (kv_heads, size)), value.unflatten(1, (kv_heads, size))

    def write(self, slots: list[int], layer: int = 0, strided: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """New random keys and values into `slots` (-1 is padding), in the plugin's cache and in the logical copy."""
        key, value = self.make_kv(len(slots), strided)
        self.store(key, value, slots, layer)
        return key, value

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: list[int], layer: int = 0) -> None:
        mapping = torch.tensor(slots, dtype=torch.int64)
        self.ctx.attention.reshape_and_cache(key, value, self.caches[layer], mapping.to(self.ctx.device))
        self.ctx.backend.synchronize()
        self.logical[layer].write(key, value, mapping)
        self.written |= {slot // self.block_size for slot in slots if slot >= 0}

    def fill(self, seqs: list[PagedSequence], layer: int = 0) -> None:
        """Write every token of `seqs`: first the cached part of each, then the step's tokens in one call."""
        for seq in seqs:
            cached = seq.seq_len - seq.query_len
            if cached:
                self.write(slots_of(seq.blocks, 0, cached, self.block_size), layer)
        self.write(self.step_slots(seqs), layer)

    def step_slots(self, seqs: list[PagedSequence]) -> list[int]:
        size = self.block_size
        return [slot for s in seqs for slot in slots_of(s.blocks, s.seq_len - s.query_len, s.seq_len, size)]

    # Reading -----------------------------------------------------------------------------------------------------

    def metadata(self, seqs: list[PagedSequence], *, beyond: int | None = None, padding: int = 0) -> AttentionMetadata:
        """`beyond` fills the unused ends of the block table; by default an unused block, which holds NaN."""
        width = max(len(seq.blocks) for seq in seqs) + 2
        filler = beyond if beyond is not None else (self.free[0] if self.free else seqs[0].blocks[0])
        table = [seq.blocks + [filler] * (width - len(seq.blocks)) for seq in seqs]
        starts = [0]
        for seq in seqs:
            starts.append(starts[-1] + seq.query_len)
        device = self.ctx.device
        common = AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor([seq.seq_len for seq in seqs], dtype=torch.int32, device=device),
            block_table=torch.tensor(table, dtype=torch.int32, device=device),
            slot_mapping=torch.tensor(self.step_slots(seqs) + [-1] * padding, dtype=torch.int64, device=device),
            max_query_len=max(seq.query_len for seq in seqs),
            max_seq_len=max(seq.seq_len for seq in seqs),
        )
        return self.ctx.attention.build_metadata(common)

    def make_query(self, count: int, strided: bool = True, scale: float = 1.0) -> torch.Tensor:
        heads, size, dtype = self.setting.num_heads, self.setting.head_size, self.setting.dtype
        if not strided:
            return self.ctx.normal(count, heads, size, dtype=dtype, scale=scale)
        fused = self.ctx.normal(count, (heads + 2) * size, dtype=dtype, scale=scale)
        return fused[:, : heads * size].unflatten(1, (heads, size))

    def params(self) -> tuple[AttentionParams, references.AttentionRule]:
        s, device = self.setting, self.ctx.device
        scale = 1 / math.sqrt(s.head_size)
        slopes = torch.tensor([2 ** (-(h + 1) / 2) for h in range(s.num_heads)]) if s.alibi else None
        sinks = torch.linspace(-1, 3, s.num_heads) if s.sinks else None
        params = AttentionParams(
            scale=scale, num_heads=s.num_heads, num_kv_heads=s.num_kv_heads, head_size=s.head_size,
            sliding_window=s.sliding_window, soft_cap=s.soft_cap, causal=s.causal,
            sinks=sinks.to(device) if sinks is not None else None,
            alibi_slopes=slopes.to(device) if slopes is not None else None,
        )  # fmt: skip
        rule = references.AttentionRule(
            scale=scale, causal=s.causal, sliding_window=s.sliding_window, soft_cap=s.soft_cap, sinks_H=sinks,
            alibi_slopes_H=slopes,
        )  # fmt: skip
        return params, rule

    def expected(
        self, query: torch.Tensor, seqs: list[PagedSequence], rule: references.AttentionRule, layer: int = 0
    ) -> torch.Tensor:
        lens, totals = [s.query_len for s in seqs], [s.seq_len for s in seqs]
        return references.paged_attention(query, self.logical[layer], lens, totals, [s.blocks for s in seqs], rule)

    def forward(
        self, query: torch.Tensor, metadata: AttentionMetadata, layer: int = 0, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        params, _ = self.params()
        result = self.ctx.attention.forward(query, self.caches[layer], metadata, params, out)
        self.ctx.backend.synchronize()
        return result

    def verify(self, seqs: list[PagedSequence], what: str = "attention", layer: int = 0, scale: float = 1.0) -> None:
        """Attention of the step's tokens of `seqs`, whose cache content is in place, equals the reference."""
        query = self.make_query(sum(seq.query_len for seq in seqs), scale=scale)
        out = self.forward(query, self.metadata(seqs), layer)
        self.judge(out, query, seqs, what, layer)

    def judge(
        self, out: torch.Tensor, query: torch.Tensor, seqs: list[PagedSequence], what: str, layer: int = 0
    ) -> None:
        s, profile = self.setting, self.ctx.profile
        tolerance = max(profile.tolerance("attention", dtype) for dtype in (s.dtype, s.kv_dtype or s.dtype))
        self.ctx.check(out.dtype == query.dtype, f"{what}: the result is {out.dtype}, the query {query.dtype}")
        _, rule = self.params()
        found = deviation(out, self.expected(query, seqs, rule, layer))
        if found.within(tolerance):
            return
        for feature in sorted(s.features):
            ignored = Paged.params_of(self, s.without(feature))
            if deviation(out, self.expected(query, seqs, ignored, layer)).within(tolerance):
                raise FalseClaim(f"{feature} is claimed and ignored: the result is that of attention without it")
        hint = ": slots that hold no token were read, or rows not written" if found.not_finite else ""
        raise AssertionError(f"{what}: {found.describe(tolerance)}{hint} ({self.locate(found.row, seqs)})")

    @staticmethod
    def params_of(paged: Paged, setting: Setting) -> references.AttentionRule:
        original, paged.setting = paged.setting, setting
        try:
            return paged.params()[1]
        finally:
            paged.setting = original

    @staticmethod
    def locate(row: int, seqs: list[PagedSequence]) -> str:
        for index, seq in enumerate(seqs):
            if row < seq.query_len:
                position = seq.seq_len - seq.query_len + row
                return f"sequence {index}, position {position} of {seq.seq_len}, {seq.query_len} tokens in the step"
            row -= seq.query_len
        return "past the last sequence"
