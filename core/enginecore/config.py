"""Configuration: `EngineArgs` is what a user may set, `EngineConfig` what the engine runs on. Both are frozen.

`EngineConfig` is made once, by `enginecore.engine.resolve`, which replaces every None or "auto" and logs each choice;
nothing changes it afterwards.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec

from enginecore.adapters import RANKS, AdapterInfo, check_adapter_name
from enginecore.errors import ParameterError
from enginecore.pooling import PoolingModel, check_pooler_config

DEFAULT_MODEL = "smollm2-135m"

#: What a KV cache may be kept in, by the names of the command line, and torch's name of each. "auto" is the dtype of
#: activations.
KV_CACHE_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float32": "float32",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

#: The most tokens that speculation may guess at once.
MAX_GUESSES = 32

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12,
          "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_bytes(text: str | int, *, param: str) -> int:
    """Bytes from "2GiB", "512MB" or a plain number; ParameterError when it is not a positive size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).lower()) if match else None
    size = int(float(match.group(1)) * unit) if match and unit else 0
    if size <= 0:
        raise ParameterError(f"{param} must be a positive size such as 2GiB or 512MB, got {text!r}", param=param)
    return size


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of an engine. None or "auto" lets enginecore choose. Names follow vLLM's where both have them.

    `memory_utilization` f: this process may use f times what the device has for us (on a CPU: of physical memory or the
    cgroup's limit). `kv_cache_memory` (bytes) or `num_blocks` override the cache's part alone.
    `max_model_len` "auto" takes the longest that the cache can hold. `long_prefill_token_threshold` caps the tokens
    that one prompt gets in a step (0: only the step's budget caps it). `quantization`: None or "auto" computes with
    weights in `dtype`, whatever the file has; "gguf" keeps a GGUF file's blocks as they are; "int8" turns the weights
    of any checkpoint into bytes. Both round activations to bytes. `kv_cache_dtype`: what keys and values are kept in, a
    name of `KV_CACHE_DTYPES`, or "auto" for `dtype`. `device_options` go to the plugin as they are.
    `overlap`: the next step is planned while the device is at one; "auto" does where the device works asynchronously,
    "on" runs steps in a thread of their own elsewhere. Results are the same.
    Steps replay captured graphs where the device can, unless `enforce_eager`; `require_graphs` makes it an error when
    graphs cannot be captured. `kv_events_endpoint` publishes changes of the prefix cache (ZeroMQ, such as tcp://*:5557)
    under `kv_events_topic` (default kv@HOST@MODEL); `kv_events_replay` is where those that were missed can be asked
    for. `kv_host_memory` (bytes) and `kv_disk` (a folder of at most `kv_disk_size` bytes; 10 GiB) keep copies of KV
    blocks, for prompts that begin with what the device's cache has lost; those on disk outlive the process.
    A tenant is the name of an API key where a server has several, else a cache salt. `scheduling_policy` "fair" shares
    the work of steps among tenants, by their `tenant_weights` (1 for who is not named). Of the cache's blocks, cached
    prefixes of each tenant keep the share `tenant_cache_floor` while others press, and take `tenant_cache_cap` at most.
    `speculation` "ngram" guesses up to `num_speculative_tokens` tokens a step from the text so far and keeps those that
    the model chooses itself: the same answers in fewer steps where texts repeat. "auto" does so where the device gives
    a token the same logits beside any others.
    `runner` says what the model is for: "generate" text, or "pooling" (vectors, scores, classes); "auto" goes by its
    files. `pooler_config` goes before what the files say of pooling: `pooling_type`, `normalize`, `activation`,
    `matryoshka`.
    """

    model: str = DEFAULT_MODEL
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | Literal["auto"] | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    memory_utilization: float | None = None
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority", "fair"] = "fcfs"
    tenant_weights: dict[str, float] = {}
    tenant_cache_floor: float = 0.0
    tenant_cache_cap: float = 1.0
    seed: int = 0
    max_logprobs: int = 20
    max_waiting: int = 1024
    generation_config: str = "auto"
    chat_template: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    fuse: bool = True
    strict_ops: bool = False
    enforce_eager: bool = False
    require_graphs: bool = False
    speculation: Literal["auto", "off", "ngram"] = "auto"
    num_speculative_tokens: int = 4
    overlap: Literal["auto", "on", "off"] = "auto"
    num_threads: int | None = None
    kv_host_memory: int | None = None
    kv_disk: str | None = None
    kv_disk_size: int | None = None
    kv_events_endpoint: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str | None = None
    enable_lora: bool = False
    max_loras: int = 4
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_modules: dict[str, str] = {}
    lora_root: str | None = None
    device_options: dict[str, Any] = {}
    runner: Literal["auto", "generate", "pooling"] = "auto"
    pooler_config: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks", "kv_cache_memory", "num_threads"):
            self._at_least(name, 1)
        for name in ("kv_host_memory", "kv_disk_size"):
            self._at_least(name, 1)
        for name in ("long_prefill_token_threshold", "max_logprobs", "max_waiting"):
            self._at_least(name, 0)
        if isinstance(self.max_model_len, int):
            self._at_least("max_model_len", 1)
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ParameterError(f"block_size must be 8, 16, 32, 64 or 128, got {self.block_size}", param="block_size")
        share = self.memory_utilization
        if share is not None and not (math.isfinite(share) and 0 < share <= 1):
            raise ParameterError(
                f"memory_utilization must be above 0 and at most 1, got {share}", param="memory_utilization"
            )
        if self.dtype not in ("auto", "bfloat16", "float16", "float32"):
            raise ParameterError(f"dtype must be auto, bfloat16, float16 or float32, got {self.dtype!r}", param="dtype")
        if self.quantization not in (None, "auto", "gguf", "int8"):
            raise ParameterError(
                f"quantization must be auto, gguf or int8, got {self.quantization!r}", param="quantization"
            )
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ParameterError(
                f"kv_cache_dtype must be auto, {', '.join(KV_CACHE_DTYPES)}, got {self.kv_cache_dtype!r}",
                param="kv_cache_dtype",
            )
        if self.kv_cache_memory is not None and self.num_blocks is not None:
            raise ParameterError("give kv_cache_memory or num_blocks, not both", param="num_blocks")
        self._check_tenants()
        if self.runner not in ("auto", "generate", "pooling"):
            raise ParameterError(f"runner must be auto, generate or pooling, got {self.runner!r}", param="runner")
        check_pooler_config(self.pooler_config)
        for name in ("kv_host_memory", "kv_disk"):
            if getattr(self, name) is not None and not self.enable_prefix_caching:
                raise ParameterError(f"{name} keeps cached prefixes: it needs prefix caching", param=name)
        if self.kv_disk is not None and not self.kv_disk.strip():
            raise ParameterError("kv_disk must name a folder", param="kv_disk")
        self._check_adapters()
        if self.speculation not in ("auto", "off", "ngram"):
            told = f"speculation must be auto, off or ngram, got {self.speculation!r}"
            raise ParameterError(told, param="speculation")
        self._at_least("num_speculative_tokens", 1)
        if self.num_speculative_tokens > MAX_GUESSES:
            told = f"num_speculative_tokens must be at most {MAX_GUESSES}, got {self.num_speculative_tokens}"
            raise ParameterError(told, param="num_speculative_tokens")
        if self.overlap not in ("auto", "on", "off"):
            raise ParameterError(f"overlap must be auto, on or off, got {self.overlap!r}", param="overlap")
        if self.enforce_eager and self.require_graphs:
            raise ParameterError("give enforce_eager or require_graphs, not both", param="require_graphs")

    def _check_adapters(self) -> None:
        self._at_least("max_loras", 1)
        if self.max_lora_rank not in RANKS:
            told = f"max_lora_rank must be one of {', '.join(map(str, RANKS))}, got {self.max_lora_rank}"
            raise ParameterError(told, param="max_lora_rank")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            told = f"max_cpu_loras must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}"
            raise ParameterError(told, param="max_cpu_loras")
        for name in ("lora_modules", "lora_root"):
            if getattr(self, name) and not self.enable_lora:
                raise ParameterError(f"{name} needs enable_lora", param=name, fix="add --enable-lora")
        for name in self.lora_modules:
            check_adapter_name(name, "lora_modules")

    def _check_tenants(self) -> None:
        for tenant, weight in self.tenant_weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ParameterError(f"tenant_weights: {tenant!r} must have a weight above 0", param="tenant_weights")
        if self.tenant_weights and self.scheduling_policy != "fair":
            raise ParameterError("tenant_weights need the scheduling policy fair", param="tenant_weights")
        for name in ("tenant_cache_floor", "tenant_cache_cap"):
            if not 0 <= getattr(self, name) <= 1:
                raise ParameterError(f"{name} must be from 0 to 1, got {getattr(self, name)}", param=name)
        if self.tenant_cache_floor > self.tenant_cache_cap:
            raise ParameterError("tenant_cache_floor is above tenant_cache_cap", param="tenant_cache_floor")

    def _at_least(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if value is not None and value < low:
            raise ParameterError(f"{name} must be at least {low}, got {value}", param=name)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with nothing left open. `choices` lists what was decided for the user, as (setting, value, reason).

    `kv_cache_dtype` is torch's name of what keys and values are kept in, such as "float8_e4m3fn"; "" for a device that
    keeps its own cache and was not asked for any.
    `copies_blocks` says whether the device can copy a KV block, which sharing the last one of a prompt needs."""

    model: str
    model_path: str
    served_model_name: str
    device: str
    plugin: str
    dtype: str
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    scheduling_policy: Literal["fcfs", "priority", "fair"]
    seed: int
    max_logprobs: int
    quantization: str | None = None
    kv_cache_dtype: str = ""
    fuse: bool = True
    strict_ops: bool = False
    #: Compute threads that the user asked for; None leaves them to the device.
    num_threads: int | None = None
    copies_blocks: bool = True
    tenant_weights: dict[str, float] = {}
    tenant_cache_floor: float = 0.0
    tenant_cache_cap: float = 1.0
    speculation: Literal["off", "ngram"] = "off"
    num_speculative_tokens: int = 4
    enable_lora: bool = False
    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0
    lora_root: str | None = None
    choices: list[tuple[str, str, str]] = []
    #: What the model gives when it is one for pooling, None when it generates text.
    pooling: PoolingModel | None = None


class ReadyInfo(msgspec.Struct, kw_only=True):
    """What the engine process reports once the model is loaded. `ledger` maps an owner of memory to bytes."""

    config: EngineConfig
    ledger: dict[str, int]
    device_summary: str
    load_seconds: float
    details: dict[str, Any] = {}
    adapters: list[AdapterInfo] = []
