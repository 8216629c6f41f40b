"""Attention of other libraries, for the calls where it was measured to be faster than the Triton kernels.

Nothing here is required: a library takes part when it is installed, offers the function that is wanted, and stands in
`providers.json` for this architecture and phase with a factor above 1, as `bench/on_gpu.py` measures it ("providers" in
its JSON). All read the Triton kernels' own cache, [blocks, 2, K, block_size, D].

Shape suffixes: T tokens, S sequences, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from enginecore.device import AttentionMetadata, AttentionParams

logger = logging.getLogger(__name__)

TABLE = Path(__file__).with_name("providers.json")
PHASES = ("decode", "prefill")
#: A library must be this much faster to be worth another dependency in the path.
LEAST_FACTOR = 1.05


class Provider(ABC):
    """`module` is what must be importable, `phases` what it computes."""

    module: str
    phases: tuple[str, ...]

    def __init__(self) -> None:
        self.library = importlib.import_module(self.module)

    def refuses(self, params: AttentionParams, dtype: torch.dtype) -> bool:
        """Whether a call needs what the library does not compute, or is not tried for here."""
        exotic = params.sinks is not None or params.alibi_slopes is not None or not params.causal
        return exotic or dtype not in (torch.bfloat16, torch.float16)

    @abstractmethod
    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor,
    ) -> torch.Tensor: ...


class FlashAttention3(Provider):
    """flash_attn_with_kvcache of FlashAttention 3 (Hopper): pages of any size, no planning on the host."""

    module, phases = "flash_attn_interface", PHASES

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor,
    ) -> torch.Tensor:
        window = -1 if params.sliding_window is None else params.sliding_window - 1
        out = self.library.flash_attn_with_kvcache(
            query_THD,
            kv_cache[:, 0].transpose(1, 2),
            kv_cache[:, 1].transpose(1, 2),
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=params.scale,
            causal=True,
            window_size=(window, -1 if window < 0 else 0),
            softcap=params.soft_cap or 0.0,
        )
        return out_THD.copy_(out[0] if isinstance(out, tuple) else out)


class FlashInfer(Provider):
    """FlashInfer's decode over a page table on the device: no planning on the host, so that it can be captured."""

    module, phases = "flashinfer", ("decode",)
    WORKSPACE_BYTES = 128 * 2**20

    def __init__(self) -> None:
        super().__init__()
        self._decode = importlib.import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache
        self._workspace: torch.Tensor | None = None

    def refuses(self, params: AttentionParams, dtype: torch.dtype) -> bool:
        return super().refuses(params, dtype) or bool(params.soft_cap)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor,
    ) -> torch.Tensor:
        if self._workspace is None:  # its counters must be zero at first
            self._workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=query_THD.device)
        result: torch.Tensor = self._decode(
            query_THD,
            kv_cache,
            self._workspace,
            metadata.block_table,
            metadata.seq_lens,
            metadata.max_seq_len,
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            window_left=-1 if params.sliding_window is None else params.sliding_window - 1,
            kv_layout="HND",
            out=out_THD,
        )
        return result


PROVIDERS: dict[str, type[Provider]] = {"flash_attn_interface": FlashAttention3, "flashinfer": FlashInfer}


def installed() -> dict[str, Provider]:
    """Those that can be imported with what is wanted of them; a broken one is told and left out."""
    found = {}
    for name, kind in PROVIDERS.items():
        if importlib.util.find_spec(kind.module) is None:
            continue
        try:
            found[name] = kind()
        except Exception as error:  # whatever a foreign library raises while it loads
            logger.warning("%s is installed and cannot be used: %s: %s", name, type(error).__name__, error)
    return found


def chosen(architecture: str, table: dict[str, Any] | None = None) -> dict[str, Provider]:
    """The fastest provider for each phase, where one was measured to be faster: {"decode": ..., "prefill": ...}.

    `table` is {architecture: {provider: {phase: factor}}}, `providers.json` by default.
    """
    rows = (json.loads(TABLE.read_text()) if table is None else table).get(architecture, {})
    wanted = {name for name, factors in rows.items() if any((f or 0) >= LEAST_FACTOR for f in factors.values())}
    if not wanted:
        return {}
    present = {name: provider for name, provider in installed().items() if name in wanted}
    found: dict[str, Provider] = {}
    for phase in PHASES:
        able = {n: rows[n].get(phase) or 0 for n, provider in present.items() if phase in provider.phases}
        best = max(able, key=lambda name: able[name], default=None)
        if best is not None and able[best] >= LEAST_FACTOR:
            found[phase] = present[best]
            logger.info("%s of attention through %s, measured %.2fx faster here", phase, best, able[best])
    return found
