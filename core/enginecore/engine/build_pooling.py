"""Building the engine of a pooling model: weights, a scratch cache for one step, a runner. What can be refused is
refused before weights are read."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from enginecore.config import EngineConfig, ReadyInfo
from enginecore.device import KVCacheSpec
from enginecore.engine.account import MemoryAccount
from enginecore.engine.pooling import PoolingEngine
from enginecore.engine.resolve import resolve_max_model_len
from enginecore.engine.site import Site, refuse_unsupported
from enginecore.engine.sizing import engine_config, estimate_activations, split_budget
from enginecore.errors import KVCacheTooSmall, UnsupportedError
from enginecore.models.inspect import ModelShape
from enginecore.models.pooling import Inspected, inspect_pooling, load_pooling
from enginecore.ops.dispatch import Ops
from enginecore.pooling import PoolingModel
from enginecore.runner.pooling import Dense, Pooler, PoolingRunner

#: Settings of a KV cache that is kept between steps, which a pooling model has no use for.
_NO_USE = ("kv_cache_memory", "kv_cache_dtype", "num_blocks", "kv_host_memory", "kv_disk", "kv_events_endpoint")


def build_pooling(site: Site, model: PoolingModel, begun: float) -> tuple[PoolingEngine, ReadyInfo]:
    """An engine that is ready to step, and what was decided. `begun` is when building began (`time.perf_counter`).

    Raises ModelError, UnsupportedError, KVCacheTooSmall or ParameterError.
    """
    found = _inspect(site, model)
    backend, shape = site.backend, found.shape
    before = backend.memory.process_used_bytes()
    ops = Ops(backend.ops, strict=site.args.strict_ops)
    quantization = None if site.args.quantization == "auto" else site.args.quantization
    classifier = "classify" in model.tasks
    net = load_pooling(site.files, found, backend=backend, ops=ops, classifier=classifier, quantization=quantization)
    site.loaded_bytes = backend.memory.process_used_bytes() - before
    dense = [Dense(Path(site.files.path) / folder, backend.torch_device()) for folder in model.dense]
    config, ledger = _size(site, model, shape, before, net.weight_bytes)
    caches, scratch = _scratch(site, shape, _num_blocks(site, config))
    runner = PoolingRunner(net, Pooler(model, dense), backend, caches, site.args.block_size)

    def release() -> None:
        backend.memory.release_kv(scratch)
        backend.shutdown()

    ready = _ready(site, config, ledger, begun)
    engine = PoolingEngine(
        ready.config,
        runner,
        account=MemoryAccount(ledger, site.loaded_bytes, backend.memory, []),
        reference_ops=lambda: sorted(ops.fallbacks),
        out_of_memory=backend.memory.out_of_memory,
        make_room=backend.memory.empty_cache,
        release=release,
    )
    return engine, ready


def plan_pooling(site: Site, model: PoolingModel, begun: float) -> ReadyInfo:
    """What `build_pooling` would decide, without reading weights."""
    shape = _inspect(site, model).shape
    before = site.backend.memory.process_used_bytes()
    return _ready(site, *_size(site, model, shape, before, shape.weight_bytes), begun)


def _inspect(site: Site, model: PoolingModel) -> Inspected:
    args = site.args
    if site.backend.runtime is not None:
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) cannot run {site.files.name}",
            reasons=("its plugin runs whole models itself, and models for pooling are not among them",),
        )
    if args.enable_lora:
        raise UnsupportedError("adapters are not supported on models for pooling", fix="leave --enable-lora out")
    for name in (name for name in _NO_USE if getattr(args, name) not in (None, "auto")):
        site.choices.note(name, "unused", "a pooling model keeps nothing between steps")
    if args.dtype == "auto" and site.settings.dtype != "float32" and _stored_in_float32(site):
        site.settings = replace(site.settings, dtype="float32")
        site.choices.note("dtype", "float32", "the checkpoint's own; vectors are compared to the last digits")
    site.settings = replace(site.settings, kv_dtype=site.settings.dtype)
    found = inspect_pooling(site.files, site.settings.dtype, classifier="classify" in model.tasks)
    refuse_unsupported(site, found.shape)
    return found


def _stored_in_float32(site: Site) -> bool:
    own = str(site.files.config.get("dtype") or site.files.config.get("torch_dtype") or "float32")
    return own.removeprefix("torch.") == "float32" and "float32" in site.backend.capabilities.dtypes


def _size(
    site: Site, model: PoolingModel, shape: ModelShape, before: int, weight_bytes: int
) -> tuple[EngineConfig, dict[str, int]]:
    """The configuration and who owns which bytes; `scratch` holds the keys and values of a step's tokens."""
    args, settings = site.args, site.settings
    max_model_len = resolve_max_model_len(args, shape.max_positions, site.choices)
    if args.max_model_len is None and 0 < model.max_tokens < max_model_len:
        max_model_len = model.max_tokens
        site.choices.note("max_model_len", max_model_len, "what the model's own settings say")
    config = engine_config(site, shape.vocab_size, max_model_len, 0)
    config = msgspec.structs.replace(config, pooling=model, kv_cache_dtype="")
    attention = site.backend.attention
    assert attention is not None
    pages = sum(attention.kv_cache_layout(spec).page_bytes for spec in _specs(site, shape))
    tokens = max(settings.max_num_batched_tokens, max_model_len)
    scratch = pages * _num_blocks(site, config)
    activations = estimate_activations(site, shape, tokens, 0)
    ledger = split_budget(site, before, weight_bytes, activations, {"scratch": scratch})
    if ledger.pop("kv_cache") < 0:
        raise KVCacheTooSmall(
            f"the weights ({weight_bytes} bytes) and the largest step ({activations + scratch} bytes) exceed the "
            f"budget of {ledger['budget']} bytes",
            fix="raise memory_utilization, or lower max_num_batched_tokens or max_model_len",
        )
    return config, ledger


def _specs(site: Site, shape: ModelShape) -> list[KVCacheSpec]:
    """One attention call of each shape: the next call of it writes over the same cache."""
    return [replace(spec, num_layers=1) for spec in shape.kv_specs(site.args.block_size)]


def _num_blocks(site: Site, config: EngineConfig) -> int:
    """Enough for the largest step, each of whose texts begins with a block of its own."""
    tokens = max(config.max_num_batched_tokens, config.max_model_len)
    return -(-tokens // site.args.block_size) + config.max_num_seqs


def _scratch(site: Site, shape: ModelShape, num_blocks: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(the cache of each attention call in their order, the caches that there are)."""
    backend = site.backend
    assert backend.attention is not None
    made = {}
    for spec in _specs(site, shape):
        layout = backend.attention.kv_cache_layout(spec)
        (made[spec.num_kv_heads, spec.head_size],) = backend.memory.allocate_kv(layout, num_blocks, 1)
    return [made[call.num_kv_heads, call.head_size] for call in shape.calls], list(made.values())


def _ready(site: Site, config: EngineConfig, ledger: dict[str, int], begun: float) -> ReadyInfo:
    selected = site.selected
    last = {choice[0]: choice for choice in site.choices.made}  # what was decided twice counts as it is
    return ReadyInfo(
        config=msgspec.structs.replace(config, choices=list(last.values())),
        ledger=ledger,
        device_summary=f"{selected.device} ({selected.plugin.label})",
        load_seconds=time.perf_counter() - begun,
        details={
            **(selected.probe.details if selected.probe else {}),
            "batch_invariant": site.backend.capabilities.batch_invariant,
        },
    )
