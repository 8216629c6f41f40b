"""Building an engine: device, model, memory budget, KV cache, runner. What can be refused is refused before
weights are read."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch

from enginecore.clock import Clock, VirtualClock
from enginecore.config import EngineArgs, EngineConfig, ReadyInfo
from enginecore.device import Backend, KVCacheSpec, ModelSpec
from enginecore.device.select import SelectedDevice, create_backend, select_device
from enginecore.engine.account import MemoryAccount
from enginecore.engine.engine import Engine
from enginecore.engine.graphs import capture_graphs, require_graphs
from enginecore.engine.kv_events import EventPublisher, open_publisher
from enginecore.engine.kv_transfer import allocate_caches, check_tiers, open_tiers
from enginecore.engine.nearest import nearest_settings
from enginecore.engine.resolve import (
    Choices,
    Settings,
    fit_blocks,
    model_size,
    resolve_max_model_len,
    resolve_settings,
)
from enginecore.errors import KVCacheTooSmall, ModelError, UnsupportedError
from enginecore.models.inspect import ModelShape, inspect_meta, inspect_model
from enginecore.models.loader import load_model
from enginecore.models.quantization import quantization_reasons
from enginecore.models.store import ModelFiles, resolve_model
from enginecore.ops.dispatch import Ops
from enginecore.parallel.executor import InprocExecutor
from enginecore.runner import ModelRunner
from enginecore.runner.exhausted import MemoryGuard
from enginecore.runner.graphs import GraphPlan, plan_graphs
from enginecore.runner.model import PagedModel, RuntimeModel, StepModel, runtime_copies_blocks
from enginecore.runner.profile import can_measure, measure_activations

logger = logging.getLogger("enginecore.engine")

#: Settings that the engine runs on as they were given.
_UNCHANGED = (
    "long_prefill_token_threshold", "block_size", "enable_prefix_caching", "scheduling_policy", "seed", "max_logprobs",
    "fuse", "strict_ops", "tenant_weights", "tenant_cache_floor", "tenant_cache_cap",
)  # fmt: skip


@dataclass
class _Site:
    """What the building steps share."""

    args: EngineArgs
    files: ModelFiles
    selected: SelectedDevice
    backend: Backend
    settings: Settings
    choices: Choices
    kv_specs: list[KVCacheSpec] = field(default_factory=list)
    #: What the largest step took beside weights and cache, None as long as it is not measured.
    activation_bytes: int | None = None
    loaded_bytes: int = 0


def build_engine(args: EngineArgs, clock: Clock | None = None) -> tuple[Engine, ReadyInfo]:
    """An engine that is ready to step, and what was decided on the way. `clock` passes the time of steps that a
    simulated device models; a virtual one needs such a device.

    Raises ModelError, DeviceError kinds, UnsupportedError, KVCacheTooSmall or ParameterError, each with a fix.
    """
    begun = time.perf_counter()
    site = _open_site(args, clock)
    check_tiers(site)
    publisher = open_publisher(args, site.files.name)
    try:
        engine = _assemble(site, clock, publisher)
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise
    selected = site.selected
    ready = ReadyInfo(
        config=engine.config,
        ledger=engine.ledger,
        device_summary=f"{selected.device} ({selected.plugin.label})",
        load_seconds=time.perf_counter() - begun,
        details={
            **(selected.probe.details if selected.probe else {}),
            "batch_invariant": site.backend.capabilities.batch_invariant,
        },
    )
    return engine, ready


def _assemble(site: _Site, clock: Clock | None, publisher: EventPublisher | None) -> Engine:
    backend = site.backend
    ops = Ops(backend.ops, strict=site.args.strict_ops)
    if backend.runtime is not None:
        model, config, ledger, caches = _load_runtime(site)
    else:
        model, config, ledger, caches = _load_paged(site, ops)
    runner = ModelRunner(
        model,
        device=backend.torch_device(),
        ops=ops,
        vocab_size=config.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
    )
    worker = MemoryGuard(runner, backend)

    def release() -> None:
        if backend.graphs is not None:
            backend.graphs.release()
        backend.memory.release_kv(caches)
        backend.shutdown()

    engine = Engine(config, InprocExecutor(worker, release), clock, publisher, runner.grammars.store)
    engine.ledger = ledger
    engine.account = MemoryAccount(ledger, site.loaded_bytes, backend.memory, caches)
    engine.use_tiers(open_tiers(site, config, caches, engine.scheduler))
    return engine


def plan_engine(args: EngineArgs) -> ReadyInfo:
    """What `build_engine` would decide, without reading weights or taking memory: the ledger is a prediction.

    Raises what `build_engine` raises for settings that cannot work.
    """
    begun = time.perf_counter()
    site = _open_site(args, None)
    try:
        if site.backend.runtime is not None:
            _, config, ledger = _size_runtime(site)
        else:
            shape = inspect_model(site.files, site.settings.dtype)
            _refuse_unsupported(site, shape)
            before = site.backend.memory.process_used_bytes()
            config, ledger, _ = _size_paged(site, shape, before, shape.weight_bytes)
    finally:
        site.backend.shutdown()
    summary = f"{site.selected.device} ({site.selected.plugin.label})"
    seconds = time.perf_counter() - begun
    return ReadyInfo(config=config, ledger=ledger, device_summary=summary, load_seconds=seconds)


def _open_site(args: EngineArgs, clock: Clock | None) -> _Site:
    """Choose the device, find the model and resolve the settings; no weights, no memory."""
    choices = Choices()
    selected = select_device(args.device)
    if args.device == "auto":
        choices.note("device", selected.full_name, selected.probe.reason if selected.probe else "selected")
    backend = create_backend(selected, num_threads=args.num_threads, options=args.device_options)
    backend.set_device(selected.index)
    if isinstance(clock, VirtualClock) and (backend.runtime is None or backend.runtime.step_seconds() is None):
        raise UnsupportedError(
            f"{selected.device} ({selected.plugin.label}) models no time as it is, so time cannot be virtual",
            fix="name what a simulated device shall model, such as --profile h100",
        )
    files = _find_model(args, backend)
    settings = resolve_settings(args, selected, files.config, backend.capabilities.dtypes, choices)
    return _Site(args, files, selected, backend, settings, choices)


def _find_model(args: EngineArgs, backend: Backend) -> ModelFiles:
    """The model's files, unless the device brings a model of that name itself."""
    config = backend.runtime.model_config(args.model) if backend.runtime is not None else None
    if config is not None:
        return ModelFiles(args.model, args.model, "runtime", config)
    return resolve_model(
        args.model, progress=logger.info, allow_pickle=args.allow_pickle, trust_remote_code=args.trust_remote_code
    )


