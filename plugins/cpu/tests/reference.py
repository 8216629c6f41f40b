"""Float64 references and random cases for the tests; nothing here shares code with the implementations."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from enginecore.device import AttentionMetadata, AttentionParams, KVCacheSpec


@dataclass
class Case:
    """One mixed batch: (cached tokens, new tokens) for each sequence."""

    sequences: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: str = "float32"
    kv_dtype: str | None = None
    padding: int = 0
    seed: int = 0
    strided: bool = False
    params: dict = field(default_factory=dict)


@dataclass
class Built:
    """`keys`, `values`: what the cache stands for, which is not quite what was written where it keeps bytes."""

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    cache: torch.Tensor
    metadata: AttentionMetadata
    params: AttentionParams


def build(backend, case: Case) -> Built:
    """Fill a NaN-poisoned cache through the backend, cached tokens first, then the step's; tables shuffled."""
    gen = torch.Generator().manual_seed(case.seed)
    dtype = getattr(torch, case.dtype)
    block, kv_heads, size = case.block_size, case.num_kv_heads, case.head_size
    need = [-(-(cached + new) // block) for cached, new in case.sequences]
    num_blocks = sum(need) + 3
    kept = case.kv_dtype or case.dtype
    spec = KVCacheSpec(num_layers=1, num_kv_heads=kv_heads, head_size=size, dtype=kept, block_size=block)
    layout = backend.attention.kv_cache_layout(spec)
    (cache,) = backend.memory.allocate_kv(layout, num_blocks, 1)
    if case.kv_dtype is None:
        cache.fill_(float("nan"))
    else:
        cache.view(torch.uint8).fill_(0xFF)  # a NaN in every format but int8, whose scales it makes NaN
    order = torch.randperm(num_blocks, generator=gen).tolist()
    table = torch.full((len(need), max(need, default=1) + 2), -7, dtype=torch.int32)
    keys, values, old_slots, new_slots = [], [], [], []
    for i, (cached, new) in enumerate(case.sequences):
        blocks = [order.pop() for _ in range(need[i])]
        table[i, : need[i]] = torch.tensor(blocks, dtype=torch.int32)
        keys.append(torch.randn(cached + new, kv_heads, size, generator=gen).to(dtype))
        values.append(torch.randn(cached + new, kv_heads, size, generator=gen).to(dtype))
        slots = [blocks[p // block] * block + p % block for p in range(cached + new)]
        old_slots += slots[:cached]
        new_slots += slots[cached:]
    old_k = torch.cat([k[:c] for k, (c, _) in zip(keys, case.sequences, strict=True)])
    old_v = torch.cat([v[:c] for v, (c, _) in zip(values, case.sequences, strict=True)])
    new_k = torch.cat([k[c:] for k, (c, _) in zip(keys, case.sequences, strict=True)])
    new_v = torch.cat([v[c:] for v, (c, _) in zip(values, case.sequences, strict=True)])
    tokens = len(new_slots) + case.padding
    query = torch.randn(tokens, case.num_heads, size, generator=gen).to(dtype)
    fused = torch.zeros(tokens, case.num_heads + 2 * kv_heads, size, dtype=dtype)
    fused[:, : case.num_heads] = query
    fused[: len(new_slots), case.num_heads : case.num_heads + kv_heads] = new_k
    fused[: len(new_slots), case.num_heads + kv_heads :] = new_v
    if case.strided:
        query = fused[:, : case.num_heads]
    slots_new = torch.tensor(new_slots + [-1] * case.padding, dtype=torch.int64)
    backend.attention.reshape_and_cache(old_k, old_v, cache, torch.tensor(old_slots, dtype=torch.int64))
    backend.attention.reshape_and_cache(
        fused[:, case.num_heads : case.num_heads + kv_heads], fused[:, case.num_heads + kv_heads :], cache, slots_new
    )
    lengths = [cached + new for cached, new in case.sequences]
    starts = [0]
    for _, new in case.sequences:
        starts.append(starts[-1] + new)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots_new,
        max_query_len=max((n for _, n in case.sequences), default=0),
        max_seq_len=max(lengths, default=0),
    )
    params = AttentionParams(
        scale=size**-0.5, num_heads=case.num_heads, num_kv_heads=kv_heads, head_size=size, **case.params
    )
    if case.kv_dtype is not None:
        keys, values = ([kept_as(each, case.kv_dtype) for each in side] for side in (keys, values))
    return Built(query, keys, values, cache, backend.attention.build_metadata(metadata), params)


def kept_as(x_TKD: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """What a cache of bytes makes of keys or values, as float32."""
    x_TKD = x_TKD.float()
    if kv_dtype != "int8":
        largest = torch.finfo(getattr(torch, kv_dtype)).max
        return x_TKD.clamp(-largest, largest).to(getattr(torch, kv_dtype)).float()
    scale_TK1 = x_TKD.abs().amax(-1, keepdim=True) / 127
    return torch.round(x_TKD / scale_TK1) * scale_TK1


def attention_reference(built: Built) -> torch.Tensor:
    """[T, H, D] in float64, for the tokens that belong to a sequence."""
    params = built.params
    starts = built.metadata.query_start_loc.tolist()
    rows = []
    for i, (key, value) in enumerate(zip(built.keys, built.values, strict=True)):
        length = key.shape[0]
        for t in range(starts[i], starts[i + 1]):
            position = length - (starts[i + 1] - starts[i]) + t - starts[i]
            first = max(0, position + 1 - params.sliding_window) if params.sliding_window else 0
            last = position + 1 if params.causal else length
            heads = []
            for h in range(params.num_heads):
                kv = h // (params.num_heads // params.num_kv_heads)
                q = built.query[t, h].double()
                scores = key[first:last, kv].double() @ q * params.scale
                if params.soft_cap:
                    scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
                if params.alibi_slopes is not None:
                    scores = scores + float(params.alibi_slopes[h]) * (torch.arange(first, last) - position).double()
                if params.sinks is not None:
                    scores = torch.cat([scores, params.sinks[h].double()[None]])
                weights = torch.softmax(scores, -1)[: last - first]
                heads.append(weights @ value[first:last, kv].double())
            rows.append(torch.stack(heads))
    shape = (0, params.num_heads, params.head_size)
    return torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.float64)
