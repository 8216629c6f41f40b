"""An engine on an accelerator that exists only as books: real scheduling, model, graphs and memory over host tensors.

Shape suffixes: T tokens, S sequences, H query heads, K key-value heads, D head size, L cached positions.
"""

from __future__ import annotations

from typing import Any

import torch
from enginecore.config import EngineArgs
from enginecore.device import Capabilities, GraphSupport
from enginecore.device.accelerator import AcceleratorBackend, PooledGraphs, PooledMemory, guarded_attention
from enginecore.engine.client import InprocClient
from enginecore.ops.torch_backend import ReferenceOps, TorchAttention
from enginecore.request import EngineRequest, SamplingParams
from enginecore.testing.fake_runtime import FakeRuntime

MIB = 2**20
SCRATCH = 1024
CAPABILITIES = Capabilities(
    dtypes=frozenset({"float32", "bfloat16"}),
    kv_dtypes=frozenset({"float32", "bfloat16"}),
    block_sizes=frozenset({16, 32}),
    head_size_range=(16, 64, 16),
    max_gqa_ratio=4,
    graph_support=GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    per_process_accounting=True,
)


class DecodeAttention(TorchAttention):
    """Decode steps never look at lengths on the host, so that they can be recorded. Each token of a step takes SCRATCH
    bytes of the device while it is computed."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__(CAPABILITIES)
        self.runtime = runtime

    def forward(self, query_THD: Any, kv_cache: Any, metadata: Any, params: Any, out_THD: Any = None) -> Any:
        scratch = self.runtime.allocate(SCRATCH * len(query_THD))
        try:
            if metadata.max_query_len > 1:
                return super().forward(query_THD, kv_cache, metadata, params, out_THD)
            return self._decode(query_THD, kv_cache, metadata, params)
        finally:
            self.runtime.resize(scratch, 0)

    @staticmethod
    def _decode(query_SHD: Any, kv_cache: Any, metadata: Any, params: Any) -> Any:
        pages = kv_cache[metadata.block_table.long()]
        key_SLKD, value_SLKD = (pages[:, :, side].flatten(1, 2).float() for side in (0, 1))
        ratio = params.num_heads // params.num_kv_heads
        scores_SHL = (
            torch.einsum("shd,slhd->shl", query_SHD.float(), key_SLKD.repeat_interleave(ratio, 2)) * params.scale
        )
        hidden_SL = torch.arange(key_SLKD.shape[1]) >= metadata.seq_lens.unsqueeze(1)
        weights_SHL = scores_SHL.masked_fill(hidden_SL.unsqueeze(1), float("-inf")).softmax(-1)
        values_SLHD = value_SLKD.masked_fill(hidden_SL[:, :, None, None], 0.0).repeat_interleave(ratio, 2)
        return torch.einsum("shl,slhd->shd", weights_SHL, values_SLHD).to(query_SHD.dtype)

    def reshape_and_cache(self, key_TKD: Any, value_TKD: Any, kv_cache: Any, slot_mapping_T: Any) -> None:
        """Without a mask of kept slots, whose size would be recorded: padding writes back what is there."""
        size = kv_cache.shape[2]
        slots = slot_mapping_T.clamp(min=0)
        keep = (slot_mapping_T >= 0)[:, None, None]
        for side, states in enumerate((key_TKD, value_TKD)):
            flat = kv_cache[:, side]
            there = flat[slots // size, slots % size]
            kv_cache[slots // size, side, slots % size] = torch.where(keep, states.to(kv_cache.dtype), there)


class Accelerator(AcceleratorBackend):
    def __init__(self, runtime: FakeRuntime, why_none: str = "") -> None:
        super().__init__("books", runtime, 0)
        self.capabilities, self.ops = CAPABILITIES, ReferenceOps()
        self.memory = PooledMemory(runtime, outside=lambda: MIB)
        kernels = None if why_none else DecodeAttention(runtime)
        self.attention = guarded_attention(
            kernels, TorchAttention(CAPABILITIES), lambda error: False, self.torch_device(), why_none
        )
        self.attach_mover(self.attention)
        if runtime.can_capture():
            self.graphs = PooledGraphs(runtime)


def start(monkeypatch: Any, model: str, runtime: FakeRuntime, why_none: str = "", **settings: Any) -> InprocClient:
    """The engine with that device in the place of the host's."""
    backend = Accelerator(runtime, why_none)
    monkeypatch.setattr("enginecore.engine.site.create_backend", lambda *_, **__: backend)
    values = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "dtype": "float32",
        "device": "cpu",
        "memory_utilization": 0.9,
        **settings,
    }
    return InprocClient(EngineArgs(model=model, **values))


def run(client: InprocClient, prompts: list[list[int]], count: int = 6, name: str = "r") -> list[Any]:
    """The outputs' tokens of each prompt, or its error."""
    for i, prompt in enumerate(prompts):
        client.add(EngineRequest(f"{name}{i}", prompt, SamplingParams(temperature=0, ignore_eos=True), count))
    answers: list[Any] = [[] for _ in prompts]
    while client.has_work():
        for output in client.step().outputs:
            index = int(output.request_id.removeprefix(name))
            answers[index] = output.error or answers[index] + output.token_ids
    return answers


def create() -> Accelerator:
    """For the conformance kit."""
    return Accelerator(FakeRuntime(8 * 2**30))
