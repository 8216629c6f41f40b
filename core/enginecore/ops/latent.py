"""References of attention over cached latents (multi-head latent attention with its up-projections in the queries).

A cached row is what all heads of a token share: L numbers that are key and value both, then R rotated numbers that are
key only (DeepSeek-V2, arXiv:2405.04434). A cache is [blocks, block_size, L + R].

Shape suffixes: T tokens, H query heads, W = L + R, L latent, N cached positions, Q tokens of one sequence.
"""

from __future__ import annotations

import torch

from enginecore.device.attention import AttentionMetadata


def latent_cache(rows_TW: torch.Tensor, cache: torch.Tensor, slot_mapping_T: torch.Tensor) -> None:
    keep_T = slot_mapping_T >= 0
    slots = slot_mapping_T[keep_T]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = rows_TW[: len(keep_T)][keep_T].to(cache.dtype)


def latent_attention(
    query_THW: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, scale: float, latent: int
) -> torch.Tensor:
    """One sequence after another, in float32 (float64 for float64)."""
    exact = torch.float64 if query_THW.dtype == torch.float64 else torch.float32
    out_THL = query_THW.new_zeros(*query_THW.shape[:2], latent)
    starts, block_size = metadata.query_start_loc.tolist(), cache.shape[1]
    for i, length in enumerate(metadata.seq_lens.tolist()):
        begin, end = starts[i], starts[i + 1]
        if begin == end:
            continue
        blocks = metadata.block_table[i, : -(-length // block_size)].long()
        rows_NW = cache[blocks].flatten(0, 1)[:length].to(exact)
        scores_QHN = query_THW[begin:end].to(exact) @ rows_NW.t() * scale
        position_N = torch.arange(length, device=cache.device)
        hidden_QN = position_N > position_N[length - (end - begin) :, None]
        weights_QHN = scores_QHN.masked_fill(hidden_QN[:, None], float("-inf")).softmax(-1)
        out_THL[begin:end] = (weights_QHN @ rows_NW[:, :latent]).to(out_THL.dtype)
    return out_THL
