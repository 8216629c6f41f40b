"""What every op must compute, in float64 on the host, as plainly as it can be said.

Nothing here is shared with `enginecore.ops.reference`, which the engine runs: the two were written apart, so that a
mistake in one shows. Shape suffixes: T tokens, H query heads, K key-value heads, D head size, R rows, V vocabulary,
E hidden size, F intermediate size, O outputs, I inputs, P positions, N rotary dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

F64 = torch.float64


def f64(x: torch.Tensor) -> torch.Tensor:
    """A float64 copy on the host."""
    return x.detach().cpu().to(F64).clone()


class LogicalCache:
    """What the cache means, whatever layout a plugin gives it: key and value of each slot, NaN where none was written.

    Mirror every write here; attention is then checked against this copy and the plugin's tensors are never read.
    Values are kept as they were given: what a cache of a smaller dtype loses, with or without scales, is its tolerance.
    """

    def __init__(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> None:
        shape = (num_blocks * block_size, num_kv_heads, head_size)
        self.block_size = block_size
        self.key = torch.full(shape, math.nan, dtype=F64)
        self.value = torch.full(shape, math.nan, dtype=F64)

    def write(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
        slots = slot_mapping_T.cpu()
        real = slots >= 0
        self.key[slots[real]] = f64(key_TKD.cpu()[: len(slots)][real])
        self.value[slots[real]] = f64(value_TKD.cpu()[: len(slots)][real])

    def copy_blocks(self, pairs: list[tuple[int, int]], source: LogicalCache | None = None) -> None:
        """Copy whole blocks, from `source` when the data comes from another cache."""
        origin, size = source or self, self.block_size
        for src, dst in pairs:
            self.key[dst * size : (dst + 1) * size] = origin.key[src * size : (src + 1) * size]
            self.value[dst * size : (dst + 1) * size] = origin.value[src * size : (src + 1) * size]

    def gather(self, blocks: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, K, D] of a sequence that owns `blocks`."""
        size = self.block_size
        slots = torch.tensor([blocks[i // size] * size + i % size for i in range(length)], dtype=torch.long)
        return self.key[slots], self.value[slots]


@dataclass(frozen=True, kw_only=True)
class AttentionRule:
    """The mathematics of one attention call. `sliding_window` counts tokens, the current one included."""

    scale: float
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None


def paged_attention(
    query_THD: torch.Tensor,
    cache: LogicalCache,
    query_lens: list[int],
    seq_lens: list[int],
    tables: list[list[int]],
    rule: AttentionRule,
) -> torch.Tensor:
    """Attention [T, H, D] of each sequence's newest tokens over all of its cached ones."""
    out, start = [], 0
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, tables, strict=True):
        key, value = cache.gather(blocks, seq_len)
        out.append(attend(f64(query_THD[start : start + query_len]), key, value, rule))
        start += query_len
    return torch.cat(out)


def attend(
    query_QHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    """One sequence: its last Q tokens over its N keys. Soft cap, then ALiBi, then the mask, then sinks join the sum."""
    num_q, num_heads, _ = query_QHD.shape
    num_k, num_kv_heads, _ = key_NKD.shape
    ratio = num_heads // num_kv_heads
    out = torch.empty(num_q, num_heads, value_NKD.shape[-1], dtype=F64)
    q_pos = torch.arange(num_k - num_q, num_k)[:, None]
    k_pos = torch.arange(num_k)[None, :]
    hidden = torch.zeros(num_q, num_k, dtype=torch.bool)
    if rule.causal:
        hidden |= k_pos > q_pos
    if rule.sliding_window is not None:
        hidden |= k_pos <= q_pos - rule.sliding_window
    for head in range(num_heads):
        score = query_QHD[:, head] @ key_NKD[:, head // ratio].T * rule.scale
        if rule.soft_cap is not None:
            score = rule.soft_cap * torch.tanh(score / rule.soft_cap)
        if rule.alibi_slopes_H is not None:
            score = score + float(rule.alibi_slopes_H[head]) * (k_pos - q_pos)
        score = score.masked_fill(hidden, -math.inf)
        top = score.max(dim=1, keepdim=True).values
        sink = float(rule.sinks_H[head]) if rule.sinks_H is not None else -math.inf
        top = torch.clamp(top, min=sink)
        weight = torch.exp(score - top)
        total = weight.sum(dim=1, keepdim=True) + torch.exp(sink - top)
        out[:, head] = (weight / total) @ value_NKD[:, head // ratio]
    return out


def rms_norm(x: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    wide = f64(x)
    return wide / torch.sqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * f64(weight_E)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, the sum). Whether the sum was rounded before its norm was taken is within the tolerance."""
    total = f64(x) + f64(residual)
    return rms_norm(total, weight_E, eps), total


def rotary_embedding(
    positions_T: torch.Tensor, x_THD: torch.Tensor, cos_sin_PN: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Each pair (a, b) of a head's first N dimensions becomes (a cos - b sin, b cos + a sin)."""
    out, table = f64(x_THD), f64(cos_sin_PN)
    half = table.shape[1] // 2
    angle = table[positions_T.cpu()]
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = angle[:, i, None], angle[:, half + i, None]
        a, b = out[:, :, first].clone(), out[:, :, second].clone()
        out[:, :, first] = a * cos - b * sin
        out[:, :, second] = b * cos + a * sin
    return out


def activate_and_mul(kind: str, x_T2F: torch.Tensor) -> torch.Tensor:
    """`kind` is "silu", "gelu" (exact) or "gelu_tanh"."""
    wide = f64(x_T2F)
    half = wide.shape[-1] // 2
    gate, up = wide[..., :half], wide[..., half:]
    if kind == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "gelu":
        return 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2))) * up
    if kind == "gelu_tanh":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    raise ValueError(f"no activation {kind!r}")


def linear(x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    out = f64(x_TI) @ f64(weight_OI).T
    return out if bias_O is None else out + f64(bias_O)


def sampling_distribution(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Probabilities [V] of one row after truncation, zero for tokens that may not be chosen; not renormalised."""
    scaled = f64(logits_V) / temperature
    probs = torch.exp(scaled - scaled.max())
    probs = probs / probs.sum()
    order = torch.argsort(probs, descending=True, stable=True)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    count = len(order) if top_k <= 0 else min(top_k, len(order))
    order = order[:count]
    if top_p < 1:
        share = probs[order] / probs[order].sum()
        before = torch.cumsum(share, 0) - share
        order = order[before < top_p]
    order = order[probs[order] >= min_p * probs[order[0]]]
    kept[order] = True
    return torch.where(kept, probs, torch.zeros_like(probs))


def kept_ids(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that may be chosen at all."""
    probs = sampling_distribution(logits_V, temperature, top_k, top_p, min_p)
    return set((probs > 0).nonzero().flatten().tolist())


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
    slack: float = 2e-5,
) -> list[set[int]]:
    """For each row the ids that are right: one, or a few where rounding in float32 may tip the inverse transform.

    Those are the ids whose share of the cumulative mass comes within `slack` of the uniform number.
    """
    answers = []
    for row in range(logits_RV.shape[0]):
        if float(temperature_R[row]) == 0:
            best = logits_RV[row].max()
            answers.append(set((logits_RV[row] == best).nonzero().flatten().tolist()))
            continue
        settings = (float(temperature_R[row]), int(top_k_R[row]), float(top_p_R[row]), float(min_p_R[row]))
        probs = sampling_distribution(logits_RV[row], *settings)
        mass = torch.cumsum(probs, 0) / probs.sum()
        uniform = float(uniform_R[row])
        near = (mass > uniform - slack) & (mass - probs / probs.sum() <= uniform + slack) & (probs > 0)
        answers.append(set(near.nonzero().flatten().tolist()))
    return answers


def merge_attn_states(
    out_a_THD: torch.Tensor, lse_a_TH: torch.Tensor, out_b_THD: torch.Tensor, lse_b_TH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    top = torch.maximum(f64(lse_a_TH), f64(lse_b_TH))
    weight_a, weight_b = torch.exp(f64(lse_a_TH) - top), torch.exp(f64(lse_b_TH) - top)
    total = weight_a + weight_b
    out = (f64(out_a_THD) * weight_a[..., None] + f64(out_b_THD) * weight_b[..., None]) / total[..., None]
    return out, top + torch.log(total)
