"""The attention part of the contract: paged key-value cache in, attention out.

Shape suffixes: T tokens of the step, H query heads, K key-value heads, D head size, S sequences, B block-table width.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from enginecore.device.capabilities import AttentionQuery, Verdict
from enginecore.device.contract import Contract, optional
from enginecore.device.memory import KVCacheLayout, KVCacheSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """Where each token of a step stands. All tensors are int32 except `slot_mapping` (int64), on the device.

    query_start_loc [S + 1]: sequence i owns tokens query_start_loc[i] to query_start_loc[i + 1] of the step;
    seq_lens [S]: tokens of the sequence after this step, cached ones included;
    block_table [S, B]: the blocks of each sequence, in order; entries past its length are undefined and never read;
    slot_mapping [T]: block * block_size + offset where each token's key and value go, -1 for padding;
    max_query_len, max_seq_len: host integers, upper bounds.
    `state` is whatever the backend's `build_metadata` wants to keep for the step.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    max_seq_len: int
    state: Any = None


@dataclass(frozen=True, kw_only=True)
class AttentionParams:
    """What is fixed for one attention call of a model. `sliding_window` counts tokens, the current one included."""

    scale: float
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Any = None
    alibi_slopes: Any = None
    causal: bool = True


class AttentionBackend(Contract):
    """Paged attention of one device. `block_size` is read off the cache's layout by the plugin that chose it."""

    @abstractmethod
    def supports(self, query: AttentionQuery) -> Verdict: ...

    @abstractmethod
    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout: ...

    @abstractmethod
    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        """Once a step: add what the kernels want to precompute, or return `common` as it is."""

    @optional
    def refresh_metadata(self, metadata: AttentionMetadata) -> None:
        """Optional. Before a captured step is replayed: the tensors that `metadata` was built from have new contents;
        bring what `build_metadata` added to them up to date, in place. A backend that adds something and has no such
        method runs its steps uncaptured."""

    @abstractmethod
    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        """Write keys and values into their slots; a slot of -1 is skipped. Inputs may be strided over T and K."""

    @abstractmethod
    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of each token over its sequence's cached keys up to and including its own position.

        Token t of sequence i sits at position seq_lens[i] - query_len[i] + t. Only slots below seq_lens are read.
        """

    @abstractmethod
    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        """Copy block src to block dst in every cache, for each (src, dst)."""

    @abstractmethod
    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        """Copy block i of `src` to block j of `dst` for each (i, j); one side may be host memory.

        May be called from another thread than `forward`, inside the backend's `stream()`, about blocks that no step
        writes meanwhile (or whose copy nobody will use)."""

    @optional
    def reference_reason(self) -> str | None:
        """Optional. Why attention runs as a torch reference here, None when the device's own kernels compute it."""
        return None

    @optional
    def with_kv_scales(self, key_scales_K: torch.Tensor, value_scales_K: torch.Tensor) -> AttentionBackend | None:
        """Optional. The attention of a layer whose fp8 cache holds keys and values divided by these scales (float32,
        on the device), or None where the backend takes none. What it writes only it reads; blocks are copied and
        moved by the backend that it was made of."""
        return None

    @optional
    def merge_attn_states(
        self,
        out_a_THD: torch.Tensor,
        lse_a_TH: torch.Tensor,
        out_b_THD: torch.Tensor,
        lse_b_TH: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Optional. Combine attention over two disjoint parts of the context, given log-sum-exps (natural log)."""
        import torch

        lse_TH = torch.logaddexp(lse_a_TH, lse_b_TH)
        weight_a = torch.exp(lse_a_TH - lse_TH).unsqueeze(-1)
        weight_b = torch.exp(lse_b_TH - lse_TH).unsqueeze(-1)
        return (out_a_THD * weight_a + out_b_THD * weight_b).to(out_a_THD.dtype), lse_TH