def _load_runtime(site: _Site) -> tuple[StepModel, EngineConfig, dict[str, int], list[torch.Tensor]]:
    runtime = site.backend.runtime
    assert runtime is not None
    require_graphs(site, "its plugin runs whole models itself")
    spec, resolved, ledger = _size_runtime(site)
    runtime.load(spec, None)
    if "kv_cache" not in ledger:
        ledger["runtime"] = runtime.memory_bytes()
    return RuntimeModel(runtime), resolved, ledger, []


def _size_runtime(site: _Site) -> tuple[ModelSpec, EngineConfig, dict[str, int]]:
    """A backend that runs whole models keeps its own cache; unless it plans its memory, blocks cost nothing and their
    number comes from the args."""
    config, runtime = site.files.config, site.backend.runtime
    assert runtime is not None
    vocab_size = model_size(config, "vocab_size")
    if not vocab_size:
        raise ModelError(f"the config.json of {site.files.name} has no vocab_size")
    max_positions = model_size(config, "max_position_embeddings") or 2**20
    max_model_len = resolve_max_model_len(site.args, max_positions, site.choices)
    spec = ModelSpec(
        name=site.files.name,
        config=config,
        dtype=site.settings.dtype,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        max_num_seqs=site.settings.max_num_seqs,
        num_blocks=0,
        block_size=site.args.block_size,
        max_num_batched_tokens=site.settings.max_num_batched_tokens,
    )
    memory = runtime.memory_plan(spec)
    if memory is None:
        block_bytes, available = 1, -(-max_model_len // spec.block_size) * spec.max_num_seqs
        ledger = {}
    else:
        before = site.backend.memory.process_used_bytes()
        ledger = _split_budget(site, before, memory.weight_bytes, memory.activation_bytes)
        block_bytes, available = memory.block_bytes, ledger["kv_cache"]
        if available < 0:
            raise KVCacheTooSmall(
                f"the weights ({memory.weight_bytes} bytes) and the largest step ({memory.activation_bytes} bytes) "
                f"exceed the budget of {ledger['budget']} bytes",
                fix="choose a larger device or several, raise memory_utilization, or lower max_num_batched_tokens",
            )
    num_blocks, max_model_len = fit_blocks(
        site.args, max_model_len, block_bytes, available, spec.max_num_seqs, site.choices
    )
    resolved = _engine_config(site, vocab_size, max_model_len, num_blocks)
    if memory is not None:
        ledger["kv_cache"] = num_blocks * block_bytes
    return replace(spec, max_model_len=max_model_len, num_blocks=num_blocks), resolved, ledger


def _load_paged(site: _Site, ops: Ops) -> tuple[StepModel, EngineConfig, dict[str, int], list[torch.Tensor]]:
    args, backend, settings = site.args, site.backend, site.settings
    memory = backend.memory
    quantization = None if args.quantization == "auto" else args.quantization
    shape, _ = inspected = inspect_meta(site.files, settings.dtype)
    _refuse_unsupported(site, shape)
    assert backend.attention is not None
    if reason := backend.attention.reference_reason():
        ops.note_reference("attention", reason)
    graphs = _plan_graphs(site, shape)
    if not graphs.keys:
        require_graphs(site, graphs.reason)
    max_model_len = resolve_max_model_len(args, shape.max_positions, Choices())
    specs = shape.kv_specs(args.block_size)
    usable = memory.memory_info().usable_bytes
    if args.kv_cache_memory is not None and args.kv_cache_memory > usable:
        raise KVCacheTooSmall(
            f"kv_cache_memory asks for {args.kv_cache_memory} bytes; the device has {usable} usable",
            fix="lower kv_cache_memory",
        )
    explicit = args.num_blocks is not None or args.kv_cache_memory is not None
    if explicit:  # refused before the weights are read
        fit_blocks(args, max_model_len, _block_bytes(site, specs), None, settings.max_num_seqs, Choices())

    before = memory.process_used_bytes()
    model = load_model(
        site.files,
        backend=backend,
        dtype=settings.dtype,
        fuse=args.fuse,
        ops=ops,
        max_model_len=max_model_len,
        quantization=quantization,
        inspected=inspected,
    )
    site.loaded_bytes = memory.process_used_bytes() - before
    if not explicit and can_measure(backend):
        sizes = settings.max_num_batched_tokens, settings.max_num_seqs, max_model_len
        caches = allocate_caches(backend, shape, specs, 1)
        site.activation_bytes = measure_activations(model, backend, ops, caches, *sizes)
    config, ledger, specs = _size_paged(site, shape, before, model.weight_bytes)
    free = memory.memory_info().free_bytes
    if ledger["kv_cache"] > free:
        raise KVCacheTooSmall(
            f"the KV cache needs {ledger['kv_cache']} bytes and {free} are free: other processes hold the rest",
            fix="stop them, or lower memory_utilization, kv_cache_memory or num_blocks",
        )
    caches = allocate_caches(backend, shape, specs, config.num_blocks)
    paged = PagedModel(model, backend, caches)
    graphed = capture_graphs(site, paged, graphs, ledger, config.max_model_len)
    return graphed, msgspec.structs.replace(config, choices=site.choices.made), ledger, caches


def _plan_graphs(site: _Site, shape: ModelShape) -> GraphPlan:
    def activation_bytes(tokens: int) -> int:
        return _activation_bytes(site, shape, tokens, tokens)

    enforce_eager = site.args.enforce_eager
    return plan_graphs(site.backend, site.settings.max_num_seqs, activation_bytes, enforce_eager=enforce_eager)


def _block_bytes(site: _Site, specs: list[KVCacheSpec]) -> int:
    """Of one KV block, over all layers."""
    attention = site.backend.attention
    assert attention is not None
    return sum(attention.kv_cache_layout(spec).page_bytes * spec.num_layers for spec in specs)


def _size_paged(
    site: _Site, shape: ModelShape, before: int, weight_bytes: int
) -> tuple[EngineConfig, dict[str, int], list[KVCacheSpec]]:
    """The configuration, the ledger and what the cache holds, for weights of that many bytes."""
    max_model_len = resolve_max_model_len(site.args, shape.max_positions, site.choices)
    site.kv_specs = specs = shape.kv_specs(site.args.block_size)
    block_bytes = _block_bytes(site, specs)
    ledger = _ledger(site, shape, before, weight_bytes)
    num_blocks, max_model_len = fit_blocks(
        site.args, max_model_len, block_bytes, ledger["kv_cache"], site.settings.max_num_seqs, site.choices
    )
    ledger["kv_cache"] = num_blocks * block_bytes
    return _engine_config(site, shape.vocab_size, max_model_len, num_blocks), ledger, specs


def _refuse_unsupported(site: _Site, shape: ModelShape) -> None:
    """All reasons at once, before weights are read."""
    capabilities, attention = site.backend.capabilities, site.backend.attention
    assert attention is not None
    reasons: list[str] = []
    if site.settings.dtype not in capabilities.dtypes:
        reasons.append(f"dtype {site.settings.dtype} is not one of {sorted(capabilities.dtypes)}")
    quantization = None if site.args.quantization == "auto" else site.args.quantization
    reasons += quantization_reasons(site.files, quantization, capabilities)
    for query in shape.attention_queries(site.args.block_size):
        unknown = query.features - capabilities.features
        known = replace(query, features=query.features & capabilities.features)
        reasons += [f"feature {name} is not supported" for name in sorted(unknown)]
        reasons += attention.supports(known).reasons
    if reasons:
        raise UnsupportedError(
            f"{site.selected.device} ({site.selected.plugin.label}) cannot run {site.files.name}",
            reasons=tuple(dict.fromkeys(reasons)),
            fix=nearest_settings(capabilities, site.settings.dtype, site.args.block_size),
        )


def _ledger(site: _Site, shape: ModelShape, before: int, weight_bytes: int) -> dict[str, int]:
    """Who owns which bytes of this process's budget; `kv_cache` is what is left for the cache.

    Activations are those of the largest step. `graphs`, where there will be any, is reserved for what they may hold.
    """
    activations = site.activation_bytes
    if activations is None:
        activations = _activation_bytes(site, shape, site.settings.max_num_batched_tokens, site.settings.max_num_seqs)
    graphs = _plan_graphs(site, shape)
    reserved = {"graphs": graphs.budget_bytes} if graphs.keys else {}
    return _split_budget(site, before, weight_bytes, activations, reserved)


def _activation_bytes(site: _Site, shape: ModelShape, tokens: int, rows: int) -> int:
    """An estimate of what a step needs: hidden states and the two widest products of each token, and float32 logits
    (twice, for the sampler's copy) of each row."""
    itemsize = 4 if site.settings.dtype == "float32" else 2
    width = 8 * shape.hidden_size + 4 * (model_size(site.files.config, "intermediate_size") or 4 * shape.hidden_size)
    return tokens * width * itemsize + rows * shape.vocab_size * 8


def _split_budget(
    site: _Site, before: int, weight_bytes: int, activation_bytes: int, reserved: dict[str, int] | None = None
) -> dict[str, int]:
    """The process's budget by owner, the cache last. `before` are the bytes that were in use before loading;
    `reserved` are further owners."""
    info = site.backend.memory.memory_info()
    budget = int(site.settings.memory_utilization * info.usable_bytes)
    base = min(before, budget)
    return {
        "usable": info.usable_bytes,
        "budget": budget,
        "process_base": base,
        "weights": weight_bytes,
        "activations": activation_bytes,
        **(reserved or {}),
        "kv_cache": budget - base - weight_bytes - activation_bytes - sum((reserved or {}).values()),
    }


def _engine_config(site: _Site, vocab_size: int, max_model_len: int, num_blocks: int) -> EngineConfig:
    args, settings = site.args, site.settings
    values: dict[str, Any] = {name: getattr(args, name) for name in _UNCHANGED}
    return EngineConfig(
        model=args.model,
        model_path=site.files.path,
        served_model_name=args.served_model_name or site.files.name,
        device=site.selected.device,
        plugin=site.selected.plugin.label,
        dtype=settings.dtype,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_blocks=num_blocks,
        quantization=None if args.quantization == "auto" else args.quantization,
        copies_blocks=site.backend.runtime is None or runtime_copies_blocks(site.backend.runtime),
        choices=site.choices.made,
        **values,
    )
