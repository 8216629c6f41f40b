"""The contract's op table over the Triton kernels. A module is imported when its op is first asked for."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from enginecore.device.capabilities import Verdict
from enginecore.device.optable import Impl, OpQuery, OpTable

from enginecore_triton.device import DeviceDescription

__all__ = ["TritonOps"]

#: Op of the core's schema -> module of `enginecore_triton.ops` that has a function of that name and `supports`.
MODULES = {
    "rms_norm": "rms_norm",
    "fused_add_rms_norm": "rms_norm",
    "rotary_embedding": "rotary_embedding",
    "silu_and_mul": "activations",
    "gelu_and_mul": "activations",
    "gelu_tanh_and_mul": "activations",
    "pack_linear": "pack_linear",
    "sample": "sample",
    "sampling_probabilities": "sample",
    "rejection_sample": "rejection_sample",
    "moe_experts": "moe_experts",
    "quantized_experts": "quantized_experts",
    "latent_cache": "latent",
    "latent_attention": "latent",
    "lora_shrink": "lora",
    "lora_expand": "lora",
    "causal_conv": "causal_conv",
    "selective_scan": "selective_scan",
    "ssd_scan": "ssd_scan",
}

DTYPES = ("float32", "bfloat16", "float16")


class TritonOps(OpTable):
    """Ops for the device that `device` describes. A verdict is `unverified` unless `verified` says that the kernels
    passed the conformance kit on this architecture."""

    def __init__(self, device: DeviceDescription, *, verified: bool = False) -> None:
        self.device = device
        self._verified = verified
        self._found: dict[str, Impl] = {}

    def get(self, op: str) -> Impl | None:
        if op not in MODULES:
            return None
        if op not in self._found:
            module = importlib.import_module(f"enginecore_triton.ops.{MODULES[op]}")
            run = partial(getattr(module, op), device=self.device)
            self._found[op] = Impl(run, partial(self._verdict, module), name="triton")
        return self._found[op]

    def _verdict(self, module: Any, query: OpQuery) -> Verdict:
        reasons = [] if query.dtype in DTYPES else [f"dtype {query.dtype} is not one of {', '.join(DTYPES)}"]
        return Verdict.of(reasons + module.supports(query, self.device), verified=self._verified)
