"""A whole backend in plain torch: short, slow and right, until it is asked for a planted fault.

`create(fault="")` makes it; the faults are the methods' `if self.fault == ...`. The kit must pass the first and catch
every other. Cache of one attention call: [2 (keys, values), blocks, block size, K, D].
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from enginecore.device import (
    AttentionBackend,
    AttentionMetadata,
    AttentionParams,
    AttentionQuery,
    Backend,
    Capabilities,
    Communicator,
    GraphKey,
    GraphRunner,
    GraphSupport,
    GroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    MemoryInfo,
    MemoryManager,
    Verdict,
    check_attention,
)
from enginecore.errors import DriverMissingError
from enginecore.testing import ConformanceProfile, DeclaredGap, PerformanceFloor

from tests.testing.toy_group import OneRank, ToyGroup
from tests.testing.toy_ops import ToyOps

CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    block_sizes=frozenset({8, 16, 32}),
    head_size_range=(8, 256, 2),
    max_gqa_ratio=16,
    features=frozenset({"sliding_window", "soft_cap", "sinks", "alibi", "non_causal"}),
    graph_support=GraphSupport.ALWAYS,
    per_process_accounting=True,
    batch_invariant=True,
    max_world_size=2,
    ranks_share_device=True,
)


class ToyAttention(AttentionBackend):
    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.remembered: dict[Any, AttentionMetadata] = {}
        self.copying: threading.Timer | None = None

    def supports(self, query: AttentionQuery) -> Verdict:
        if self.fault == "accepts_everything":
            return Verdict.of([])
        reasons = check_attention(CAPABILITIES, query)
        if self.fault == "refuses_what_it_claims" and query.features == {"alibi"}:
            reasons.append("on second thoughts, no ALiBi")
        return Verdict.of(reasons[:1] if self.fault == "first_reason_only" else reasons)

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        page = 2 * spec.block_size * spec.num_kv_heads * spec.head_size * getattr(torch, spec.dtype).itemsize
        if self.fault == "wrong_page_bytes":
            page //= 2
        shape = (2, -1, spec.block_size, spec.num_kv_heads, spec.head_size)
        return KVCacheLayout(shape=shape, dtype=spec.dtype, page_bytes=page)

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        if self.fault.startswith("graph_metadata"):  # kept at the capture, and not renewed
            table = common.block_table.clone()
            return AttentionMetadata(**{**vars(common), "block_table": table})
        if self.fault == "stale_block_table":
            table = common.block_table.clone()
            kept = self.remembered.setdefault(tuple(common.seq_lens.tolist()), table)
            return AttentionMetadata(**{**vars(common), "block_table": kept})
        return common

    def refresh_metadata(self, metadata: AttentionMetadata) -> None:
        return None

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        size = kv_cache.shape[2]
        keep = slot_mapping_T >= (-1 if self.fault == "writes_padding" else 0)
        slots = slot_mapping_T[keep]
        blocks, offsets = slots // size, slots % size
        kv_cache[0, blocks, offsets] = key_TKD[keep].to(kv_cache.dtype)
        kv_cache[1, blocks, offsets] = value_TKD[keep].to(kv_cache.dtype)
        if self.fault == "writes_out_of_bounds" and len(slots):
            kv_cache[1, (blocks[-1:] + 1) % kv_cache.shape[1], 0] = 1.0
        if self.fault == "assumes_contiguous_keys":
            packed = torch.as_strided(key_TKD, key_TKD.shape, (key_TKD[0].numel(), key_TKD.shape[2], 1))
            kv_cache[0, blocks, offsets] = packed[keep].to(kv_cache.dtype)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        self._misbehave(query_THD)
        out = torch.empty(query_THD.shape, dtype=query_THD.dtype) if out_THD is None else out_THD
        starts, size = metadata.query_start_loc.tolist(), kv_cache.shape[2]
        for i, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[i, : -(-length // size)].long()
            if self.fault == "off_by_one_block" and length % size == 0:
                blocks = metadata.block_table[i, 1 : length // size + 1].long()
            if self.fault == "follows_whole_table":
                blocks = metadata.block_table[i].long()
            key, value = (kv_cache[side, blocks].flatten(0, 1) for side in (0, 1))
            if self.fault != "reads_tail_slots":
                key, value = key[:length], value[:length]
            end = starts[i + 1] - int(self.fault == "unwritten_output" and starts[i + 1] > 20)
            out[starts[i] : end] = self._attend(query_THD[starts[i] : starts[i + 1]], key, value, length, params)[
                : end - starts[i]
            ]
        if self.fault == "writes_past_output" and out_THD is not None:
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel())[0] = 0.0
        return out

    def _misbehave(self, query_THD: torch.Tensor) -> None:
        if self.fault == "refuses_bfloat16" and query_THD.dtype is torch.bfloat16:
            raise NotImplementedError("bfloat16 attention is not written yet")
        if self.fault == "hangs_bfloat16" and query_THD.dtype is torch.bfloat16:
            time.sleep(3600)
        if self.fault == "segfaults_bfloat16" and query_THD.dtype is torch.bfloat16:
            print("about to read address 8", flush=True)
            ctypes.string_at(8)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, params: AttentionParams
    ) -> torch.Tensor:
        ratio = params.num_heads // params.num_kv_heads
        key, value = key.double(), value.double()
        if self.fault == "gqa_heads_interleaved":
            key, value = key.repeat(1, ratio, 1), value.repeat(1, ratio, 1)
        else:
            key, value = key.repeat_interleave(ratio, 1), value.repeat_interleave(ratio, 1)
        scale = params.scale * 1.05 if self.fault == "wrong_scale" else params.scale
        scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
        if params.soft_cap is not None and self.fault != "ignores_soft_cap":
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        at, other = torch.arange(length - len(query), length).unsqueeze(1), torch.arange(len(key))
        if params.alibi_slopes is not None:
            scores = scores + params.alibi_slopes.double().view(-1, 1, 1) * (other - at)
        hidden = other >= length
        if params.causal and self.fault != "missing_causal_mask":
            hidden = hidden | (other > at)
        window = params.sliding_window
        if window is not None and self.fault != "ignores_sliding_window":
            hidden = hidden | (other <= at - window - int(self.fault == "window_off_by_one"))
        scores = scores.masked_fill(hidden, float("-inf"))
        if self.fault == "unstable_softmax":
            weights = scores.float().exp() / scores.float().exp().sum(-1, keepdim=True)
            return torch.einsum("hqk,khd->qhd", weights.double(), value).to(query.dtype)
        if params.sinks is not None:
            sinks = params.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        if self.fault == "returns_nan":
            weights = weights / 0.0
        if self.fault == "prompts_rounded_otherwise" and len(query) > 1:
            weights = weights * (1 + 1e-6)
        return torch.einsum("hqk,khd->qhd", weights, value).to(query.dtype)

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        if self.fault == "copies_nothing":
            return
        if self.fault == "races_on_shared_block" and threading.current_thread() is threading.main_thread():
            self.copying = threading.Timer(0.01, self.copy_blocks, (caches, pairs))
            self.copying.start()
            return
        for cache in caches[:1] if self.fault == "copies_first_layer_only" else caches:
            for src, dst in pairs:
                cache[:, dst] = cache[:, src]

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        for a, b in zip(src, dst, strict=True):
            for i, j in pairs:
                i, j = (j, i) if self.fault == "swaps_backwards" else (i, j)
                b[:, j] = a[:, i]


class ToyMemory(MemoryManager):
    """Counts the caches that it has given out. `ledger` is a folder with a file for each process that uses the toy."""

    def __init__(self, fault: str, ledger: str) -> None:
        self.fault = fault
        self.used = self.peak = 0
        self.ledger = Path(ledger) if ledger else None

    def others(self) -> int:
        """What other processes hold."""
        files = [file for file in self.ledger.iterdir() if file.name != str(os.getpid())] if self.ledger else []
        return sum(int(file.read_text() or 0) for file in files)

    def record(self) -> None:
        if self.ledger:
            (self.ledger / str(os.getpid())).write_text(str(self.used))

    def memory_info(self) -> MemoryInfo:
        total = 8 * 2**30
        usable = total - (self.others() if self.fault == "usable_shrinks_with_others" else 0)
        return MemoryInfo(total_bytes=total, usable_bytes=usable, free_bytes=usable - self.used, source="toy")

    def process_used_bytes(self) -> int:
        return self.used + (self.others() if self.fault == "counts_other_processes" else 0)

    def peak_bytes(self) -> int:
        return self.peak

    def reset_peak(self) -> None:
        self.peak = self.used

    def empty_cache(self) -> None:
        return None

    def allocate_kv(self, layout: KVCacheLayout, num_blocks: int, num_layers: int) -> list[torch.Tensor]:
        size = layout.page_bytes * num_blocks * num_layers
        if size > self.memory_info().free_bytes:
            raise MemoryError(f"{size} bytes are more than are free")
        shape, dtype = layout.shape_for(num_blocks), getattr(torch, layout.dtype)
        if self.fault == "caches_overlap":
            one = torch.empty(shape, dtype=dtype)
            return [one for _ in range(num_layers)]
        if self.fault != "counts_nothing":
            self.used += size
            self.peak = max(self.peak, self.used)
            self.record()
        return [torch.empty(shape, dtype=dtype) for _ in range(num_layers)]

    def release_kv(self, caches: list[torch.Tensor]) -> None:
        if self.fault not in ("leaks", "counts_nothing"):
            self.used -= sum(cache.numel() * cache.element_size() for cache in caches)
            self.record()
        caches.clear()

    def shrink_kv(self, caches: list[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
        return [cache[:, :num_blocks].clone() for cache in caches]


class ToyGraphs(GraphRunner):
    """A "graph" is the function and its inputs, and 16 MiB of the toy's memory."""

    SIZE = 16 * 2**20

    def __init__(self, fault: str, memory: ToyMemory) -> None:
        self.fault, self.memory = fault, memory
        self.held = 0

    def plan(self, keys: list[GraphKey], budget_bytes: int) -> list[GraphKey]:
        each = 1024 if self.fault == "graph_memory_underestimated" else self.SIZE
        return sorted(keys, reverse=True)[: budget_bytes // each]

    def capture(self, key: GraphKey, fn: Any, static_inputs: dict[str, Any]) -> Any:
        if self.fault == "capture_fails":
            raise RuntimeError("an operation of the step cannot be captured")
        self.held += self.SIZE
        self.memory.used += self.SIZE
        frozen = {name: value.clone() for name, value in static_inputs.items()}
        return [fn, frozen if self.fault == "graph_keeps_first_inputs" else static_inputs, None]

    def replay(self, handle: Any) -> Any:
        fn, inputs, before = handle
        if self.fault == "graph_returns_first_result" and before is not None:
            return before
        handle[2] = fn(**inputs)
        return handle[2]

    def memory_bytes(self) -> int:
        return 0 if self.fault == "graph_memory_untold" else self.held

    def release(self) -> None:
        self.memory.used -= self.held
        self.held = 0


class ToyEvent:
    def record(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True


class ToyBackend(Backend):
    attention: ToyAttention

    def __init__(self, fault: str, ledger: str) -> None:
        self.fault = fault
        self.capabilities = CAPABILITIES
        self.memory = ToyMemory(fault, ledger)
        self.attention = ToyAttention(fault)
        self.ops = ToyOps(fault)
        self.graphs = ToyGraphs(fault, self.memory)
        self.collectives = OneRank(fault)

    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def set_device(self, index: int) -> None:
        if index != 0 and self.fault != "accepts_any_device":
            raise DriverMissingError(f"there is one toy; {index} does not exist")

    def communicator(self, group: GroupSpec) -> Communicator:
        return ToyGroup(group, self.fault)

    def synchronize(self) -> None:
        if self.attention.copying is not None:
            self.attention.copying.join()

    def stream(self) -> Any:
        return contextlib.nullcontext()

    def event(self) -> ToyEvent:
        return ToyEvent()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def shutdown(self) -> None:
        if self.fault == "thread_does_not_end":
            threading.Thread(target=time.sleep, args=(3600,)).start()


def create(fault: str = "", ledger: str = "") -> Backend:
    if fault == "raises_at_creation":
        raise RuntimeError("no toy today")
    if fault == "segfaults_at_creation":
        ctypes.string_at(8)
    return ToyBackend(fault, ledger)


def gap_profile() -> ConformanceProfile:
    gap = DeclaredGap(cases="L1/attention/wild_table_entries", reason="known since spring", expires="2030-12-31")
    return ConformanceProfile(gaps=(gap,))


def promise_profile() -> ConformanceProfile:
    """A gap over what is not claimed: a promise to claim it by then."""
    return ConformanceProfile(gaps=(DeclaredGap(cases="L1/*[float16]", reason="in summer", expires="2030-06-30"),))


def floor_profile() -> ConformanceProfile:
    """A floor that anything reaches, one that nothing reaches, one for a metric that is not measured."""
    return ConformanceProfile(
        floors=(
            PerformanceFloor(case="L6/rms_norm/*[float32]", metric="share", at_least=1e-9),
            PerformanceFloor(case="L6/silu_and_mul/*[float32]", metric="share", at_least=1e9),
            PerformanceFloor(case="L6/copy_blocks/*[float32]", metric="beauty", at_least=0.5),
        )
    )


def misspelt_profile() -> ConformanceProfile:
    return ConformanceProfile(floors=(PerformanceFloor(case="L6/rmsnorm/*", metric="share", at_least=0.5),))


def dated_profile() -> ConformanceProfile:
    """No gap; what is not claimed is looked at again by a day."""
    return ConformanceProfile(skips_expire="2030-12-31")
