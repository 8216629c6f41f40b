"""What memory was predicted for each owner, beside what the device says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from enginecore.device import MemoryManager


class MemoryAccount:
    """`ledger` is what the cache was sized by, `loaded_bytes` what the process held more once the weights were read."""

    def __init__(
        self, ledger: dict[str, int], loaded_bytes: int, memory: MemoryManager, caches: Sequence[torch.Tensor]
    ) -> None:
        self._ledger = ledger
        self._loaded_bytes = loaded_bytes
        self._memory = memory
        self._cache_bytes = sum(cache.nbytes for cache in caches)

    def figures(self) -> dict[str, int]:
        """Bytes now: `measured_OWNER` of each owner that can be told apart, and of the process with its peak. What the
        peak has beyond base, weights and cache are activations, where memory is taken when it is allocated."""
        peak = self._memory.peak_bytes()
        figures = {"measured_process": self._memory.process_used_bytes(), "measured_peak": peak}
        if self._loaded_bytes:
            figures["measured_weights"] = self._loaded_bytes
        if self._cache_bytes:
            figures["measured_kv_cache"] = self._cache_bytes
        rest = peak - self._ledger.get("process_base", 0) - self._loaded_bytes - self._cache_bytes
        if self._loaded_bytes and self._cache_bytes and rest > 0:
            figures["measured_activations"] = rest
        return figures
