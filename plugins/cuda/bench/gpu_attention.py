"""Attention by itself: decode against copy bandwidth, prefill against torch, other libraries beside both.

Shape suffixes: T tokens, H query heads, K key-value heads, D head size, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from enginecore.device import AttentionMetadata, AttentionParams, KVCacheSpec
from gpu_stages import MIB, copy_rate, seconds_of

BLOCK = 16


class Setting:
    """A paged cache of random keys and values, `seqs` sequences of `length` tokens with blocks in random order."""

    def __init__(self, backend: Any, *, seqs: int, length: int, heads: int, kv_heads: int, size: int) -> None:
        self.backend, self.seqs, self.length = backend, seqs, length
        self.heads, self.kv_heads, self.size = heads, kv_heads, size
        device = self.device = backend.torch_device()
        self.dtype = torch.bfloat16
        spec = KVCacheSpec(num_layers=1, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16", block_size=BLOCK)
        self.layout = backend.attention.kv_cache_layout(spec)
        per_seq = -(-length // BLOCK)
        self.caches = backend.memory.allocate_kv(self.layout, seqs * per_seq, 1)
        order = torch.randperm(seqs * per_seq, generator=torch.Generator().manual_seed(0))
        self.table = order.view(seqs, per_seq).to(device=device, dtype=torch.int32)
        self.params = AttentionParams(scale=size**-0.5, num_heads=heads, num_kv_heads=kv_heads, head_size=size)

    def fill(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Write every slot; returns keys and values [S, length, K, D]."""
        shape = (self.seqs, self.length, self.kv_heads, self.size)
        key, value = (torch.randn(shape, device=self.device, dtype=self.dtype) for _ in range(2))
        for i in range(self.seqs):
            at = torch.arange(self.length, device=self.device)
            slots = self.table[i, at // BLOCK].long() * BLOCK + at % BLOCK
            self.backend.attention.reshape_and_cache(key[i], value[i], self.caches[0], slots)
        return key, value

    def metadata(self, query_len: int) -> Any:
        common = AttentionMetadata(
            query_start_loc=torch.arange(self.seqs + 1, device=self.device, dtype=torch.int32) * query_len,
            seq_lens=torch.full((self.seqs,), self.length, device=self.device, dtype=torch.int32),
            block_table=self.table,
            slot_mapping=torch.full((self.seqs * query_len,), -1, device=self.device),
            max_query_len=query_len,
            max_seq_len=self.length,
        )
        return self.backend.attention.build_metadata(common)

    def query(self, query_len: int) -> torch.Tensor:
        return torch.randn(self.seqs * query_len, self.heads, self.size, device=self.device, dtype=self.dtype)

    def ours(self, query_THD: torch.Tensor, query_len: int) -> Callable[[], torch.Tensor]:
        metadata, out = self.metadata(query_len), torch.empty_like(query_THD)
        return lambda: self.backend.attention.forward(query_THD, self.caches[0], metadata, self.params, out)

    def close(self) -> None:
        self.backend.memory.release_kv(self.caches)
        self.backend.memory.empty_cache()


def _dense(query_SQHD: torch.Tensor, key_SLKD: torch.Tensor, value_SLKD: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's own attention over contiguous keys and values."""
    q, k, v = (x.transpose(1, 2) for x in (query_SQHD, key_SLKD, value_SLKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


def decode_share(stage: Any, backend: Any) -> None:
    """Bytes of keys and values read a second over the measured bandwidth of a copy."""
    least = 0.002 if stage.tiny else 0.05
    copy_gb_s = copy_rate(backend, (8 if stage.tiny else 2048) * MIB, least)
    rows = {}
    cases = ((64, 4096), (1, 32768), (8, 4096), (256, 1024)) if not stage.tiny else ((4, 64),)
    for seqs, length in cases:
        setting = Setting(backend, seqs=seqs, length=length, heads=64 if not stage.tiny else 8,
                          kv_heads=8 if not stage.tiny else 1, size=128)  # fmt: skip
        key, value = setting.fill()
        query = setting.query(1)
        run = setting.ours(query, 1)
        right = _dense(query.unsqueeze(1), key, value, causal=False)
        error = _off(run().view_as(right), right)
        del key, value, right
        gb_s = setting.seqs * -(-length // BLOCK) * setting.layout.page_bytes / seconds_of(backend, run, least) / 1e9
        rows[f"{seqs}x{length}"] = {"gb_s": gb_s, "share": gb_s / copy_gb_s, "max_error": error}
        setting.close()
        stage.note(copy_gb_s=copy_gb_s, decode=rows, decode_share=next(iter(rows.values()))["share"])


def prefill_ratio(stage: Any, backend: Any) -> None:
    """Time of torch's attention over ours, for whole prompts and for the last chunk of a long one."""
    least, rows = 0.002 if stage.tiny else 0.05, {}
    cases = (
        ((1, 4096, 4096), (4, 2048, 2048), (1, 16384, 16384), (1, 16384, 2048)) if not stage.tiny else ((2, 64, 64),)
    )
    for seqs, length, tokens in cases:
        setting = Setting(backend, seqs=seqs, length=length, heads=32 if not stage.tiny else 4,
                          kv_heads=8 if not stage.tiny else 2, size=128)  # fmt: skip
        key, value = setting.fill()
        query = setting.query(tokens)
        run = setting.ours(query, tokens)
        ours, row = seconds_of(backend, run, least), {}
        if tokens == length:  # torch aligns a causal mask at the top left
            shaped = query.view(seqs, tokens, *query.shape[1:])
            right = _dense(shaped, key, value, causal=True)
            row["max_error"] = _off(run().view_as(right), right)
            row["ratio"] = seconds_of(backend, partial(_dense, shaped, key, value, causal=True), least) / ours
        pairs = seqs * (tokens * (length - tokens) + tokens * (tokens + 1) / 2)
        row["tflop_s"] = 4 * pairs * setting.heads * setting.size / ours / 1e12
        rows[f"{seqs}x{tokens}of{length}"] = row
        setting.close()
        stage.note(prefill=rows, prefill_ratio=next(iter(rows.values())).get("ratio"))


def provider_table(stage: Any, backend: Any) -> None:
    """Decode and prefill through libraries that are installed: our time over theirs (above 1, they are faster).
    This is a row of `enginecore_cuda/providers.json`."""
    from enginecore_cuda.providers import installed

    table: dict[str, dict[str, float | None]] = {}
    stage.note(providers=table)
    for name, provider in installed().items():
        table[name] = {}
        for phase in provider.phases:
            factor = partial(_factor, stage, backend, provider, phase)
            table[name][phase] = stage.guard(f"{name} {phase}", factor)
            stage.note(providers=table)


def _factor(stage: Any, backend: Any, provider: Any, phase: str) -> float:
    seqs, length, tokens = {"decode": (64, 4096, 1), "prefill": (1, 4096, 4096)}[phase]
    setting = Setting(backend, seqs=seqs, length=length, heads=32, kv_heads=8, size=128)
    setting.fill()
    query = setting.query(tokens)
    ours, out = setting.ours(query, tokens), torch.empty_like(query)
    theirs = partial(provider.forward, query, setting.caches[0], setting.metadata(tokens), setting.params, out)
    error = _off(theirs(), ours())
    if error > 0.05:
        raise AssertionError(f"the results differ by {error}")
    factor = seconds_of(backend, ours, 0.03) / seconds_of(backend, theirs, 0.03)
    setting.close()
    return factor
