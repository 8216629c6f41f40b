"""The backend's required parts in plain torch, for installations without the compiled kernels.

Correct, not fast: the doctor says that these run. They are the core's own, with the check of slots that the kernels
have.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from enginecore.device.capabilities import Capabilities
from enginecore.ops import torch_backend

#: Ranks that gloo joins; they share the host's processors.
MAX_WORLD_SIZE = 64


def torch_capabilities() -> Capabilities:
    return replace(
        torch_backend.TORCH_CAPABILITIES,
        unified_memory=True,
        per_process_accounting=True,
        max_world_size=MAX_WORLD_SIZE,
        ranks_share_device=True,
    )


class TorchAttention(torch_backend.TorchAttention):
    """Refuses slots outside the cache with their number."""

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        num_slots = kv_cache.shape[0] * kv_cache.shape[2]
        if slot_mapping_T.numel() and int(slot_mapping_T.max()) >= num_slots:
            raise ValueError(f"slot {int(slot_mapping_T.max())} is outside the cache of {num_slots} slots")
        super().reshape_and_cache(key_TKD, value_TKD, kv_cache, slot_mapping_T)
