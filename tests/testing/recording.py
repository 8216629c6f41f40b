"""A backend on the host that captures graphs as a device does: operations are recorded with their memory and run again.

`RecordingGraphs.capture` runs a function and notes each operation that torch dispatches; `replay` runs those operations
again on the same tensors, at the same addresses, without the function. What the host reads from a tensor while it is
captured is refused: on a device that would be a synchronisation, which a capture does not survive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from enginecore.device import AttentionMetadata, AttentionParams, BackendContext, GraphKey, GraphRunner, GraphSupport
from enginecore.ops.torch_backend import TORCH_CAPABILITIES, HostMemory, TorchAttention, TorchBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_HOST_READS = ("tolist", "item", "numpy", "nonzero")
#: Bytes that one graph is said to hold.
HELD = 1000


class _HostReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS:
            raise RuntimeError(f"{name}() reads device memory from the host, which cannot be captured")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.calls.append((func, args, kwargs or {}, made))
        return out


class RecordingGraphs(GraphRunner):
    """`fault`: "" or what goes wrong."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.captured: list[GraphKey] = []
        self.replays = self.held = 0

    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        return sorted(keys, reverse=True)[: budget_bytes // HELD]

    def capture(self, key: GraphKey, fn: Callable[..., Any], static_inputs: dict[str, Any]) -> Any:
        if self.fault == "third_fails" and len(self.captured) == 2:
            raise RuntimeError("no third graph today")
        with _HostReads(), _Recorder() as recorder:
            result = fn(**static_inputs)
        self.captured.append(key)
        self.held += 10**9 if self.fault == "greedy" and key.num_seqs == 2 else HELD
        return recorder.calls, result

    def replay(self, handle: Any) -> Any:
        calls, result = handle
        self.replays += 1
        for func, args, kwargs, made in calls:
            again = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for new, old in zip(again, made, strict=True):
                if new.data_ptr() != old.data_ptr():  # neither a view nor in place: the result goes where it went
                    old.copy_(new)
        return result

    def memory_bytes(self) -> int:
        return self.held

    def release(self) -> None:
        self.captured.clear()
        self.held = 0


class TensorAttention(TorchAttention):
    """Steps of one token a sequence in tensor operations alone. `stateful`: metadata that must be renewed."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.stateful = fault == "stale_state"

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        if not self.stateful:
            return common
        return AttentionMetadata(**{**vars(common), "state": common.seq_lens.clone()})

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        slots = kv_cache.shape[0] * kv_cache.shape[2]
        hits_TS = slot_mapping_T[:, None] == torch.arange(slots)
        written_S = hits_TS.any(0)
        source_S = hits_TS.to(torch.int64).argmax(0)
        for side, values in ((0, key_TKD), (1, value_TKD)):
            old = kv_cache[:, side].reshape(slots, *values.shape[1:])
            new = torch.where(written_S[:, None, None], values[source_S].to(kv_cache.dtype), old)
            kv_cache[:, side].copy_(new.view(kv_cache.shape[0], *kv_cache.shape[2:]))

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if metadata.max_query_len != 1:
            return super().forward(query_THD, kv_cache, metadata, params, out_THD)
        assert not (params.soft_cap or params.sliding_window) and params.sinks is None
        ratio = params.num_heads // params.num_kv_heads
        pages = kv_cache[metadata.block_table.long()]  # [S, B, 2, block_size, K, D]
        key, value = (pages[:, :, side].flatten(1, 2).repeat_interleave(ratio, 2).float() for side in (0, 1))
        scores = torch.einsum("shd,slhd->shl", query_THD.float(), key) * params.scale
        hidden_SL = torch.arange(key.shape[1]) >= metadata.seq_lens[:, None]
        weights = scores.masked_fill(hidden_SL[:, None], float("-inf")).softmax(-1)
        value = value.masked_fill(hidden_SL[:, :, None, None], 0)  # what was never written may be anything
        out = torch.einsum("shl,slhd->shd", weights, value).to(query_THD.dtype)
        return out if out_THD is None else out_THD.copy_(out)


class SmallMemory(HostMemory):
    """Zeroed caches: a masked position must not be NaN for tensor operations to drop it."""

    def allocate_kv(self, layout: Any, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        return [cache.zero_() for cache in super().allocate_kv(layout, num_blocks, num_layers)]


class RecordingBackend(TorchBackend):
    def __init__(self, ctx: BackendContext, fault: str) -> None:
        super().__init__(ctx)
        support = GraphSupport.NEVER if fault == "never" else GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE
        self.capabilities = type(TORCH_CAPABILITIES)(**{**vars(TORCH_CAPABILITIES), "graph_support": support})
        self.memory = SmallMemory()
        self.attention = TorchAttention() if fault == "host_reads" else TensorAttention(fault)
        self.graphs = RecordingGraphs(fault)


def create(fault: str = "") -> RecordingBackend:
    return RecordingBackend(BackendContext(device="recorder", index=0), fault)
